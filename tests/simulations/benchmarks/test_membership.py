"""The membership benchmark: its table on one row, and what was kept of the whole."""

import json

import pytest

from fedgauge.simulations.benchmarks.__main__ import BENCHMARKS, RESULTS
from fedgauge.simulations.benchmarks.membership import METHODS, ROWS, SHOWN, membership


def test_it_is_run_by_name() -> None:
    assert BENCHMARKS["membership"] is membership


@pytest.mark.full
@pytest.mark.slow
def test_one_row_gives_every_score_with_its_interval_and_controls() -> None:
    told: list[tuple[int, int]] = []
    report = membership(
        lambda done, total: told.append((done, total)), rows=("noise .1",), seeds=(0,), updates=8, rounds=(1,)
    )
    assert told == [(1, 1)]
    assert [row["score"] for row in report.rows] == list(METHODS)
    best = report.rows[0]
    assert best["n"] == 32
    assert float(best["auc"][0]) > 0.9  # type: ignore[index]
    assert set(best) >= {"auc_against_own_shard", "auc_shuffled", "auc_untrained_on", "limit", "tpr_at_0.1_percent"}
    assert [figure.name for figure in report.figures][::2] == [f"noise .1, untrained: {name}" for name in SHOWN]
    json.dumps([dict(row) for row in report.rows], allow_nan=False)


def test_the_kept_result_has_every_row_and_its_controls_hold() -> None:
    kept = json.loads((RESULTS / "membership.json").read_text())
    cells = {(row["row"], row["round"], row["score"]): row for row in kept["rows"]}
    assert {name for name, _, _ in cells} == set(ROWS)
    assert len(kept["settings"]["seeds"]) >= 2
    for cell, row in cells.items():
        assert len(row["auc"]) == 3, cell
        if cell[2] in ("loss", "label_frequency"):
            assert abs(row["auc"][0] - 0.5) < 0.1, cell
