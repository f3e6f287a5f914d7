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

from fedgauge.attacks.grading.scores import ScoreRecord
from fedgauge.server.dashboard.connections import PageServer
from fedgauge.server.store.run import Run

Get = Callable[..., Any]


class Http:
    """A browser without a network: it keeps cookies, and sees every answer of the app."""

    def __init__(self, app: Starlette, base_url: str) -> None:
        self.app, self.base_url, self.cookies = app, base_url, httpx.Cookies()

    def __enter__(self) -> "Http":
        return self

    def __exit__(self, *_: object) -> None:
        self.app.state.event_stream.stop()

    async def _asked_within(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app({**scope, "server": (scope["server"][0], None)}, receive, send)  # httpx takes the address's port

    def get(self, address: str, **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._asked_within)
            async with httpx.AsyncClient(transport=transport, base_url=self.base_url, cookies=self.cookies) as client:
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
    """The page's server as users start it, in a process of its own; `log` is what it has said on its standard error."""

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
def listening(app: Starlette) -> Iterator[int]:
    """The page's server in a thread, with its own handling of connections; yields its port."""
    opened = socket.create_server(("127.0.0.1", 0))
    server = PageServer(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    try:
        yield opened.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        opened.close()
    assert not thread.is_alive()


class Raw:
    """A visitor who sends bytes; `source`: one of this machine's own addresses, 127.0.0.0/8."""

    def __init__(self, port: int, sent: bytes = b"", source: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))
        self.socket.sendall(sent)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, until: bytes | None = None) -> bytes:
        """What comes until these bytes, or until the server ends the connection."""
        found = b""
        while until is None or until not in found:
            try:
                piece = self.socket.recv(65536)
            except ConnectionError:  # as good as an end
                return found
            if not piece:
                return found
            found += piece
        return found


def get(path: str, *headers: str, host: str = "localhost", close: bool = True) -> bytes:
    """A request as bytes."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *headers, *(["Connection: close"] if close else [])]
    return "\r\n".join([*lines, "", ""]).encode()


def ask(port: int, request: bytes, source: str = "127.0.0.1") -> tuple[int, bytes]:
    """The status of the answer (0: none came) and all of it."""
    with Raw(port, request, source) as visitor:
        answer = visitor.read()
    return int(answer.split(b" ", 2)[1]) if answer else 0, answer


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port
