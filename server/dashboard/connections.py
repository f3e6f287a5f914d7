"""The page's connections: so many at once, and none for longer than it is used; uvicorn has no limits of its own for that."""

import asyncio
import resource
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_BYTES = 16 * 1024  # of a request: its first line and its headers
HEAD_SECONDS = 10.0  # in which a request must have come whole, however busily its bytes trickle
UNREAD_BYTES = 16 * 1024  # that a slow visitor must take of an answer in that time
CONNECTIONS = 1500  # at a time, and half of them for one address
FILES = 4096  # that this process may open, if the system lets it: connections, and the ledgers of runs


class Crowd:
    """A server's connections by address: how many, and which of them wait for a request, in the order in which they began to."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: dict[str, set[Connection]] = {}
        self.waiting: dict[str, dict[Connection, None]] = {}
        self.size = 0

    def enter(self, connection: "Connection") -> None:
        """A connection comes; if it is one too many, the one that has waited longest of the same address, or of the one that
        holds most, gives way. If none waits there is one more: `guards.Bounded` refuses requests that are too many."""
        held = self.held.setdefault(connection.address, set())
        held.add(connection)
        self.size += 1
        crowded = set(self.waiting) if self.size > self.most else set()
        if len(held) > self.most // 2:
            crowded = {connection.address} & self.waiting.keys()
        if crowded:
            next(iter(self.waiting[max(crowded, key=lambda address: len(self.held[address]))])).drop()
        self.wait(connection)

    def leave(self, connection: "Connection") -> None:
        """A connection is gone."""
        self.work(connection)
        held = self.held.get(connection.address, set())
        if connection in held:
            held.remove(connection)
            self.size -= 1
            if not held:
                del self.held[connection.address]

    def wait(self, connection: "Connection") -> None:
        """A connection waits for a request from now on."""
        self.work(connection)
        self.waiting.setdefault(connection.address, {})[connection] = None

    def work(self, connection: "Connection") -> None:
        """A connection has a request to answer, or is gone."""
        waiting = self.waiting.get(connection.address, {})
        waiting.pop(connection, None)
        if not waiting:
            self.waiting.pop(connection.address, None)


class Connection(H11Protocol):
    """A visitor's connection.

    It is dropped if its request does not come whole in time, or if its answer is not taken. Where connections are too many, the
    one that has waited for a request for longest gives way to the newest.
    """

    crowd: Crowd
    transport: asyncio.Transport
    address = ""
    _unread = 0
    _timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> bool:
        """Whether there is no request to answer."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's is
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.app_state = {**self.app_state, "peer": {}}  # what `guards` learns of the visitor, once a connection
        self.crowd.enter(self)
        self._start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.waiting:
            self.crowd.work(self)
            if not self.flow.write_paused:
                self._stop()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # may begin with a request that has come already
        if self.waiting:
            self.crowd.wait(self)
            self._start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.waiting:
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.crowd.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, if there is a place for that: not in the middle of another answer."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if not self.waiting:
                self.cycle.disconnected = True  # whose request turned out to be broken: nothing else is to be answered
            super().send_400_response(f"fedgauge: this is no HTTP request, or longer than {HEAD_BYTES} bytes\n")
        else:
            self.drop()

    def drop(self) -> None:
        """End the connection now."""
        self.crowd.leave(self)
        self.transport.abort()

    def _start(self) -> None:
        self._stop()
        self._unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """The time is over: only a visitor who still takes his answer gets more."""
        unread = self.transport.get_write_buffer_size()
        if unread and self._unread - unread >= UNREAD_BYTES:
            self._start()
        else:
            self.drop()


class PageServer(uvicorn.Server):
    """uvicorn with these limits, on one loop and one parser wherever it runs, and with no word of a request in any log."""

    def __init__(self, app: Starlette) -> None:
        self.app = app
        most = min(CONNECTIONS, _files() // 2)
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Connection", (Connection,), {"crowd": Crowd(most)}),
                loop="asyncio",
                ws="none",
                log_config=None,
                log_level="error",
                access_log=False,  # an address may hold the token
                proxy_headers=False,  # anybody could claim another address by them
                server_header=False,
                h11_max_incomplete_event_size=HEAD_BYTES,
                backlog=16,  # accepted at a time: who has sent a request is heard before many others have come
                timeout_graceful_shutdown=2,
            )
        )

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(1024)  # may wait to be accepted

    async def shutdown(self, sockets: Any = None) -> None:
        self.app.state.event_stream.stop()  # otherwise the open streams would delay the end
        await super().shutdown(sockets)


def _files() -> int:
    """How many files this process may open, raised to FILES where the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        soft = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
