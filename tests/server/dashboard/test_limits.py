"""No visitor holds the page's server for long or alone: times, sizes and numbers of connections, requests and streams."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fedgauge.server.dashboard import connections, events, guards
from fedgauge.server.dashboard.events import EventStream
from fedgauge.server.dashboard.guards import Bounded, Places
from fedgauge.server.dashboard.runs import RunCatalog
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.store.run import Run
from tests.server.dashboard.pages import Raw, ask, get, listening, served


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    with listening(make_app(folder)) as found:
        yield found


# ----------------------------------------------------------------------------------------------------------------- time


HALVES = {
    "nothing": b"",
    "half a line": b"GET",
    "no end": get("/")[:-2],
    "an idle connection": get("/healthz", close=False),
    "half a second request": get("/healthz", close=False) + b"GET /",
}


@pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
def test_a_request_that_does_not_come_whole_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with listening(make_app(folder)) as port, Raw(port, sent) as visitor:
        assert visitor.read().count(b"HTTP/1.1 200") == sent.count(b"/healthz")


def test_trickling_bytes_buy_no_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn's own limit for idle connections begins anew with each byte."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with listening(make_app(folder)) as port, Raw(port, b"GET / HTTP/1.1\r\nX: ") as visitor:
        ended = threading.Event()

        def trickle() -> None:
            while not ended.wait(0.05):
                try:
                    visitor.send(b"x")
                except OSError:  # the connection is gone
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        assert visitor.read() == b""
        ended.set()
        thread.join()


def test_an_answer_that_nobody_takes_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    held: list[connections.Connection] = []
    made = connections.Connection.connection_made
    lost = connections.Connection.connection_lost
    gone = threading.Event()

    def noted(self: connections.Connection, transport: Any) -> None:
        held.append(self)
        made(self, transport)

    def ended(self: connections.Connection, error: Exception | None) -> None:
        lost(self, error)
        gone.set()

    monkeypatch.setattr(connections.Connection, "connection_made", noted)
    monkeypatch.setattr(connections.Connection, "connection_lost", ended)

    async def large(request: Request) -> Response:
        return Response(b"x" * 30_000_000)

    app = Starlette(routes=[Route("/large", large)])
    app.state.event_stream = EventStream(RunCatalog(folder))
    with listening(app) as port, Raw(port, get("/large")):
        assert gone.wait(60)
    assert len(held) == 1


def test_what_waited_before_the_time_began_buys_no_more_of_it() -> None:
    dropped = []
    connection = object.__new__(connections.Connection)
    transport: Any = SimpleNamespace(get_write_buffer_size=lambda: 50_000, abort=lambda: dropped.append(True))
    later: Any = SimpleNamespace(call_later=lambda *_: SimpleNamespace(cancel=lambda: None))
    connection.transport, connection.loop, connection.crowd = transport, later, connections.Crowd(9)
    connection._start()
    connection._late()
    assert dropped


def test_who_takes_his_answer_slowly_gets_all_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connections, "UNREAD_BYTES", 1)

    async def large(request: Request) -> Response:
        return Response(b"x" * 40_000_000)

    app = Starlette(routes=[Route("/large", large)])
    app.state.event_stream = EventStream(RunCatalog(folder))
    with listening(app) as port, Raw(port, get("/large")) as visitor:
        taken, pause = b"", threading.Event()
        while piece := visitor.socket.recv(4_000_000):
            taken += piece
            pause.wait(0.1)
    assert taken.count(b"x") >= 40_000_000


# --------------------------------------------------------------------------------------------------------------- number


def test_the_newest_connection_takes_the_place_of_the_one_that_has_waited_longest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 10)
    with listening(make_app(folder)) as port, ExitStack() as stack:
        half = [stack.enter_context(Raw(port, b"GET / HTTP/1.1\r\n", f"127.0.0.{2 + i // 20}")) for i in range(60)]
        assert ask(port, get("/healthz"))[0] == 200, "and yet an honest visitor is answered"
        assert [visitor.read() for visitor in half[:15]] == [b""] * 15, "the oldest of the first address are gone"
        half[-1].send(b"Host: localhost\r\nConnection: close\r\n\r\n")
        assert half[-1].read().startswith(b"HTTP/1.1 200"), "the newest was kept"


def test_many_whole_requests_at_once_are_answered_or_refused_without_a_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 4)
    monkeypatch.setattr(guards, "REQUESTS", 4)
    with listening(make_app(folder)) as port:
        with ExitStack() as stack:
            crowd = [stack.enter_context(Raw(port, get("/api/runs"))) for _ in range(60)]
            answers = [visitor.read()[:12] for visitor in crowd]
        assert {b"HTTP/1.1 200"} <= set(answers) <= {b"HTTP/1.1 200", b"HTTP/1.1 503", b""}
        assert ask(port, get("/api/runs"))[0] == 200
    assert caplog.records == []


def test_streams_are_bounded_and_who_gets_none_is_told_when_to_ask_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "STREAMS", 4)
    with listening(make_app(folder)) as port, ExitStack() as stack:

        def listen(source: str) -> bytes:
            return stack.enter_context(Raw(port, get("/api/events"), source)).read(b"\r\n\r\n")

        first = Raw(port, get("/api/events"), "127.0.0.2")
        assert b"200" in first.read(b"id: ").split(b"\r\n")[0]
        found = [listen(f"127.0.0.{k}").split(b"\r\n")[0].split()[1] for k in (2, 2, 3, 3, 3, 4)]
        assert found == [b"200", b"503", b"200", b"200", b"503", b"503"]
        status, answer = ask(port, get("/api/events"), "127.0.0.4")
        assert status == 503 and b"Retry-After: 2" in answer.title().replace(b"Retry-after", b"Retry-After")
        assert b"too many streams are open" in answer
        assert ask(port, get("/api/runs"))[0] == 200, "everything else is answered"
        first.socket.close()
        for _ in range(600):  # until the server has seen that it is gone
            if (status := ask(port, get("/api/events?run=nope"), "127.0.0.4")[0]) == 404:
                break
            threading.Event().wait(0.1)
        assert status == 404, "a place that was left is free"


def test_requests_at_work_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "REQUESTS", 6)

    async def flood() -> list[int]:
        free = asyncio.Event()

        async def slow(request: Request) -> Response:
            await free.wait()
            return PlainTextResponse("ok")

        app = Starlette(routes=[Route("/", slow)], middleware=[Middleware(Bounded)])
        clients = [httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(f"10.0.0.{k}", 1)), base_url="http://x")
                   for k in (1, 2, 3)]  # fmt: skip
        asked = [asyncio.create_task(client.get("/")) for client in clients for _ in range(4)]
        for _ in range(50):
            await asyncio.sleep(0)
        free.set()
        found = [(await answer).status_code for answer in asked]
        again = await clients[2].get("/")
        for client in clients:
            await client.aclose()
        return [*found, again.status_code]

    assert asyncio.run(flood()) == [200, 200, 200, 503] * 2 + [503] * 4 + [200]


@pytest.mark.parametrize(("token", "theirs", "ours"), [
    ("secret", {}, {"authorization": "Bearer secret"}),
    (None, {"host": "evil.example"}, {}),
])  # fmt: skip
def test_who_is_refused_takes_no_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, token: str | None, theirs: dict[str, str], ours: dict[str, str]
) -> None:
    """However long a visitor leaves the refusals of his requests where they are."""
    monkeypatch.setattr(guards, "REQUESTS", 2)

    async def flood() -> list[int]:
        app, statuses, left = make_app(folder, token), list[int](), asyncio.Event()

        async def request(headers: dict[str, str], taken: bool) -> None:
            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                if not taken:
                    await left.wait()

            async def receive() -> Any:
                return {"type": "http.request", "body": b"", "more_body": False}

            named = [(key.encode(), value.encode()) for key, value in ({"host": "localhost"} | headers).items()]
            scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/healthz", "raw_path": b"/healthz",
                     "root_path": "", "scheme": "http", "query_string": b"", "headers": named,
                     "client": ("127.0.0.1", 1), "server": ("localhost", None)}  # fmt: skip
            await app(scope, receive, send)

        held = [asyncio.create_task(request(theirs, taken=False)) for _ in range(6)]
        while len(statuses) < 6:
            await asyncio.sleep(0)
        await request(ours, taken=True)
        left.set()
        await asyncio.gather(*held)
        return statuses

    *refused, answered = asyncio.run(asyncio.wait_for(flood(), 60))
    assert set(refused) <= {400, 401} and answered == 200


def test_a_place_is_free_again_whatever_has_happened_to_who_had_it() -> None:
    places = Places(2)
    with suppress(KeyError), places.one("a"):
        raise KeyError
    with places.one("a") as free, places.one("a") as second, places.one("b") as other:
        assert (free, second, other) == (True, False, True)
    assert not places._taken


def test_however_many_listen_a_run_is_looked_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_SECONDS", 0.01)

    class Counted(EventStream):
        looked = versions = 0

        def _touched(self, name: str | None) -> Any:
            self.looked += 1
            return super()._touched(name)

        def _version(self, name: str | None) -> str:
            self.versions += 1
            return super()._version(name)

    async def listen() -> tuple[Counted, set[str]]:
        stream = Counted(RunCatalog(folder))
        listeners = [stream.events("complete", None) for _ in range(200)]
        assert {await anext(listener) for listener in listeners} == {"retry: 1000\n\n"}
        first = {await anext(listener) for listener in listeners}
        assert (len(first), stream.versions) == (1, 1), "and not 200 times"
        with Run(folder / "complete").ledger() as ledger:
            ledger.record_round(3, 0.5, 1.0, 1.0, 0.0)
        second = {await anext(listener) for listener in listeners}
        assert (len(second), second & first) == (1, set())
        assert len(stream._watches) == 1
        for listener in listeners:
            await listener.aclose()  # type: ignore[attr-defined]  # it is a generator
        assert stream._watches == {}, "nobody looks where nobody listens"
        return stream, first | second

    stream, told = asyncio.run(listen())
    assert len(told) == 2 and stream.versions <= 4


def test_a_look_that_fails_is_not_passed_over_in_silence(folder: Path) -> None:
    class Broken(EventStream):
        def _touched(self, name: str | None) -> Any:
            raise ZeroDivisionError

    async def listen() -> None:
        async for _ in Broken(RunCatalog(folder)).events("complete", None):
            pass

    with pytest.raises(ZeroDivisionError):
        asyncio.run(asyncio.wait_for(listen(), 60))


# ---------------------------------------------------------------------------------------------------------------- size


@pytest.mark.parametrize(("request_", "status", "words"), [
    (get("/run/" + "a" * 60_000), 431, b"at most 16384 are read"),
    (get("/api/runs/" + "a" * 60_000 + "/overview"), 431, b'{"error":'),
    (get("/run/" + "a" * 15_000), 404, b""),
    (get("/api/runs/" + "%E2%82%AC" * 100 + "/overview"), 404, b"there is no run"),
    (get("/run/x/image/" + "9" * 5000), 404, b""),
    (get("/api/runs/complete/clients/" + "9" * 5000), 404, b""),
    (get("/", *(f"X-{i}: {'x' * 90}" for i in range(400))), 431, b"at most 16384"),
    (get("http://evil.example/api/runs"), 400, b"its own paths alone"),
    (get("/api/runs", "Content-Length: 5") + b"12345", 413, b"a request with a body is refused"),
    (get("/api/runs", "Transfer-Encoding: chunked") + b"5\r\n12345\r\n0\r\n\r\n", 413, b"with a body"),
    (get("/api/runs", "Transfer-Encoding: chunked") + b"zz\r\n", 400, b"no HTTP request"),
    (get("/").replace(b"GET", b"PUT"), 405, b"allow: "),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, b"no HTTP request"),
], ids=range(13))  # fmt: skip
def test_what_cannot_be_asked_is_refused(port: int, request_: bytes, status: int, words: bytes) -> None:
    found, answer = ask(port, request_)
    assert found == status
    assert words in answer
    assert b"connection: close" in answer.lower()


def test_a_head_that_has_no_end_is_not_read_to_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 600)  # so that only its size can end it
    with listening(make_app(folder)) as port, Raw(port, b"GET / HTTP/1.1\r\n") as visitor:
        with suppress(ConnectionError):
            for _ in range(100):
                visitor.send(b"X: " + b"x" * connections.HEAD_BYTES + b"\r\n")
        assert b" 200 " not in visitor.read()


def test_a_question_about_the_stream_opens_none(port: int) -> None:
    status, answer = ask(port, get("/api/events").replace(b"GET", b"HEAD"))
    assert status == 200 and answer.endswith(b"\r\n\r\n")


# ----------------------------------------------------------------------------------------------------------------- log


def test_no_log_holds_a_request_or_its_token(folder: Path) -> None:
    server = served(folder, "--token", "a-secret-token")
    with server as address:
        port = int(address.split(":")[2].split("/")[0])
        assert ask(port, get("/?token=a-secret-token"))[0] == 303
        assert ask(port, get("/?token=wrong"))[0] == 401
        assert ask(port, get("/?token=a-secret-token&" + "x" * 20_000))[0] == 431
        assert ask(port, b"NONSENSE a-secret-token\r\n\r\n")[0] == 400
    assert "secret" not in server.log
    assert len(server.log.splitlines()) == 1, "that it serves, and nothing of what it was asked"


# ------------------------------------------------------------------------------------------------------------- crowded


@pytest.mark.full
@pytest.mark.slow
def test_an_honest_visitor_is_answered_in_a_crowd(folder: Path) -> None:
    """600 half-open connections and 300 streams from many addresses, while a run writes."""
    with served(folder) as address, ExitStack() as stack, Run(folder / "complete").ledger() as ledger:
        port = int(address.split(":")[2].split("/")[0])
        for i in range(300):
            source = f"127.0.0.{2 + i % 30}"
            stack.enter_context(Raw(port, get("/api/events?run=complete", close=False), source))
            stack.enter_context(Raw(port, b"GET / HTTP/1.1\r\nHost: lo", source))
            stack.enter_context(Raw(port, b"", source))
        for round in range(3, 23):
            ledger.record_round(round, 0.5, 1.0, 1.0, 0.0)
            with httpx.Client(base_url=address, timeout=60) as honest:
                assert honest.get("/run/complete").status_code == 200
                found = honest.get("/api/runs/complete/overview").raise_for_status().json()
                assert found["training"]["round"] == round
