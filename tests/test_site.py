"""The documentation as a site: strict, offline, every page in its navigation; mkdocs itself refuses dead links."""

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOADING = ("src", "srcset", "data")  # attributes whose address a browser loads, and the href of <link> and <image>
KEPT_LINKS = {"canonical", "next", "prev", "alternate"}  # of <link>: they load nothing


@dataclass
class Page(HTMLParser):
    """What a browser would load, and the paragraphs."""

    html: str
    assets: list[str] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._within = False
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        names = (*LOADING, "href") if tag in ("link", "image") else LOADING
        if not KEPT_LINKS & set(given.get("rel", "").split()):
            self.assets += [given[name] for name in names if name in given]
        if tag == "p":
            self.paragraphs.append("")
        self._within = self._within or tag == "p"

    def handle_endtag(self, tag: str) -> None:
        self._within = self._within and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._within:
            self.paragraphs[-1] += data


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
def site(tmp_path_factory: pytest.TempPathFactory, hook: ModuleType) -> Iterator[dict[Path, Page]]:
    """The site's pages by their files, built as `make site` builds it, but with the notebooks as they are."""
    pytest.importorskip("material", reason="needs the extra docs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config: Any = load_config(
        str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder), extra={"execute_notebooks": False}
    )
    build(config)  # a warning ends it: a broken link or anchor, a page outside the navigation
    yield {path: Page(path.read_text()) for path in folder.rglob("*.html")}
    logging.getLogger("mkdocs").handlers.clear()


def test_every_page_of_the_repository_is_one_of_the_site(site: dict[Path, Page], hook: ModuleType) -> None:
    (folder,) = {path.parent for path in site if path.name == "404.html"}
    pages = hook.pages()
    assert {"README.md", "docs/scenarios.md", "docs/notebooks/attack-a-model.ipynb"} <= set(pages)
    for name in pages:
        written = (folder / name).with_suffix(".html")
        assert (written.with_name("index.html") if written.name == "README.html" else written) in site, name


def test_a_reader_needs_no_network(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        assert page.assets, path
        assert [asset for asset in page.assets if elsewhere(asset)] == [], path
        for asset in page.assets:
            if not asset.startswith("data:"):
                assert (path.parent / unquote(urlsplit(asset).path)).exists() or path.name == "404.html", asset
    (folder,) = {path.parent for path in site if path.name == "404.html"}
    fetched = [css for css in folder.rglob("*.css") if "url(http" in css.read_text() or "@import" in css.read_text()]
    assert fetched == []


def test_markdown_that_two_programs_read_otherwise_is_not_there(site: dict[Path, Page]) -> None:
    """A list right below a line of text is one on other sites, and here a paragraph; so is a bar behind a backslash."""
    for path, page in site.items():
        odd = [words for words in page.paragraphs if "\n- " in words or "\n1. " in words or "\n| " in words]
        assert odd == [], path
        assert "\\|" not in path.read_text().split("<article")[-1], path


def test_the_checks_see_what_they_look_for() -> None:
    page = Page('<link rel="stylesheet" href="//fonts.x/a.css"><img src="https://x/y.png"><p>a\n- b</p>\n- c')
    assert [elsewhere(asset) for asset in page.assets] == [True, True] and page.paragraphs == ["a\n- b"]
    assert not elsewhere("data:image/png;base64,AA") and not elsewhere("../a.html")
