"""Figures of leakage: lines, bands and legends show what the analysis computed."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from matplotlib.collections import FillBetweenPolyCollection, LineCollection
from matplotlib.colors import to_hex

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.store.run import Run
from fedgauge.server.views.leakage import leakage
from fedgauge.simulations.reports.figures import MUTED, PURPLE, write_figures
from tests.simulations.reports.figures.graded_runs import (
    BLUE,
    METRICS,
    VERMILION,
    drawn,
    graded,
    named,
    only_psnr,
    points,
)
from tests.small_runs import scores_of


@pytest.mark.parametrize("metric", METRICS)
def test_lines_are_the_analysis(run: Run, metric: str) -> None:
    axes, right = drawn(run)[f"leakage-{metric}"].axes
    with run.ledger() as ledger:
        leaks = [k for k in leakage(scores_of(ledger), metric) if k.round is not None]
    for attack, color in (("first", BLUE), ("second", VERMILION)):
        own = [k for k in leaks if k.attack == attack]
        (mean,) = points(axes, color, "-")
        assert mean == [(k.round, k.mean) for k in own]
        worst = points(axes, color, ":")
        assert worst == ([] if metric == "identified" else [[(k.round, k.best) for k in own]])
    baselines = [[(k.round, k.mean) for k in leaks if k.attack == name] for name in ("mean_image", "random_image")]
    assert points(axes, MUTED) == baselines
    limits = [(k.round, k.mean) for k in leaks if k.attack == "bayes_limit"]
    assert points(axes, PURPLE) == ([limits] if limits else [])
    assert bool(limits) == (metric == "mse"), "a mean of PSNRs is of another kind"
    (accuracy,) = [line.get_xydata().tolist() for line in right.get_lines()]
    assert accuracy == [[r, pytest.approx(0.1 if r == 0 else 0.1 * r)] for r in range(4)]
    assert axes.get_ylabel().replace("\n", " ") == MEASURED[metric].label


def test_bands_are_the_intervals(run: Run) -> None:
    axes = drawn(run)["leakage-psnr"].axes[0]
    with run.ledger() as ledger:
        leaks = [k for k in leakage(scores_of(ledger), "psnr") if k.round and k.attack in ("first", "second")]
    bands = [c for c in axes.collections if isinstance(c, FillBetweenPolyCollection)]
    assert len(bands) == 2
    for band, attack in zip(bands, ("first", "second"), strict=True):
        corners = {tuple(v) for v in band.get_paths()[0].vertices.tolist()}
        assert {(k.round, v) for k in leaks if k.attack == attack for v in (k.low, k.high)} <= corners


def test_everything_drawn_has_a_name(run: Run) -> None:
    figures = drawn(run)
    limit = "Bayes error if the images of a class were\nGaussian (an estimate)"
    common = ["first", "second", "mean_image", "random_image"]
    tail = ["test accuracy (right)", "worst case", "95 % interval (3 clients)"]
    assert named(figures["leakage-psnr"]) == common + tail
    assert named(figures["leakage-mse"]) == [*common[:2], limit, *common[2:], *tail]
    assert "95 % interval (Wilson)" in named(figures["leakage-identified"])
    assert "worst case" not in named(figures["leakage-identified"])
    assert named(figures["success"]) == ["first", "second", "mean_image", "random_image"]


def test_baselines_are_grey_and_dashed_each_in_its_own_way(run: Run) -> None:
    axes = drawn(run)["leakage-psnr"].axes[0]
    dashes = [line._unscaled_dash_pattern for line in axes.get_lines() if to_hex(line.get_color()) == MUTED]  # type: ignore[attr-defined]
    assert len(dashes) == len({str(d) for d in dashes}) == 2
    assert all(pattern is not None for _, pattern in dashes)


def test_an_exact_hit_is_drawn_at_the_cap(tmp_path: Path) -> None:
    def exact(attack: str, round: int, client: int) -> Mapping[str, float | None]:
        return {"psnr": math.inf if attack == "first" and client == 0 else 20.0}

    run = graded(tmp_path / "exact", exact, limit=False)
    figures = drawn(run)
    axes = figures["leakage-psnr"].axes[0]
    assert points(axes, BLUE, ":") == [[(r, 60.0) for r in (1, 2, 3)]]
    assert points(axes, BLUE, "-") == [[(r, pytest.approx(100 / 3)) for r in (1, 2, 3)]]
    assert points(figures["success"].axes[0], BLUE) == [
        [(t, 1.0 if t <= 20 else pytest.approx(1 / 3)) for t in range(10, 61)]
    ]
    assert write_figures([run], tmp_path / "figures")[1] == []


def test_one_client_has_no_band(tmp_path: Path) -> None:
    run = graded(tmp_path / "lone", only_psnr, clients=1)
    figures = drawn(run)
    assert list(figures["leakage-psnr"].axes[0].collections) == []
    assert not [name for name in named(figures["leakage-psnr"]) if "interval" in name]
    assert write_figures([run], tmp_path / "figures")[1] == []


def test_one_round_is_drawn_in_points_that_can_be_told_apart(tmp_path: Path) -> None:
    run = graded(tmp_path / "single", rounds=1)
    axes = drawn(run)["leakage-psnr"].axes[0]
    firsts, seconds = points(axes, BLUE), points(axes, VERMILION)
    assert [y for ((_, y),) in firsts] == [29.0, 28.0], "worst case and mean"
    assert [y for ((_, y),) in seconds] == [24.0, 23.0]
    with run.ledger() as ledger:
        leaks = [k for k in leakage(scores_of(ledger), "psnr") if k.round and k.attack in ("first", "second")]
    bars = [c.get_segments()[0][:, 1].tolist() for c in axes.collections if isinstance(c, LineCollection)]
    assert bars == [pytest.approx((k.low, k.high)) for k in leaks]
    assert points(axes, MUTED) == [[(1.0, 13.0)], [(1.0, 13.0)]]


def test_a_round_without_an_image_leaves_its_place_empty(tmp_path: Path) -> None:
    def failing(attack: str, round: int, client: int) -> Mapping[str, float | None]:
        return {"psnr": None if attack == "first" and round == 2 else 20.0}

    figures = drawn(graded(tmp_path / "failing", failing, limit=False))
    assert points(figures["leakage-psnr"].axes[0], BLUE, "-") == [[(1, 20.0), (3, 20.0)]]
