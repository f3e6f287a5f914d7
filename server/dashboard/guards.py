"""The guard before every answer of the page: it asks for the token, and forbids the browser to load or send anything elsewhere."""

import hmac
import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import quote, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    # Plotly sets inline styles; nothing may be loaded from, or sent to, anywhere else
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",  # the page shows personal data, which no browser may cache
}


class Guard:
    """Require the token (once in the address, then in a cookie, or as a bearer token), and add HEADERS to every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.token = token
        self.digest = sha256(token.encode()).hexdigest()  # the cookie's value, as a token may have any characters
        self.cookie = f"fedgauge-{self.digest[:8]}"  # browsers share cookies between the ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._answer(Request(scope))(scope, receive, with_headers)

    def _answer(self, request: Request) -> ASGIApp:
        """Return the app for a visitor with the token, a redirect without the token in the address, or a refusal."""
        if _equal(request.query_params.get("token", ""), self.token):
            rest = urlencode([item for item in request.query_params.multi_items() if item[0] != "token"])
            path = quote(request.scope["path"].lstrip("/"))  # two slashes would name another host
            redirect = RedirectResponse(f"/{path}?{rest}".rstrip("?"), 303)
            redirect.set_cookie(self.cookie, self.digest, httponly=True, samesite="lax")
            return redirect
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _equal(request.cookies.get(self.cookie, ""), self.digest) or _equal(bearer, self.token):
            return self.app
        needed = "this page needs its token: open the address that `fedgauge watch` printed, with ?token=... at its end"
        return refusal(request, needed, 401)


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


class Json(JSONResponse):
    """An answer as JSON; a run's names may hold characters that UTF-8 cannot encode, which become question marks."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


def refusal(request: Request, reason: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return the reason as JSON to a script, as text to a reader."""
    if request.url.path.startswith("/api/"):
        return Json({"error": reason}, status, headers)
    return PlainTextResponse(f"fedgauge: {reason}\n".encode(errors="replace"), status, headers)
