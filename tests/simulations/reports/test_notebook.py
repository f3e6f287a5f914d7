"""What a notebook shows of a run: its verdict and figures as the report has them, and nobody's words as markup."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedgauge.server.store.run import Run
from fedgauge.server.views.leak_tables import summary_table
from fedgauge.server.views.snapshot import read_once
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.reports.notebook import load_ipython_extension
from tests.simulations.reports.report_pages import HOSTILE, Page
from tests.small_runs import scenario


def shown(value: object) -> Any:
    """What IPython would show, by its kind, once the extension is loaded."""
    formatters = pytest.importorskip("IPython.core.formatters", reason="needs ipykernel, of the extra dev")
    shell = SimpleNamespace(display_formatter=formatters.DisplayFormatter())
    load_ipython_extension(shell)
    return shell.display_formatter.format(value)


def test_a_run_shows_its_verdict_and_its_attacks(attacked: Run) -> None:
    data, _ = shown(attacked)
    page = Page(data["text/html"])
    with read_once(attacked) as reading:
        for sentence in verdict_of(reading).sentences:
            assert " ".join(sentence.split()) in page.words
        cells = [cell for row in summary_table(reading).written for cell in row]
    assert cells and all(" ".join(cell.split()) in page.words for cell in cells)
    assert page.scripts == [] and page.links == []


def test_foreign_text_is_never_markup(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a<i>run", scenario())
    with run.ledger() as ledger:
        ledger.set_meta(replay="mismatch", replay_detail=HOSTILE)
        ledger.add_problem("undone", HOSTILE, 1)
        ledger.record_round(1, 0.5, 1.0, 1.0)
    data, _ = shown(run)
    page = Page(data["text/html"])
    assert page.scripts == [] and page.links == [] and "<b>" not in page.html and "<i>" not in page.html
    assert page.words.count(HOSTILE) >= 2 and "a<i>run" in page.words
    assert json.dumps(page.html).count("\\u001b") == 0
