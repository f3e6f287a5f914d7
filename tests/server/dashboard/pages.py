"""Ask the page's server: in this process without a network, or as users start it."""

import asyncio
import base64
import io
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from starlette.applications import Starlette

from fedgauge.attacks.grading.scores import ScoreRecord
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

    def get(self, address: str, **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
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
    """The page's server as users start it, in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
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
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        assert address, self.process.stderr.read() if self.process.stderr else ""
        return address

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port
