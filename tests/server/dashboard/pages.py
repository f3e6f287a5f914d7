"""Ask the page's server: in this process without a network, or as users start it."""

import asyncio
import base64
import io
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from starlette.applications import Starlette

from fedgauge.attacks.score_rows import ScoreRecord
from fedgauge.server.dashboard.web import page_server
from fedgauge.server.store.run import Run
from tests.waiting import free_port

Get = Callable[..., Any]


class Http:
    """A browser without a network: it has the token or what is given instead, keeps cookies, and sees every answer of the app."""

    def __init__(self, app: Starlette, base_url: str, headers: dict[str, str] | None = None) -> None:
        self.app, self.base_url, self.cookies = app, base_url, httpx.Cookies()
        self.headers = {"Authorization": f"Bearer {app.state.token}"} if headers is None else headers

    def __enter__(self) -> "Http":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left open."""

    def get(self, address: str, **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            given = {"base_url": self.base_url, "cookies": self.cookies, "headers": self.headers}
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), **given) as client:
                answer = await client.get(address, **options)
                self.cookies = client.cookies
                return answer

        return asyncio.run(ask())


def no_json(token: str) -> None:
    raise AssertionError(f"{token} is no JSON")


def pixels(source: str) -> np.ndarray:
    kind, data = source.split(",", 1)
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def score_all(run: Run, psnr: float = 20.0) -> None:
    """End every job with a score, without attacking."""
    with run.ledger() as ledger:
        while (lease := ledger.lease()) is not None:
            rows = {
                c: [ScoreRecord(lease.round, c, lease.attack.name, 0, "psnr", psnr + c, "converged", 0.1)]
                for c in lease.clients
            }
            ledger.finish(lease, rows)


class served:
    """The page's server as users start it, in a separate process; gives the address with the token.

    `log` is its standard error.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.log = ""
        self.command = [
            sys.executable,
            "-m",
            "fedgauge.simulations.cli.main",
            "watch",
            str(folder),
            "--port",
            str(free_port()),
            *options,
        ]

    def __enter__(self) -> str:
        self.said = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=self.said, text=True)
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        assert address, self._read()
        return address

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log = self._read()
        self.said.close()

    def _read(self) -> str:
        self.said.seek(0)
        return self.said.read()


@contextmanager
def visitor(address: str) -> Iterator[httpx.Client]:
    """A visitor who has opened the printed address, and whose cookie lets in from then on."""
    with httpx.Client(base_url=address.partition("?")[0], timeout=60) as client:
        client.get(address, follow_redirects=True).raise_for_status()
        yield client


@contextmanager
def listening(app: Starlette, port: int = 0) -> Iterator[str]:
    """The page's server in a thread; yields its address without the token."""
    opened = socket.create_server(("127.0.0.1", port))
    server = page_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{opened.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        opened.close()
    assert not thread.is_alive()
