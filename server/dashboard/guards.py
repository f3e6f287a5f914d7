"""Who gets an answer: requests that name this machine, or that bring the token; how many at a time; the headers of every answer."""

import hmac
import json
import os
import re
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fedgauge.server.dashboard.connections import HEAD_BYTES
from fedgauge.server.dashboard.peers import user_in_tables, user_of

LOOPBACK = ("127.0.0.1", "localhost", "::1")
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
EVENTS = "/api/events"
STREAMS = 100  # open at a time
REQUESTS = 128  # answered or waiting to be, at a time
CLOSE = {"Connection": "close"}  # who is refused holds no connection
SOON = {"Retry-After": "2", **CLOSE}  # seconds


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


class Places:
    """So many at a time, and half of them for one address."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken = Counter[str]()

    @contextmanager
    def one(self, address: str) -> Iterator[bool]:
        """A place, as long as it is used; False: none is free."""
        if self._taken.total() >= self.most or self._taken[address] >= self.most // 2:
            yield False
            return
        self._taken[address] += 1
        try:
            yield True
        finally:
            self._taken[address] -= 1
            self._taken = +self._taken  # an address of which there is none is forgotten


class WellFormed:
    """Answers requests without a body, of few words; others are refused."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := _malformed(scope)) is not None:
            status, words = refused
            await refusal(Request(scope), words, status, CLOSE)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class Bounded:
    """Answers so many requests at a time; others are refused."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.streams, self.requests = Places(STREAMS), Places(REQUESTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        places, what = (self.streams, "streams are open") if scope["path"] == EVENTS else (self.requests, "requests")
        with places.one((scope.get("client") or ("",))[0]) as free:
            if free:
                await self.app(scope, receive, send)
            else:
                words = f"too many {what} at a time ({places.most}, half of them from one address): try again soon"
                await refusal(Request(scope), words, 503, SOON)(scope, receive, send)


def _malformed(scope: Scope) -> tuple[int, str] | None:
    """The status and the words for a request that nothing here can be asked by."""
    if not scope["path"].startswith("/"):
        return 400, "this server answers requests for its own paths alone"
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in scope["headers"])
    if size > HEAD_BYTES:
        return 431, f"the request has {size} bytes: at most {HEAD_BYTES} are read"
    given = {key: value for key, value in scope["headers"] if key in (b"content-length", b"transfer-encoding")}
    if given.get(b"content-length", b"0").strip(b"0") or b"transfer-encoding" in given:
        return 413, "this page only shows: a request with a body is refused"
    return None


_HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?", re.IGNORECASE)


def host_of(scope: Scope) -> tuple[str, int] | None:
    """The host and port that a request names; None if it names none, or several.

    Starlette would take the server's own address instead of a name that it cannot read, and a browser may send such names.
    """
    named = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
    found = _HOST.fullmatch(named[0]) if len(named) == 1 else None
    return found and (found["name"].strip("[]").lower(), int(found["port"] or 80))


async def _is_ours(scope: Scope) -> bool:
    """Whether this user, or root, asks; True where the system does not say who does."""
    client, server = scope["client"], scope["server"]
    if sys.platform != "linux" or server[1] is None:  # asked within this process
        return True
    if client is None:  # who asked is gone
        return False
    peer: dict[str, int | None] = scope.get("state", {}).get("peer", {})
    if "user" not in peer:
        try:
            peer["user"] = user_of(client, server)
        except OSError:
            peer["user"] = await run_in_threadpool(user_in_tables, client, server)
    return peer["user"] in (0, os.getuid())


class OwnHost:
    """Answers only requests of this user that name this machine.

    Other users of the machine reach its loopback address, too, and another site's page could let its own host name point here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif (host_of(scope) or ("",))[0] not in LOOPBACK:
            words = f"open this page as {' or '.join(LOOPBACK[:2])}, or start it with a token (--token)"
            await refusal(Request(scope), words, 400, CLOSE)(scope, receive, send)
        elif not await _is_ours(scope):
            words = "this page shows another user's runs, or it is not known who asks: start it with a token (--token)"
            await refusal(Request(scope), words, 403, CLOSE)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class TokenGate:
    """Requires the token: once in the address, later in a cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.token = token
        # of this start alone: a cookie outlives the page, and its port may be somebody else's by then
        self.mark = hmac.digest(secrets.token_bytes(32), token.encode(), "sha256").hex()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        cookie = f"fedgauge-{(host_of(scope) or ('', 80))[1]}"  # browsers share cookies between the ports of a host
        given = request.query_params.get("token")
        if given is not None and self._right(given):
            response = Response(status_code=303, headers={"Location": _without_token(request)})
            response.set_cookie(cookie, self.mark, httponly=True, samesite="strict")
            await response(scope, receive, send)
        elif _equal(request.cookies.get(cookie, ""), self.mark) or self._right(_bearer(request)):
            await self.app(scope, receive, send)
        else:
            words = (
                "this page needs its token: open the address that `fedgauge watch` printed, with ?token=... at its end"
            )
            await refusal(request, words, 401, CLOSE)(scope, receive, send)

    def _right(self, given: str) -> bool:
        return _equal(given, self.token)


def _without_token(request: Request) -> str:
    """The same address without the token: always a path, as two slashes at the beginning would name another host."""
    query = urlencode([(k, v) for k, v in request.query_params.multi_items() if k != "token"])
    return f"/{quote(request.scope['path'].lstrip('/'))}{'?' if query else ''}{query}"


def _equal(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode(), known.encode())


def _bearer(request: Request) -> str:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return given if kind.lower() == "bearer" else ""


class Json(JSONResponse):
    """An answer as JSON; names and words in a run may hold what is no letter of UTF-8, which becomes a question mark."""

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


def refusal(request: Request, words: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    if request.scope["path"].startswith("/api/"):
        return Json({"error": words}, status, headers)
    return PlainTextResponse(f"fedgauge: {words}\n".encode(errors="replace"), status, headers)
