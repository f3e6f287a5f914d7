"""Who gets an answer, and how the page is started."""

import re
from pathlib import Path

import httpx
import pytest

from fedgauge.server.dashboard import DRAWING, STATIC
from fedgauge.server.dashboard.web import make_app
from tests.server.dashboard.pages import Get, Http, served


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.1:8765", "[::1]:8765"])
def test_this_machine_is_answered_by_each_of_its_names(folder: Path, host: str) -> None:
    with Http(make_app(folder), base_url=f"http://{host}") as http:
        assert http.get("/api/runs").status_code == 200


def test_without_the_token_nothing_is_answered(folder: Path) -> None:
    routes = [
        "/",
        "/api/runs",
        "/api/runs/complete/overview",
        "/api/version",
        "/static/page.js",
        "/plotly/plotly.min.js",
    ]
    with Http(make_app(folder), "http://localhost:8765", headers={}) as http:
        assert {http.get(address).status_code for address in [*routes, "/?token=", "/?token=wrong"]} == {401}
    with Http(make_app(folder, "secret"), "http://localhost:8765", headers={}) as http:
        assert http.get("/api/runs", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert http.get("/api/runs").status_code == 401
        first = http.get("/run/complete?metric=ssim&token=secret", follow_redirects=False)
        assert (first.status_code, first.headers["location"]) == (303, "/run/complete?metric=ssim")
        cookie = first.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=lax" in cookie and "secret" not in cookie
        assert http.get("/api/runs").status_code == 200, "the cookie lets in from then on"


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "[evil.example", "", "localhost@evil.example"]
)
def test_another_name_that_leads_here_is_refused(folder: Path, host: str) -> None:
    """As a site does that lets its own name point to this machine."""
    app = make_app(folder)
    named = [("Host", host), ("Authorization", f"Bearer {app.state.token}")]
    with Http(app, base_url="http://localhost") as http:
        assert http.get("/api/runs", headers=named).status_code == 400


@pytest.mark.parametrize("path", ["//evil.example/", "/%5Cevil.example/", "//evil.example/%2e%2e"])
def test_the_token_leads_to_no_other_host(folder: Path, path: str) -> None:
    with Http(make_app(folder, "secret"), base_url="http://localhost:8765") as http:
        location = http.get(f"{path}?token=secret&x=1", follow_redirects=False).headers["location"]
    assert httpx.URL("http://localhost:8765").join(location).host == "localhost"
    assert re.match(r"/(?![/\\]).*\?x=1$", location), "a browser takes a backslash for a slash"


def test_every_answer_forbids_what_the_page_does_not_need(folder: Path) -> None:
    with Http(make_app(folder), base_url="http://localhost") as http:
        refused = [http.get("/", headers={"Authorization": ""}), http.get("/", headers={"Host": "evil.example"})]
        answers = [http.get(path) for path in ("/", "/api/runs", "/api/runs/nope/overview", "/static/style.css")]
        for headers in [answer.headers for answer in [*answers, *refused]]:
            assert "default-src 'none'; script-src 'self';" in headers["content-security-policy"]
            assert headers["cache-control"] == "no-store"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cross-origin-resource-policy"] == "same-origin"


def test_the_page_loads_every_script_and_reports_get_those_that_draw(get: Get) -> None:
    loaded = re.findall(r'src="/static/([^"]*)" defer', get("/"))
    assert loaded == [*DRAWING, "views.js", "page.js"]
    assert sorted(loaded) == sorted(path.name for path in STATIC.glob("*.js"))


# -------------------------------------------------------------------------------------------------------- command line


def test_watch_prints_the_address_logs_no_request_and_ends_at_once(folder: Path) -> None:
    server = served(folder / "complete", "--host", "127.0.0.1", "--token", "a+b c#d&e pä;ß")
    with server as address:
        assert "/run/complete?token=" in address, "the run's page, not a list"
        assert httpx.get(address + "wrong").status_code == 401
        assert httpx.get(address).status_code == 303
        assert httpx.get(address, follow_redirects=True).status_code == 200
    assert len(server.log.splitlines()) == 1, "that it serves, and nothing of what it was asked"
