"""The page's web server: views as JSON, the page itself, and the version by which it sees changes."""

import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.client.components import SpecError
from fedgauge.server.dashboard import STATIC
from fedgauge.server.dashboard.guards import Guard, Json, refusal
from fedgauge.server.dashboard.runs import OPEN, RunCatalog, UnknownRun
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.views.compare import Comparison
from fedgauge.server.views.gallery import Gallery, Page
from fedgauge.server.views.leak_tables import clients
from fedgauge.server.views.overview import Overview
from fedgauge.server.views.snapshot import RunSnapshot, viewed
from fedgauge.server.views.tables import in_json

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# names of this machine in a Host header; the middleware cuts [::1] at its first colon
NAMES = ("127.0.0.1", "localhost", "[")


def make_app(path: Path, token: str = "", hosts: Sequence[str] = NAMES) -> Starlette:
    """Build the page of a folder of runs, or of one run.

    Args:
        token: required of every request; empty: a fresh one, in `state.token`.
        hosts: allowed names in a Host header.
    """
    catalog = RunCatalog(path)
    token = token or secrets.token_urlsafe(24)

    app = Starlette(
        routes=_routes(),
        middleware=[
            Middleware(Guard, token=token),
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),  # Plotly's script in .1 s
        ],
        exception_handlers=dict.fromkeys((UnknownRun, LedgerError, OSError, HTTPException), _refused),
    )
    app.state.catalog, app.state.token = catalog, token
    return app


def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return refusal(request, str(error.detail), error.status_code, error.headers)
    return refusal(request, str(error), 404 if isinstance(error, UnknownRun) else 503)


def serve(path: Path, host: str, port: int | None, token: str, ready: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Args:
        port: default: PORT, or a free one if that is taken.
        token: empty: a fresh one.
        ready: called with the address to open, which contains the token.

    Raises:
        SpecError: the address is not available; the message says what to do.
    """
    app = make_app(path, token, NAMES if host in LOOPBACK else ("*",))
    listening = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    opened = f"http://{shown}:{listening.getsockname()[1]}/{app.state.catalog.first_page}"
    ready(f"{opened}?token={quote(app.state.token, safe='')}")
    page_server(app).run(sockets=[listening])


def page_server(app: Starlette) -> uvicorn.Server:
    """Return a server that logs no request, as an address may hold the token."""
    quiet: dict[str, Any] = {"log_config": None, "log_level": "error", "access_log": False, "server_header": False}
    return uvicorn.Server(uvicorn.Config(app, ws="none", timeout_graceful_shutdown=2, **quiet))


PORT = 8765


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for tried in [port] if port is not None else [PORT, 0]:
        try:
            return socket.create_server((host, tried), family=family, backlog=128)
        except OSError as error:
            refused, advice = error, "choose another --port" if tried else "choose another --host"
    raise SpecError(f"cannot listen on {host}:{tried} ({refused.strerror}): {advice}") from refused


def _routes() -> list[Route | Mount]:
    pages = ["/", "/compare", "/run/{id}", "/run/{id}/gallery", "/run/{id}/clients"]
    run = "/api/runs/{id}"
    return [
        *(Route(path, _page) for path in pages),
        Route("/api/runs", _runs),
        Route(f"{run}/overview", _view(lambda reading, asked: _overview(reading))),
        Route(f"{run}/gallery", _view(_gallery)),
        Route(f"{run}/clients", _view(lambda reading, asked: clients(reading))),
        Route("/api/compare", _compare),
        Route("/api/version", _version),
        Mount("/static", StaticFiles(directory=STATIC)),
        Mount("/plotly", StaticFiles(packages=[("plotly", "package_data")])),
    ]


Asked = Mapping[str, str]  # the query's parameters as text, and those in the address


def _view(make: Callable[[RunSnapshot, Asked], Any]) -> Callable[[Request], Any]:
    """Wrap a view of a run, with the run's state."""

    def answer(request: Request) -> Response:
        asked, catalog = _query(request), request.app.state.catalog
        return Json(catalog.use(asked["id"], lambda r: {**in_json(make(r, asked)), "state": r.state}))

    return answer


@viewed
def _overview(reading: RunSnapshot) -> Any:
    return in_json(Overview(reading))


_gallery_of = viewed(Gallery)


def _gallery(reading: RunSnapshot, asked: Asked) -> Page:
    gallery = _gallery_of(reading)
    round = gallery.rounds[-1] if gallery.rounds else None
    if "round" in asked:
        round = None if asked["round"] == "all" else _number(asked, "round")
    return gallery.page(round, _number(asked, "client"), _number(asked, "offset") or 0)


def _runs(request: Request) -> Response:
    catalog: RunCatalog = request.app.state.catalog
    return Json({"folder": catalog.root.name, "runs": in_json(catalog.lines())})


def _compare(request: Request) -> Response:
    asked = _query(request)
    metric = asked.get("metric")
    _require(metric in (None, *MEASURED), f"metric must be one of {', '.join(MEASURED)}, got {metric!r}")
    catalog: RunCatalog = request.app.state.catalog
    names = [name for name in asked.get("runs", "").split(",") if name] or catalog.names()
    _require(len(names) <= OPEN, f"at most {OPEN} runs can be compared, got {len(names)}: name some, ?runs=a,b")
    return Json(catalog.compare(names, lambda readings: in_json(Comparison(readings, metric))))


def _version(request: Request) -> Response:
    return Json({"version": request.app.state.catalog.version(request.query_params.get("run"))})


def _page(request: Request) -> Response:
    known = "id" not in request.path_params or request.app.state.catalog.has(request.path_params["id"])
    return FileResponse(STATIC / "page.html", 200 if known else 404)  # the page says so and links to the other runs


def _query(request: Request) -> Asked:
    return {key: value for key, value in request.query_params.items() if value != ""} | request.path_params


def _require(holds: bool, words: str) -> None:
    if not holds:
        raise HTTPException(400, words)


def _number(asked: Asked, key: str) -> int | None:
    value = asked.get(key, "0")
    named = f"{key} must be a whole number of at most seven digits, got {value!r}"
    _require(re.fullmatch(r"[0-9]{1,7}", value) is not None, named)
    return int(value) if key in asked else None
