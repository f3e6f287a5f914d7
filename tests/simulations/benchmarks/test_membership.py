"""The membership benchmark: its tables on one row, what was kept of the whole, and what the page says of it."""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.client.local_data import has_images
from fedgauge.simulations.benchmarks.__main__ import BENCHMARKS, RESULTS
from fedgauge.simulations.benchmarks.membership import fedmia_baselines, membership, over_rounds, single_updates
from fedgauge.simulations.benchmarks.membership import fedmia_table as fedmia
from fedgauge.simulations.benchmarks.membership.benchmark import joined
from fedgauge.simulations.benchmarks.membership.cost import MOST, cost
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport

PAGE = Path(__file__).resolve().parents[3] / "docs/measurement.md"


def no_progress(done: int, total: int) -> None:
    """Nobody watches."""


@cache
def kept(table: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / "membership.json").read_text())["rows"]
    return [row for row in rows if row["table"] == table]


def test_it_is_run_by_name() -> None:
    assert BENCHMARKS["membership"] is membership


def test_tables_are_joined_under_their_names() -> None:
    found = joined({name: BenchmarkReport((), {"seeds": [0]}, ({"row": name},)) for name in ("one", "two")})
    assert found.settings == {"one: seeds": [0], "two: seeds": [0]}
    assert found.rows == ({"table": "one", "row": "one"}, {"table": "two", "row": "two"})


# ------------------------------------------------------------------------------------------------------ on one row


@pytest.mark.full
@pytest.mark.slow
def test_one_row_gives_every_score_with_its_interval_and_controls() -> None:
    told: list[tuple[int, int]] = []
    report = single_updates.single_updates(
        lambda done, total: told.append((done, total)), rows=("noise .1",), seeds=(0,), updates=8, rounds=(1,)
    )
    assert told == [(1, 1)]
    assert [row["score"] for row in report.rows] == list(single_updates.METHODS)
    best = report.rows[0]
    assert best["n"] == 32
    assert float(best["auc"][0]) > 0.9  # type: ignore[index]
    assert set(best) >= {"auc_against_own_shard", "auc_shuffled", "auc_untrained_on", "limit", "tpr_at_0.1_percent"}
    names = [figure.name for figure in report.figures][::2]
    assert names == [f"noise .1, untrained: {name}" for name in single_updates.SHOWN]
    json.dumps([dict(row) for row in report.rows], allow_nan=False)


@pytest.mark.full
@pytest.mark.slow
def test_after_two_rounds_members_of_both_batches_are_told() -> None:
    report = over_rounds.over_rounds(no_progress, rows=("noise .1",), seeds=(0,), rounds=(1, 2))
    alone: dict[Any, Any] = {row["alone"]: row for row in report.rows if "alone" in row}
    assert {row["n"] for row in alone.values()} == {32}
    assert alone["calibrated"]["tpr_at_1_percent"][0] > 0.5
    cells = {(row["score"], row["accumulated"], row["rounds"]): row for row in report.rows if "alone" not in row}
    assert len(cells) == 2 * (5 + 2)
    for count in (1, 2):
        best: Any = cells["likelihood_ratio", "highest", count]
        assert best["in_a_batch"]["n"] == 16 * count
        assert best["in_a_batch"]["auc"][0] > 0.9
        assert abs(best["held"]["auc"][0] - 0.5) < 0.1
    json.dumps([dict(row) for row in report.rows], allow_nan=False)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not has_images("cifar10"), reason="needs CIFAR-10 in the local data folder (FEDGAUGE_DATA)")
def test_after_one_round_on_all_of_a_clients_data_it_is_told() -> None:
    report = fedmia.fedmia_table(no_progress, rows=("none",), seeds=(0,), rounds=(1,))
    cells: dict[Any, Any] = {row["score"]: row for row in report.rows}
    assert list(cells) == list(fedmia.METHODS)
    assert cells["likelihood_ratio"]["auc"][0] > 0.6
    assert cells["likelihood_ratio"]["n"] == 300
    assert cells["loss"]["auc_against_other_clients"][0] == 0.5  # the weights are the same for all clients
    json.dumps([dict(row) for row in report.rows], allow_nan=False)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not has_images("cifar100"), reason="needs CIFAR-100 in the local data folder (FEDGAUGE_DATA)")
def test_one_row_of_fedmias_comparison_has_every_method() -> None:
    report = fedmia_baselines.fedmia_baselines(no_progress, rows=("sampling",), rounds=(1,))
    cells: dict[Any, Any] = {row["score"]: row for row in report.rows}
    assert list(cells) == list(fedmia_baselines.METHODS)
    assert cells["Grad-Cosine"]["auc"][0] == cells["Avg-Cosine"]["auc"][0], "of one round"
    # the weights are the same for all clients, so every pair counts once each way, unless one of them lacks the other's label
    assert abs(cells["Grad-Norm"]["auc_against_other_clients"][0] - 0.5) < 0.02


@pytest.mark.full
@pytest.mark.slow
def test_the_cost_is_of_the_scores_that_a_test_computes() -> None:
    report = cost(no_progress)
    assert len(report.figures) == 4 and all(figure.value for figure in report.figures)


def test_the_kept_comparison_and_cost_have_every_figure() -> None:
    rows = kept("FedMIA's comparison")
    assert [(row["row"], row["score"]) for row in rows] == [
        (name, method) for name in fedmia_baselines.ROWS for method in fedmia_baselines.METHODS
    ]
    figures = {f["name"]: f for f in json.loads((RESULTS / "membership.json").read_text())["figures"]}
    assert {name: figures[f"{name}: 1,000 candidates, matched_filter"]["met"] for name in MOST} == {
        "lenet": True, "resnet20": True
    }  # fmt: skip


def test_rounds_accumulate_as_they_are_said_to() -> None:
    """A candidate that is in one batch of three loses its place in a sum, and keeps it in the others."""
    labels, null = (torch.zeros(count, dtype=torch.int64) for count in (4, 60))
    raw = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    raw[:, 0, 0] = torch.tensor([-8.0, 9.0, -8.0])
    found = over_rounds.accumulated("likelihood_ratio", raw, labels, null, share=0.01)
    assert {how: int(scores[0].argmax()) == 0 for how, scores in found.items()} == {
        "highest": True, "sum": False, "sum of log-ratios": False, "highest ratio": True, "mixture": True
    }  # fmt: skip
    excess = [max(0.0, math.log(float(ratios.exp().mean()))) for ratios in raw[:, 0, 4:]]
    assert all(excess)
    own = [ratio - over for ratio, over in zip((-8.0, 9.0, -8.0), excess, strict=True)]
    assert float(found["highest ratio"][0, 0]) == pytest.approx(own[1])
    assert float(found["mixture"][0, 0]) == pytest.approx(sum(math.log(0.99 + 0.01 * math.exp(one)) for one in own))
    assert set(over_rounds.accumulated("matched_filter", raw, labels, null, 0.01)) == {
        "highest", "sum"
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ what was kept


def test_the_kept_single_updates_have_every_row_and_their_controls_hold() -> None:
    cells = {(row["row"], row["round"], row["score"]): row for row in kept("single updates")}
    assert {name for name, _, _ in cells} == {*single_updates.ROWS, *single_updates.LARGER}
    for cell, row in cells.items():
        assert len(row["auc"]) == 3, cell
        if cell[2] in ("loss", "label_frequency"):
            assert abs(row["auc"][0] - 0.5) < 0.1, cell


def test_the_kept_rounds_have_every_row() -> None:
    rows = kept("over rounds")
    alone = {(row["row"], row["alone"]) for row in rows if "alone" in row}
    assert len(alone) == len(over_rounds.ROWS) * 3
    found = {(row["row"], row["rounds"], row["accumulated"]) for row in rows if "alone" not in row}
    ways = {how for _, _, how in found}
    assert ways == {"highest", "sum", "sum of log-ratios", "highest ratio", "mixture"}
    assert len(found) == len(over_rounds.ROWS) * len(over_rounds.ROUNDS) * len(ways)


def test_the_kept_table_of_fedmia_has_every_row_and_its_control_holds() -> None:
    rows = kept("FedMIA")
    assert [(row["row"], row["score"]) for row in rows] == [(r, m) for r in fedmia.ROWS for m in fedmia.METHODS]
    assert {row["auc_against_other_clients"][0] for row in rows if row["score"] == "loss"} == {0.5}


# ------------------------------------------------------------------------------------------------------ the page


def shown(*estimates: list[float | None]) -> str:
    """Figures as the page shows them, without intervals."""
    return " / ".join(f"{estimate[0]:.2f}" for estimate in estimates)


def lines_of_batches() -> list[str]:
    """AUC and true positives at 1 % of the likelihood ratio, by batch, untrained and trained."""
    cells = {(row["row"], row["round"]): row for row in kept("single updates") if row["score"] == "likelihood_ratio"}
    named = {"none": "4", "batch of 16": "16", "batch of 64": "64", "batch of 256": "256"}
    named |= {"noise .1": "4, noise .1", "noise .1, batch of 64": "64, noise .1"}
    lines = []
    for name, words in named.items():
        both = [cells[name, stage] for stage in single_updates.ROUNDS]
        told = [shown(row["auc"], row["tpr_at_1_percent"]) for row in both]
        lines.append(f"| {words} | {both[0]['n']} | {told[0]} | {told[1]} |")
    return lines


def lines_of_rounds() -> list[str]:
    """The same of candidates of whom a batch had some so far, and of all that a client holds, by how rounds add up."""
    cells: Mapping[Any, Any] = {
        (row["row"], row["rounds"], row["accumulated"]): row
        for row in kept("over rounds")
        if row["score"] == "likelihood_ratio" and "alone" not in row
    }
    lines = []
    for name in over_rounds.ROWS:
        for count in over_rounds.ROUNDS:
            ways = [cells[name, count, how] for how in over_rounds.LISTED]
            told = [shown(way["in_a_batch"]["auc"], way["in_a_batch"]["tpr_at_1_percent"]) for way in ways]
            held = [shown(way["held"]["auc"], way["held"]["tpr_at_1_percent"]) for way in (ways[0], ways[-1])]
            lines.append(f"| {name} | {count} | {ways[0]['in_a_batch']['n']} | {' | '.join(told + held)} |")
    return lines


def lines_of_comparisons() -> list[str]:
    """The same of single updates, by how the log-ratio is compared between labels and updates."""
    cells = {(row["row"], row["alone"]): row for row in kept("over rounds") if "alone" in row}
    lines = []
    for name in over_rounds.ROWS:
        ways = [cells[name, way] for way in ("standardised", "plain", "calibrated")]
        told = [shown(way["auc"], way["tpr_at_1_percent"]) for way in ways]
        held_out = [f"{way['tpr_at_1_percent_by_seed'][1]:.2f}" for way in (ways[0], ways[-1])]
        lines.append(f"| {name} | {ways[0]['n']} | {' | '.join(told)} | {' | '.join(held_out)} |")
    return lines


def lines_of_fedmia() -> list[str]:
    """The same of sums over rounds, by defense and score, with the accuracy that is left."""
    cells = {(row["row"], row["score"]): row for row in kept("FedMIA")}
    lines = []
    for name in fedmia.ROWS:
        told = [
            shown(cells[name, method]["auc"], cells[name, method]["tpr_at_1_percent"])
            for method in fedmia.METHODS
            if method != "matched_filter"  # standardised, it is the cosine
        ]
        lines.append(f"| {name} | {100 * cells[name, 'loss']['accuracy']:.0f} % | {' | '.join(told)} |")
    return lines


def lines_of_fedmias_comparison() -> list[str]:
    """The same of FedMIA's baselines and attacks."""
    cells = {(row["row"], row["score"]): row for row in kept("FedMIA's comparison")}
    lines = []
    for name in fedmia_baselines.ROWS:
        every = [cells[name, method] for method in fedmia_baselines.METHODS]
        told = [shown(cell["auc"], cell["tpr_at_1_percent"]) for cell in every]
        lines.append(f"| {name} | {100 * every[0]['accuracy']:.0f} % | {' | '.join(told)} |")
    return lines


@pytest.mark.parametrize(
    "lines", [lines_of_batches, lines_of_comparisons, lines_of_rounds, lines_of_fedmia, lines_of_fedmias_comparison]
)
def test_the_page_shows_what_was_kept(lines: Any) -> None:
    assert "\n".join(lines()) in PAGE.read_text()
