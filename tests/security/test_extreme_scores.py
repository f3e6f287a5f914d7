"""Scores of a ledger from elsewhere at the ends of what a number can be: every view answers, and computes without a warning."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from fedgauge.server.store.run import Run
from fedgauge.server.views.scores import LARGEST, Scores
from tests.security.tampering import READERS


@pytest.mark.parametrize("value", ["1.7e308", "-1.7e308", "9e999", "-9e999", "1.7e308 * (1 - 2 * (example % 2))"])
def test_no_score_makes_a_view_overflow(attacked_run: Run, tmp_path: Path, value: str) -> None:
    """Warnings are errors here: of a number too large, of infinity minus infinity."""
    run = Run(Path(shutil.copytree(attacked_run.folder, tmp_path / "run")))
    db = sqlite3.connect(run.folder / "ledger.sqlite")
    db.execute(f"UPDATE scores SET value = {value}")
    db.commit()
    db.close()
    (tmp_path / "good").symlink_to(run.folder)
    for name in ("list", "overview", "clients", "compare", "gate"):
        READERS[name](run.folder)


def test_of_infinite_values_only_an_exact_hit_is_one() -> None:
    values = (2.0, LARGEST, -LARGEST, 2 * LARGEST, float("inf"), float("-inf"))
    read = Scores.empty().extended(
        (1, 0, "dlg", example, metric, "converged", value)
        for metric in ("psnr", "mse")
        for example, value in enumerate(values)
    )
    known = [repr(v) for v in read.of_metric("psnr").value.tolist()]
    assert known == ["2.0", "1e+100", "-1e+100", "nan", "inf", "nan"]
    assert [repr(v) for v in read.of_metric("mse").value.tolist()] == [*known[:4], "nan", "nan"]
