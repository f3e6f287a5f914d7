"""The page's scripts read what the views' types have, and the types have nothing that nobody reads."""

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from fedgauge.attacks.modality.base import MainMetric
from fedgauge.server.dashboard import STATIC
from fedgauge.server.dashboard.runs import BrokenRun
from fedgauge.server.views.compare import Comparison
from fedgauge.server.views.figures import Axis, Figure, Look, Series
from fedgauge.server.views.gallery import Card, Page, Tile
from fedgauge.server.views.leak_tables import Clients
from fedgauge.server.views.overview import KnowledgeCard, Overview, RunProgress
from fedgauge.server.views.snapshot import RunLine
from fedgauge.server.views.tables import Column, Table

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = "\n".join(path.read_text() for path in sorted(STATIC.glob("*.js")))
TEMPLATES = "\n".join(path.read_text() for path in sorted((ROOT / "simulations" / "reports").glob("*.html")))
# what a variable of this name holds in every script, and what the script itself puts beside it
HELD: dict[str, tuple[tuple[type, ...], set[str]]] = {
    "overview": ((Overview,), {"state"}),
    "progress": ((RunProgress,), set()),
    "attacker": ((KnowledgeCard,), set()),
    "run": ((RunLine, BrokenRun), set()),
    "card": ((Card,), set()),
    "tile": ((Tile,), set()),
    "column": ((Column,), set()),
    "spec": ((Figure, Table), set()),
    "look": ((Look,), set()),
    "compared": ((Comparison,), {"left"}),
    "clients": ((Clients,), set()),
    "measure": ((MainMetric,), set()),
}


def names(*kinds: type) -> set[str]:
    return {name for kind in kinds for name in attributes(kind)}


def attributes(kind: Any) -> list[str]:
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    return list(getattr(kind, "_fields", ())) or re.findall(r"self\.(\w+)(?=[^()]*? = )", inspect.getsource(kind))


@pytest.mark.parametrize("variable", HELD)
def test_a_script_asks_for_nothing_that_the_type_has_not(variable: str) -> None:
    kinds, more = HELD[variable]
    read = set(
        re.findall(
            rf"(?<![\w.]){variable}\??\.(\w+)",
            SCRIPTS + "".join(re.findall("<script>(.*?)</script>", TEMPLATES, re.DOTALL)),
        )
    )
    assert read and read <= names(*kinds) | more


@pytest.mark.parametrize(
    "kind",
    [
        *dict.fromkeys(kind for kinds, _ in HELD.values() for kind in kinds if kind is not MainMetric),
        Page,
        Series,
        Axis,
    ],
)
def test_every_field_of_a_type_is_read_by_a_page(kind: type) -> None:
    words = set(re.findall(r"\w+", SCRIPTS + TEMPLATES))
    assert names(kind) - words - {"digits"} == set()
