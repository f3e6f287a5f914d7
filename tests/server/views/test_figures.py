"""Specifications of figures: lines, intervals and looks are what the analysis computed."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.store.run import Run
from fedgauge.server.views.compare import named_readings, utility_figure
from fedgauge.server.views.figures import Figure, Series, rounds_figures, success_figure
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.snapshot import read_once
from tests.server.views.graded_runs import METRICS, graded, only_psnr

ROUNDS = (1, 2, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return graded(tmp_path_factory.mktemp("runs") / "graded")


def specified(run: Run) -> dict[str, Figure]:
    with read_once(run) as reading:
        success = success_figure(reading)
        return {figure.name: figure for figure in (*rounds_figures(reading), *([success] if success else []))}


def series_of(figure: Figure) -> dict[str, Series]:
    return {series.name: series for series in figure.series}


@pytest.mark.parametrize("metric", METRICS)
def test_lines_and_bands_are_the_analysis(run: Run, metric: str) -> None:
    figure = specified(run)[f"leakage-{metric}"]
    lines = series_of(figure)
    with read_once(run) as reading:
        leaks = [k for k in reading.leakage(metric) if k.round is not None]

    def of(attack: str, value: Callable[[Leak], float | None]) -> list[float | None]:
        return [value(k) for k in leaks if k.attack == attack]

    for attack in ("first", "second"):
        line = lines[attack]
        assert (line.x, line.mean) == ([*ROUNDS], of(attack, lambda k: k.mean))
        assert [*line.low] == of(attack, lambda k: k.low) and [*line.high] == of(attack, lambda k: k.high)
        assert [*line.worst] == ([] if metric == "identified" else of(attack, lambda k: k.best))
    for baseline in ("mean_image", "random_image"):
        assert lines[baseline].mean == of(baseline, lambda k: k.mean) and not lines[baseline].low
    assert any(s.role == "estimate" for s in figure.series) == (metric == "mse"), "a mean of PSNRs is of another kind"
    assert lines["test accuracy (right)"].mean == [pytest.approx(0.1 if r == 0 else 0.1 * r) for r in range(4)]
    assert figure.y.label == MEASURED[metric].label
    assert figure.interval == ("95 % interval (Wilson)" if MEASURED[metric].rate else "95 % interval (3 clients)")


def test_each_series_looks_different(run: Run) -> None:
    looks = [series.look for series in specified(run)["leakage-mse"].series]
    assert len({(look.colour, tuple(look.dash), look.symbol) for look in looks}) == len(looks)


def test_an_exact_hit_is_drawn_at_the_cap(tmp_path: Path) -> None:
    def exact(attack: str, round: int, client: int) -> Mapping[str, float | None]:
        return {"psnr": math.inf if attack == "first" and client == 0 else 20.0}

    figures = specified(graded(tmp_path / "exact", exact, limit=False))
    line = series_of(figures["leakage-psnr"])["first"]
    assert ([*line.worst], line.mean) == ([60.0] * 3, [pytest.approx(100 / 3)] * 3)
    assert series_of(figures["success"])["first"].mean == [
        1.0 if t <= 20 else pytest.approx(1 / 3) for t in range(10, 61)
    ]


def test_one_client_has_no_band_and_a_round_without_an_image_no_point(tmp_path: Path) -> None:
    figure = specified(graded(tmp_path / "lone", only_psnr, clients=1))["leakage-psnr"]
    assert figure.interval == "" and [*series_of(figure)["first"].low] == [None] * 3

    def failing(attack: str, round: int, client: int) -> Mapping[str, float | None]:
        return {"psnr": None if attack == "first" and round == 2 else 20.0}

    figure = specified(graded(tmp_path / "failing", failing, limit=False))["leakage-psnr"]
    assert series_of(figure)["first"].x == [1, 3]


def test_runs_are_compared_by_what_they_end_with(tmp_path: Path) -> None:
    run = graded(tmp_path / "graded", only_psnr)
    weaker = lambda attack, round, client: {"psnr": {"first": 12.0, "second": 15.0}.get(attack, 11.0)}  # noqa: E731
    other = graded(tmp_path / "other" / "graded", weaker, accuracy=0.2, limit=False)
    with read_once(run) as one, read_once(other) as two:
        figure = utility_figure(named_readings([one, two]), "psnr")
    assert figure is not None
    assert [series.name for series in figure.series] == ["1  graded", "2  graded-2", "best baseline", ""]
    assert [(*series.x, *series.mean) for series in figure.series[:2]] == [
        (pytest.approx(0.3), 30.0),
        (pytest.approx(0.2), 15.0),
    ]
