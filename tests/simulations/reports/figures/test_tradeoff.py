"""Compared runs: the Pareto front and what is drawn beside it."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fedgauge.simulations.reports.figures.data import LeakPoint
from fedgauge.simulations.reports.figures.tradeoff import TradeoffPoint, pareto
from fedgauge.simulations.reports.figures.write import write_figures
from tests.simulations.reports.figures.graded_runs import SVG, graded, only_psnr


def point(run: int, accuracy: float, leak: float, attack: str = "first") -> TradeoffPoint:
    return TradeoffPoint(run, accuracy, LeakPoint(attack, 0, leak, leak, None, 3))


POINTS = st.lists(
    st.builds(
        point,
        st.integers(0, 5),
        st.integers(0, 4).map(float),
        st.integers(0, 4).map(float),
        st.sampled_from(["first", "second"]),
    ),
    max_size=12,
)


@given(POINTS, st.booleans())
def test_the_front_is_what_nothing_dominates(drawn: list[TradeoffPoint], higher: bool) -> None:
    """Against its definition, of each run's strongest attack; a run has one accuracy."""
    accuracy = {p.run: p.accuracy for p in drawn}
    drawn = [point(p.run, accuracy[p.run], p.leakage, p.leak.attack) for p in drawn]
    sign = 1 if higher else -1
    leaks = {r: max(sign * p.leakage for p in drawn if p.run == r) for r in accuracy}

    def dominated(run: int) -> bool:
        return any(
            accuracy[o] >= accuracy[run]
            and leaks[o] <= leaks[run]
            and (accuracy[o], leaks[o]) != (accuracy[run], leaks[run])
            for o in accuracy
        )

    front = pareto(drawn, higher)
    places = [(p.accuracy, sign * p.leakage) for p in front]
    assert places == sorted({(accuracy[r], leaks[r]) for r in accuracy if not dominated(r)})


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
    for needed in ("1  graded", "2  graded", "Pareto front (strongest attacks)", "best baseline", "first", "second"):
        assert needed in words
    assert "bayes_limit" not in words, "a limit is no attack"
