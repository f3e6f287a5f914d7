"""Compared runs: the Pareto front and what is drawn beside it."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.strength import Tradeoff, best_of, fronts
from fedgauge.simulations.reports.figures.write import write_figures
from tests.simulations.reports.figures.graded_runs import SVG, graded, only_psnr


def run_at(data: str, accuracy: float | None, leaks: Sequence[float], metric: str) -> Tradeoff:
    """A run whose attacks leak so much on average."""
    found = [Leak(f"attack {i}", None, metric, 3, {}, mean, mean, mean, None, None, 3) for i, mean in enumerate(leaks)]
    return Tradeoff(data, accuracy, best_of(found, "attack"))


FEW = st.integers(0, 4).map(float)


@given(st.lists(st.tuples(st.sampled_from("ab"), FEW, st.lists(FEW, min_size=1)), max_size=8), st.booleans())
def test_the_front_is_what_nothing_dominates(drawn: list[tuple[str, float, list[float]]], higher: bool) -> None:
    """Against its definition, of each run's strongest attack, one front for each data set."""
    metric, sign = ("psnr", 1) if higher else ("mse", -1)
    runs = [run_at(data, accuracy, leaks, metric) for data, accuracy, leaks in drawn]
    places = [(data, accuracy, max(sign * leak for leak in leaks)) for data, accuracy, leaks in drawn]

    def dominated(data: str, accuracy: float, leak: float) -> bool:
        return any(d == data and a >= accuracy and m <= leak and (a, m) != (accuracy, leak) for d, a, m in places)

    best = {place for place in places if not dominated(*place)}
    assert {p for p, run in zip(places, runs, strict=True) if run.is_optimal(runs)} == best
    lines = [[(accuracy, sign * leak) for accuracy, leak in line] for line in fronts(runs).values()]
    expected = [sorted((a, m) for d, a, m in best if d == data) for data in dict.fromkeys(d for d, _, _ in places)]
    assert sorted(lines) == sorted(expected)


def test_a_run_without_accuracy_or_without_a_value_is_on_no_front() -> None:
    whole = run_at("a", 0.5, [20.0], "psnr")
    untested, empty = run_at("a", None, [5.0], "psnr"), run_at("a", 0.9, [], "psnr")
    assert [run.is_optimal([whole, untested, empty]) for run in (whole, untested, empty)] == [True, False, False]


def test_runs_are_compared_by_what_they_end_with(tmp_path: Path) -> None:
    run = graded(tmp_path / "graded", only_psnr)
    weaker = lambda attack, round, client: {"psnr": {"first": 12.0, "second": 15.0}.get(attack, 11.0)}  # noqa: E731
    other = graded(tmp_path / "other" / "graded", weaker, accuracy=0.2, limit=False)
    paths, missing = write_figures([run, other, run], tmp_path / "figures")
    assert missing == []
    folder = tmp_path / "figures"
    assert {p.name for p in folder.iterdir()} == {"graded", "graded-2", "utility-psnr.png", "utility-psnr.svg"}
    assert {p.parent for p in paths} == {folder, folder / "graded", folder / "graded-2"}
    page = ElementTree.parse(folder / "utility-psnr.svg").getroot()
    words = ["".join(e.itertext()) for e in page.iter(f"{SVG}text")]
    for needed in ("1  graded", "2  graded-2", "Pareto front (strongest attacks)", "best baseline", "first", "second"):
        assert needed in words
    assert "bayes_limit" not in words, "a limit is no attack"
