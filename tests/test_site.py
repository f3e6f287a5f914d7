"""The documentation as a site: strict, offline, every page in its navigation; mkdocs itself refuses dead links."""

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOADED = {
    "src": "[src]",
    "data": "object[data]",
    "href": "link[rel~=stylesheet], link[rel~=icon], image[href]",
}  # by browsers


def assets(page: str) -> list[str]:
    """The addresses that a browser loads with a page."""
    from bs4 import BeautifulSoup

    read = BeautifulSoup(page, "html.parser")
    return [str(element[name]) for name, which in LOADED.items() for element in read.select(which)]


def elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """docs/site/pages.py, which chooses the pages and runs the notebooks."""
    for package in ("nbclient", "nbconvert"):
        pytest.importorskip(package, reason="needs the extra docs")
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs/site/pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hook: ModuleType) -> Iterator[dict[Path, str]]:
    """The site's pages by their files, built as `make site` builds it, but with the notebooks as they are."""
    pytest.importorskip("material", reason="needs the extra docs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config: Any = load_config(
        str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder), extra={"execute_notebooks": False}
    )
    build(config)  # a warning ends it: a broken link or anchor, a page outside the navigation
    yield {path: path.read_text() for path in folder.rglob("*.html")}
    logging.getLogger("mkdocs").handlers.clear()


def test_every_page_of_the_repository_is_one_of_the_site(site: dict[Path, str], hook: ModuleType) -> None:
    (folder,) = {path.parent for path in site if path.name == "404.html"}
    pages = hook.pages()
    assert {"README.md", "docs/scenarios.md", "docs/notebooks/attack-a-model.ipynb"} <= set(pages)
    for name in pages:
        written = (folder / name).with_suffix(".html")
        assert (written.with_name("index.html") if written.name == "README.html" else written) in site, name


def test_a_reader_needs_no_network(site: dict[Path, str]) -> None:
    for path, page in site.items():
        assert (found := assets(page)), path
        assert [asset for asset in found if elsewhere(asset)] == [], path
        for asset in found:
            if not asset.startswith("data:"):
                assert (path.parent / unquote(urlsplit(asset).path)).exists() or path.name == "404.html", asset
    (folder,) = {path.parent for path in site if path.name == "404.html"}
    fetched = [css for css in folder.rglob("*.css") if "url(http" in css.read_text() or "@import" in css.read_text()]
    assert fetched == []


def test_markdown_that_two_programs_read_otherwise_is_not_there(site: dict[Path, str]) -> None:
    """A list or a row right below a line of text is one on other sites, and here a paragraph; so is a bar behind a backslash."""
    from bs4 import BeautifulSoup

    for path, page in site.items():
        texts = [each.get_text() for each in BeautifulSoup(page, "html.parser").find_all("p")]
        odd = [
            text for text in texts if text.startswith("|") or any(mark in text for mark in ("\n- ", "\n1. ", "\n| "))
        ]
        assert odd == [], path
        assert "\\|" not in page.split("<article")[-1], path


def test_the_check_sees_what_it_looks_for() -> None:
    page = '<link rel="stylesheet" href="//fonts.x/a.css"><img src="https://x/y.png"><img src="../a.png">'
    assert [elsewhere(asset) for asset in assets(page)] == [True, False, True]
