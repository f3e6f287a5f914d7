"""The notebooks of the documentation run as they stand, and are kept without their outputs."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_site import hook as hook

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "docs/notebooks").glob("*.ipynb"))
QUICK = "attack-a-model"
SHOWN = {  # how many outputs of each are pictures or show themselves
    "attack-a-model": 2,
    "audit-a-flower-app": 2,
    "membership-of-one-record": 1,
    "read-a-ledger": 5,
}


def read(path: Path) -> Any:
    return pytest.importorskip("nbformat", reason="needs the extra dev").read(path, as_version=4)


def test_all_are_known_and_each_begins_with_a_title_and_a_sentence() -> None:
    assert {path.stem for path in NOTEBOOKS} == SHOWN.keys()
    for path in NOTEBOOKS:
        first = read(path).cells[0]
        assert first.cell_type == "markdown" and re.match(r"# \w.+\n\n[A-Z].+\.$", first.source, re.DOTALL), path.stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    for cell in read(path).cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[] if p.stem == QUICK else [pytest.mark.full, pytest.mark.slow]) for p in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_and_shows_what_it_says(hook: ModuleType, path: Path) -> None:
    notes = read(path)
    hook.execute(notes)  # an error in a cell ends it
    outputs = [output for cell in notes.cells for output in cell.get("outputs", ())]
    shown = [output for output in outputs if {"image/png", "text/html"} & output.get("data", {}).keys()]
    assert len(shown) == SHOWN[path.stem]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    if path.stem == QUICK:
        values = [float(v) for v in re.findall(r"-?[\d.]+(?= dB|[,}])", "".join(o.get("text", "") for o in outputs))]
        exact, guess, search, informed = values
        assert exact > 30 and search < guess < informed, "the words between the cells say so"
