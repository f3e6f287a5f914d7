"""Runs to report on, and how to read a report's page."""

import json
import re
from dataclasses import dataclass, field
from functools import cached_property, partial
from html.parser import HTMLParser
from typing import Any

from fedgauge.server.store.run import Run
from fedgauge.simulations.reports.report import write_report
from tests import small_runs

HOSTILE = "<script>alert('reason')</script> & <b>bold</b>"
NOISY = [
    {"use": "clip", "max_norm": 1.0, "each": True},
    {"use": "gaussian", "sigma": 0.2},
    {"use": "local_sgd", "rate": 0.1},
]


taped = partial(small_runs.taped, reason=HOSTILE)


@dataclass
class Page(HTMLParser):
    """What a browser would find: text outside scripts, links to elsewhere, scripts, table rows, and what is to be drawn."""

    html: str
    text: str = ""
    links: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    policy: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in ("meta", "img", "br", "wbr"):
            self._open.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action", "data", "poster")]
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script" in self._open:
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.text += data
            if self._open and "td" in self._open:
                self.rows[-1][-1] += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    @cached_property
    def data(self) -> Any:
        """What the page's script draws; refuses NaN and Infinity, which are no JSON."""

        def refuse(token: str) -> None:
            raise AssertionError(f"{token} in the page's data")

        found = re.search(r"^const data = (.*);$", self.scripts[-1], re.MULTILINE)
        assert found is not None
        return json.loads(found[1], parse_constant=refuse)

    @property
    def cards(self) -> list[Any]:
        """Of the gallery."""
        cards: list[Any] = self.data["gallery"]["cards"]
        return cards

    def tiles(self, attack: str) -> list[Any]:
        """An attack's pictures, in the order of the cards."""
        return [tile for card in self.cards for tile in card["tiles"] if tile["attack"] == attack]

    @property
    def rounds(self) -> list[Any]:
        """The figures over rounds, one for each metric."""
        figures: list[Any] = self.data["overview"]["over_rounds"]
        return figures

    @property
    def success(self) -> dict[str, Any]:
        """The success curves, by name."""
        return {series["name"]: series for series in self.data["overview"]["success"]["series"]}


def page_of(run: Run) -> Page:
    return Page(write_report(run).read_text())
