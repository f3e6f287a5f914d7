"""Anything at all that a visitor may send to the page's server: answered or refused in words, and the server says no traceback.

FEDGAUGE_FUZZ sets how many connections are tried.
"""

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgauge.server.dashboard import connections
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.store.run import Run
from tests.server.dashboard.pages import Raw, ask, get, listening

FUZZ = settings.get_profile("fuzz")
pytestmark = pytest.mark.slow
TOKEN = "a token"


class Pages(NamedTuple):
    """Two servers over the same runs, and what they log."""

    plain: int
    guarded: int
    log: list[str]


class Kept(logging.Handler):
    """Keeps what is logged, tracebacks included."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(scope="module")
def pages(attacked_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    folder: Path = tmp_path_factory.mktemp("fuzzed") / "runs"
    for name in ("complete", "damaged", "ünï cödé & more"):
        shutil.copytree(attacked_run.folder, folder / name)
    (folder / "damaged" / "ledger.sqlite").write_bytes(b"no database at all, but long enough to look at" * 100)
    (folder / "link").symlink_to(folder / "link")
    (folder / "file").touch()
    kept, root = Kept(), logging.getLogger()
    root.addHandler(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "HEAD_SECONDS", 0.3)
        with listening(make_app(folder)) as plain, listening(make_app(folder, TOKEN)) as guarded:
            yield Pages(plain, guarded, kept.lines)
    root.removeHandler(kept)


# ------------------------------------------------------------------------------------------------------------- requests

NAMES = st.one_of(
    st.sampled_from([
        "complete", "damaged", "%C3%BCn%C3%AF%20c%C3%B6d%C3%A9%20%26%20more", "link", "file", "nope", "", ".", "..", "%2e%2e",
        "..%2f..%2f..%2fetc%2fpasswd", "..%5c..%5cwindows", "%00", "complete%00.png", "complete%2f..%2fcomplete", ".hidden",
        "%252e%252e", "%ff%fe", "%F0%9F%98%80", "%ED%A0%80", "%zz", "%", "~", "complete;x=1", "@127.0.0.1", "CON", "*",
        "%E2%80%AE", "a" * 255, "a" * 256, "a" * 5000, "a" * 60_000, "%2e%2e/" * 500, "9" * 5000,
    ]),
    st.text("abcdefghijklmnopqrstuvwxyz0123456789%./\\-_~:;@&=+$,!*'()[]{}|^`\"<>", max_size=20),
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(0, 2).map(str),
    st.integers(-3, 9).map(str),
    st.sampled_from(["2097151", "2097152", "2147483648", "18446744073709551616", "-0", "+1", "1.5", "1e3", "0x1", "nan", "inf",
                     "%D9%A1", "%C2%B2", "1_0", "9" * 400, "9" * 5000, "", "%20", "01", "all", "null", "[]"]),
)  # fmt: skip
PATHS = st.one_of(
    st.sampled_from(["/", "/compare", "/api/runs", "/api/compare", "/api/events", "/plotly.js", "/healthz", "/static/page.js",
                     "*", "", "//", "//evil.example/", "/%5Cevil.example", "\\\\evil", "http://evil.example/api/runs",
                     "http://localhost/api/runs", "localhost:80", "@localhost/", "/api/../api/runs", "/./", "/api//runs",
                     "/static/../web.py", "/static/%2e%2e/web.py", "/static//etc/passwd", "/static/%00",
                     "/static/" + "a/" * 3000]),
    st.builds("/run/{}{}".format, NAMES, st.sampled_from(["", "/gallery", "/clients", "/", "/nope"])),
    st.builds("/run/{}/image/{}".format, NAMES, NUMBERS),
    st.builds("/api/runs/{}/{}".format, NAMES, st.sampled_from(["overview", "gallery", "clients", "trace", "", "nope"])),
    st.builds("/api/runs/{}/{}/{}".format, NAMES, st.sampled_from(["image", "clients"]), NUMBERS),
    st.builds("/static/{}".format, NAMES),
    st.builds("/{}".format, NAMES),
)  # fmt: skip
VALUES = st.one_of(
    NUMBERS, NAMES,
    st.sampled_from(["inverting_gradients", "analytic", "psnr", "ssim", "leak", "hidden", "client", "complete,damaged",
                     "complete," * 30, "a%20token", "%00", "%22%3E%3Cscript%3E"]),
)  # fmt: skip
KEYS = st.one_of(
    st.sampled_from(
        ["round", "client", "attack", "label", "sort", "offset", "example", "metric", "runs", "run", "token"]
    ),
    st.sampled_from(["", "%00", "__class__", "colour", "round[]", "%ff"]),
)
QUERIES = (
    st.lists(st.builds("{}={}".format, KEYS, VALUES), max_size=5).map("&".join).map(lambda query: query and f"?{query}")
)
METRICS, ATTACKS, RUNS = (
    st.one_of(st.sampled_from(known), VALUES)
    for known in (["psnr", "ssim"], ["inverting_gradients", "analytic"], ["complete", "complete,damaged"])
)
SENSIBLE = st.one_of(  # what the page itself asks, or something like it
    st.builds("/api/runs/complete/gallery?round={}&client={}&label={}&offset={}".format, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds("/api/runs/complete/gallery?attack={}&sort={}".format, ATTACKS, st.one_of(st.just("leak"), VALUES)),
    st.builds("/api/runs/complete/image/{}?client={}".format, NUMBERS, NUMBERS),
    st.builds("/api/runs/complete/trace?round={}&client={}&example={}&attack={}".format, NUMBERS, NUMBERS, NUMBERS, ATTACKS),
    st.builds("/api/runs/complete/clients?metric={}&attack={}".format, METRICS, ATTACKS),
    st.builds("/api/runs/complete/clients/{}".format, NUMBERS),
    st.builds("/api/compare?runs={}&metric={}".format, RUNS, METRICS),
    st.builds("/api/events?run={}".format, RUNS),
)  # fmt: skip
TARGETS = st.one_of(SENSIBLE, SENSIBLE, st.builds("{}{}".format, PATHS, QUERIES))
HOSTS = st.sampled_from([
    "localhost:8765", "127.0.0.1", "[::1]:8765", "LOCALHOST", "localhost:99999", "localhost:", "[::1", "a_b.evil.example", "",
    "evil.example", "localhost@evil.example", "localhost, evil.example", "l\xf6calhost", "[v1.x]", "x" * 5000, "127.0.0.1:80:80",
])  # fmt: skip
HEADERS = st.one_of(
    st.builds("Range: bytes={}-{}".format, NUMBERS, NUMBERS),
    st.builds("Last-Event-ID: {}".format, VALUES),
    st.sampled_from([
        "Range: bytes=" + "0-1," * 2000, "Range: bytes=0-0,2-2,5-", "Range: lines=1", "If-Range: x", "If-Modified-Since: yesterday",
        "If-None-Match: \"x\", *", "Accept-Encoding: gzip;q=nan, br", "Accept-Encoding: ", "Expect: 100-continue", "TE: trailers",
        "Upgrade: websocket", "Connection: upgrade, close", "Connection: keep-alive", "X-Forwarded-For: 127.0.0.1",
        "X-Forwarded-Host: localhost", "X-Forwarded-Proto: javascript", "X-HTTP-Method: PUT", "Content-Length: 0",
        "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 1, 1",
        "Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Host: evil.example", "Authorization: Bearer",
        "Authorization: Basic \xff", "Cookie: a=b; fedgauge-80=x", "Cookie: " + "a=b; " * 4000, "Cookie: =;;=\"\\777",
        "Cookie: fedgauge-80=\xe4", "no colon", ": empty", "A b: c", " folded", "X: \x00", "X: \xff", "Origin: null",
        "Sec-WebSocket-Key: x", "X-Large: " + "x" * 20_000,
    ]),
)  # fmt: skip
METHODS = st.sampled_from(
    ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "PRI", "get", "G\xcbT", "X" * 300, ""]
)
VERSIONS = st.sampled_from(["HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.11", "HTTP/9", "http/1.1", ""])
ENDS = st.sampled_from(["\n", "\r", "\r\n\r\n"])
BODIES = st.sampled_from(["12345", "5\r\n12345\r\n0\r\n\r\n", "zz\r\n", "x" * 70_000])
PARTS = ["method", "version", "host", "end", "body", "headers", "headers"]


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request for any target; at most two of its other parts are not as they should be."""
    odd = draw(st.sets(st.sampled_from(PARTS), max_size=2)) if draw(st.booleans()) else set()

    def part(name: str, usual: str, other: st.SearchStrategy[str]) -> str:
        return draw(other) if name in odd else usual

    end = part("end", "\r\n", ENDS)
    method, version = part("method", "GET", METHODS), part("version", "HTTP/1.1", VERSIONS)
    host, headers = part("host", "localhost", HOSTS), draw(st.lists(HEADERS, max_size=3)) if "headers" in odd else []
    lines = [f"{method} {draw(TARGETS)} {version}", f"Host: {host}", f"Authorization: Bearer {TOKEN}", *headers]
    return (end.join([*lines, "", ""]) + part("body", "", BODIES)).encode("latin-1")


@st.composite
def sent(draw: st.DrawFn) -> bytes:
    """What one visitor sends: requests in a row, the last of which ends the connection; rarely spoiled or not all of it."""
    before = draw(st.lists(requests(), max_size=2)) if draw(st.integers(0, 4)) == 4 else []
    data = b"".join(before) + draw(requests()).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    match draw(st.integers(0, 39)):
        case 39:
            return data[: draw(st.integers(0, len(data)))]
        case 36 | 37 | 38:
            place = draw(st.integers(0, len(data) - 1))
            return data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
    return data


STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
STREAM = re.compile(rb"HTTP/1\.1 200 OK\r\n(?:[^\r]+\r\n)*content-type: text/event-stream")


def answered(port: int, data: bytes) -> bytes:
    """What the server answers until it ends the connection, or begins a stream."""
    answer = b""
    with Raw(port) as visitor:
        try:
            visitor.send(data)
            while not STREAM.search(answer) and (piece := visitor.socket.recv(1 << 16)):
                answer += piece
        except ConnectionError:  # it ends connections of which it has read enough
            return answer
    return answer


@settings(FUZZ)
@given(data=sent(), guarded=st.booleans())
def test_any_request_is_answered_or_refused_in_words(pages: Pages, data: bytes, guarded: bool) -> None:
    answer = answered(pages.guarded if guarded else pages.plain, data)
    found = [int(status) for status in STATUS.findall(answer)]
    assert all(status < 500 or status == 503 for status in found), answer[:2000]
    if 503 in found and b"HEAD" not in data:  # whose answers have no words
        assert b'{"error":"' in answer or b"\r\n\r\nfedgauge: " in answer
    assert b"root:x:0" not in answer and b"Traceback" not in answer
    said = list(pages.log)
    pages.log.clear()
    assert said == []


def test_the_fuzz_reaches_what_it_is_meant_for(pages: Pages) -> None:
    """A server that refused everything would pass all of the above; and after all of it the server still answers."""
    for address in (
        "/",
        "/api/runs",
        "/api/runs/complete/overview",
        "/api/runs/complete/gallery?round=1",
        "/static/page.js",
    ):
        assert ask(pages.plain, get(address))[0] == 200, address
    bearer = f"Authorization: Bearer {TOKEN}"
    assert ask(pages.guarded, get("/api/runs", bearer, host="evil.example"))[0] == 200
    assert ask(pages.guarded, get("/api/runs"))[0] == 401
    assert ask(pages.plain, get("/api/runs/damaged/overview"))[0] == 503
    assert ask(pages.plain, get("/api/runs/%C3%BCn%C3%AF%20c%C3%B6d%C3%A9%20%26%20more/overview"))[0] == 200
    assert pages.log == []
