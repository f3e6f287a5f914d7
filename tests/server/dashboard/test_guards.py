"""Who gets an answer, and how the page is started."""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedgauge.server.dashboard import DRAWING, STATIC, guards
from fedgauge.server.dashboard.peers import user_in_tables, user_of
from fedgauge.server.dashboard.web import make_app
from fedgauge.simulations.cli.main import main
from tests.server.dashboard.pages import Get, Http, ask, listening, served
from tests.server.dashboard.pages import get as request


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]:8765"])
def test_this_machine_is_answered_by_each_of_its_names(folder: Path, host: str) -> None:
    with Http(make_app(folder), base_url=f"http://{host}") as http:
        assert http.get("/api/runs").status_code == 200


def test_without_the_token_nothing_is_answered(folder: Path) -> None:
    with Http(make_app(folder, "secret"), base_url="http://server:8765") as http:
        routes = [
            "/",
            "/api/runs",
            "/api/runs/complete/overview",
            "/api/events",
            "/static/page.js",
            "/plotly.js",
            "/healthz",
        ]
        for address in routes:
            answer = http.get(address)
            assert (answer.status_code, answer.headers["connection"]) == (401, "close"), address
            assert "open the address that `fedgauge watch` printed" in answer.text
        assert http.get("/?token=wrong").status_code == 401
        assert http.get("/api/runs", headers={"Authorization": "Bearer secret"}).status_code == 200
        first = http.get("/run/complete?metric=ssim&token=secret", follow_redirects=False)
        assert (first.status_code, first.headers["location"]) == (303, "/run/complete?metric=ssim")
        assert "httponly" in first.headers["set-cookie"].lower()
        assert http.get("/api/runs").status_code == 200, "the cookie lets in from then on"
        cookie = first.headers["set-cookie"].partition(";")[0]
    with Http(make_app(folder, "secret"), base_url="http://server:8765") as again:
        assert again.get("/api/runs", headers={"Cookie": cookie}).status_code == 401, (
            "of this page, and of no later one"
        )


FOREIGN = ["evil.example", "a_b.evil.example", "localhost.evil.example", "[::1", "localhost:x", "", "localhost@evil.example",
           "evil.example/localhost", "127.0.0.1:80:80", "l\u00f6calhost"]  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_leads_here_from_elsewhere_is_refused(folder: Path, host: str) -> None:
    """Names that Starlette cannot read are names, too: it would take the server's own address in their place."""
    with Http(make_app(folder), base_url="http://localhost") as http:
        answer = http.get("/api/runs", headers=[("Host", host.encode())])
        assert answer.status_code == 400
        assert "open this page as 127.0.0.1 or localhost" in answer.json()["error"]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux says whose connection it is")
@pytest.mark.parametrize("here", ["127.0.0.1", "::1"])
def test_it_is_known_whose_connection_it_is(here: str) -> None:
    try:
        server = socket.create_server((here, 0), family=socket.AF_INET6 if ":" in here else socket.AF_INET)
    except OSError:
        pytest.skip(f"this machine has no address {here}")
    ours = server.getsockname()[:2]
    with server, socket.create_connection(ours) as visitor:
        his = visitor.getsockname()[:2]
        for ask_system in (user_of, user_in_tables):
            assert ask_system(his, ours) == os.getuid()
            assert ask_system((here, 1), ours) is None
            assert ask_system(ours, (here, 1)) is None, "a socket that listens is no end of a connection"
        visitor.shutdown(socket.SHUT_WR)
        assert user_of(his, ours) == user_in_tables(his, ours) == os.getuid(), "who still reads is there"
        visitor.close()
        assert user_of(his, ours) is user_in_tables(his, ours) is None, "what nobody holds would be root's"


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux says whose connection it is")
def test_a_visitor_of_unknown_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "user_of", lambda *_: None)
    with listening(make_app(folder)) as port:
        status, answer = ask(port, request("/api/runs", close=False))  # and its connection ends
        assert status == 403 and b"connection: close" in answer.lower()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux says whose connection it is")
@pytest.mark.parametrize("refuses", [False, True])
def test_the_table_of_all_connections_is_read_only_where_the_kernel_says_nothing_of_one_and_not_by_the_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """Another user may make it long by thousands of connections of their own."""
    readers: list[bool] = []

    def read(*ends: tuple[str, int]) -> int | None:
        with contextlib.suppress(RuntimeError):  # there is none in this thread
            asyncio.get_running_loop()
            readers.append(True)
            return None
        readers.append(False)
        return user_in_tables(*ends)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(guards, "user_in_tables", read)
    if refuses:
        monkeypatch.setattr(guards, "user_of", refuse)
    with listening(make_app(folder)) as port:
        assert ask(port, request("/api/runs"))[0] == 200
    assert readers == ([False] if refuses else [])


KNOCK = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
knock = socket.socket()
knock.connect(("127.0.0.1", int(sys.argv[1])))  # by numbers alone: the files that look up names are not his to read
knock.sendall(sys.argv[2].encode())
print(knock.recv(12).decode())
"""


@pytest.mark.skipif(os.getuid() != 0 or not Path("/proc/net/tcp").exists(), reason="needs root, to ask as another user")
@pytest.mark.parametrize(("token", "status"), [(None, 403), ("secret", 200)])
def test_another_user_of_this_machine_is_refused(folder: Path, token: str | None, status: int) -> None:
    sent = request("/api/runs", "Authorization: Bearer secret")
    with listening(make_app(folder, token)) as port:
        command = [sys.executable, "-c", KNOCK, str(port), sent.decode()]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert ask(port, sent)[0] == 200, "this user is answered"
    assert asked.stdout == f"HTTP/1.1 {status}\n"


def test_one_request_names_one_host(folder: Path) -> None:
    with Http(make_app(folder), base_url="http://localhost") as http:
        assert http.get("/api/runs", headers=[("Host", "localhost"), ("Host", "evil.example")]).status_code == 400


@pytest.mark.parametrize(
    "path", ["//evil.example/", "///evil.example", "/%5Cevil.example/", "//evil.example/%2e%2e", "/%2f%2fevil"]
)
def test_the_token_leads_to_no_other_host(folder: Path, path: str) -> None:
    with Http(make_app(folder, "secret"), base_url="http://server:8765") as http:
        answer = http.get(f"{path}?token=secret&x=1", follow_redirects=False)
        assert answer.status_code == 303
        assert answer.headers["location"].endswith("?x=1")
        assert httpx.URL("http://server:8765").join(answer.headers["location"]).host == "server"
        assert re.match(r"/(?![/\\])", answer.headers["location"]), "a browser takes a backslash for a slash"


@pytest.mark.parametrize("host", ["server:99999", "[::1", "a_b:8765", "\u00e4"])
def test_with_a_token_any_name_will_do(folder: Path, host: str) -> None:
    with Http(make_app(folder, "secret"), base_url="http://server") as http:
        named = [("Host", host.encode())]
        assert http.get("/api/runs", headers=named).status_code == 401
        assert http.get("/api/runs", headers=[*named, ("Authorization", "Bearer secret")]).status_code == 200
        assert http.get("/?token=secret", headers=named, follow_redirects=False).status_code == 303


def test_every_answer_forbids_what_the_page_does_not_need(folder: Path) -> None:
    with Http(make_app(folder), base_url="http://localhost") as http:
        for address in ("/", "/api/runs", "/api/runs/nope/overview", "/static/style.css"):
            headers = http.get(address).headers
            assert "default-src 'none'; script-src 'self';" in headers["content-security-policy"]
            assert headers["cache-control"] == "no-store"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cross-origin-resource-policy"] == "same-origin"


def test_the_page_loads_every_script_and_reports_get_those_that_draw(get: Get) -> None:
    loaded = re.findall(r'src="/static/([^"]*)" defer', get("/"))
    assert loaded == [*DRAWING, "views.js", "page.js"]
    assert sorted(loaded) == sorted(path.name for path in STATIC.glob("*.js"))


def test_the_page_itself_is_served_at_every_address_of_a_view(get: Get) -> None:
    page = get("/")
    assert "<script" in page
    for address in (
        "/compare",
        "/run/complete",
        "/run/complete/gallery",
        "/run/complete/clients",
        "/run/complete/image/3",
    ):
        assert get(address) == page


# -------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("token", ["a+b c#d&e", "pä;ß", "plain"])
def test_any_token_may_be_chosen(folder: Path, token: str) -> None:
    with served(folder, "--token", token) as address:
        assert httpx.get(address, follow_redirects=True).status_code == 200


def test_showing_a_run_downloads_nothing(
    folder: Path, get: Get, no_local_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("somebody asks the network")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", refuse)
    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", refuse)
    scenario = folder / "complete" / "scenario.toml"
    scenario.write_text(scenario.read_text().replace("mnist5k", "fashion_mnist"))
    told = [n["words"] for n in get("/api/runs/complete/overview")["notices"]]
    assert any("cannot be shown on this machine" in words for words in told)


def test_an_empty_token_opens_nothing_to_other_hosts(folder: Path) -> None:
    """As `--token "$UNSET"` gives it."""
    with served(folder, "--host", "0.0.0.0", "--token", "") as address:
        assert "?token=" in address and not address.endswith("=")
        port = address.split(":")[2].split("/")[0]
        assert httpx.get(f"http://127.0.0.1:{port}/api/runs").status_code == 401


def test_watch_tells_the_address_and_ends_on_request(folder: Path) -> None:
    with served(folder, "--host", "127.0.0.1", "--token", "abc") as address:
        assert address.endswith("/?token=abc")
        assert httpx.get(address, follow_redirects=False).status_code == 303
        with httpx.stream("GET", address.replace("/?", "/api/events?"), follow_redirects=True) as stream:
            assert stream.status_code == 200, "and an open stream does not hold up the end"


@pytest.mark.parametrize(("options", "words"), [
    (["nowhere"], "nowhere is not a folder: name a run, or the folder in which runs are kept"),
    ([".", "--port", "{taken}"], "choose another --port"),
    ([".", "--port", "99999"], "expected a number from 0 to 65535, got '99999'"),
    ([".", "--host", "203.0.113.1"], "choose another --host"),
])  # fmt: skip
def test_watch_says_what_cannot_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        filled = [o.format(taken=taken.getsockname()[1]) for o in options]
        try:
            status: object = main(["watch", *filled])
        except SystemExit as refused:  # by argparse
            status = refused.code
    assert status == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
