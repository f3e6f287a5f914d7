"""Who gets an answer: requests that name this machine, or that bring the token; and the headers of every answer."""

import hmac
from hashlib import sha256
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    # Plotly sets inline styles; nothing may be loaded from, or sent to, anywhere else
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",  # the page shows personal data, which no browser may cache
}


class Headers:
    """Adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)


class OwnHost:
    """Answers only requests that name this machine: another site's page could let its own host name point here."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or Request(scope).url.hostname in LOOPBACK:
            await self.app(scope, receive, send)
        else:
            words = f"open this page as {' or '.join(LOOPBACK[:2])}, or start it with a token (--token)"
            await refusal(Request(scope), words, 400)(scope, receive, send)


class TokenGate:
    """Requires the token: once in the address, later in a cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.token = token
        self.mark = sha256(token.encode()).hexdigest()  # hashed, as a cookie cannot hold every character

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        cookie = f"fedgauge-{request.url.port or 80}"  # browsers share cookies between the ports of a host
        given = request.query_params.get("token")
        if given is not None and self._right(given):
            without = request.url.remove_query_params("token")
            response: Response = RedirectResponse(f"{without.path}{'?' if without.query else ''}{without.query}", 303)
            response.set_cookie(cookie, self.mark, httponly=True, samesite="strict")
            await response(scope, receive, send)
        elif _equal(request.cookies.get(cookie, ""), self.mark) or self._right(_bearer(request)):
            await self.app(scope, receive, send)
        else:
            words = (
                "this page needs its token: open the address that `fedgauge watch` printed, with ?token=... at its end"
            )
            await refusal(request, words, 401)(scope, receive, send)

    def _right(self, given: str) -> bool:
        return _equal(given, self.token)


def _equal(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode(), known.encode())


def _bearer(request: Request) -> str:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return given if kind.lower() == "bearer" else ""


def refusal(request: Request, words: str, status: int) -> Response:
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": words}, status)
    return PlainTextResponse(f"fedgauge: {words}\n", status)
