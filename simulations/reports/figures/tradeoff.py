"""Several runs compared: final test accuracy against leakage."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from fedgauge.attacks.modality.registry import HIGHER_IS_BETTER, LABELS
from fedgauge.simulations.reports.figures.data import LeakPoint, RunResults, leak_points
from fedgauge.simulations.reports.figures.leakage import interval_entry
from fedgauge.simulations.reports.figures.style import (
    COLOURS,
    FRACTIONS,
    INK,
    MARKERS,
    MUTED,
    PaperFigure,
    add_legend,
    display_name,
    new_axes,
    percent_axis,
    value_limits,
)


@dataclass(frozen=True)
class TradeoffPoint:
    """One attack on one run: its leakage over all rounds, and the run's final accuracy."""

    run: int
    accuracy: float
    leak: LeakPoint

    @property
    def leakage(self) -> float:
        """The mean leakage."""
        return self.leak.mean


def strongest(points: Sequence[TradeoffPoint], higher_leaks: bool) -> list[TradeoffPoint]:
    """For each run, the point of its strongest attack."""
    sign = 1 if higher_leaks else -1
    by_run: dict[int, TradeoffPoint] = {}
    for point in points:
        if point.run not in by_run or sign * point.leakage > sign * by_run[point.run].leakage:
            by_run[point.run] = point
    return list(by_run.values())


def pareto(points: Sequence[TradeoffPoint], higher_leaks: bool) -> list[TradeoffPoint]:
    """The runs that no other beats in both accuracy and leakage, sorted by accuracy."""
    sign = 1 if higher_leaks else -1
    front: list[TradeoffPoint] = []
    for point in sorted(strongest(points, higher_leaks), key=lambda p: (-p.accuracy, sign * p.leakage)):
        if not front or sign * point.leakage < sign * front[-1].leakage:
            front.append(point)
    return front[::-1]


def tradeoff_figures(all_results: Sequence[RunResults]) -> list[PaperFigure]:
    metrics = [m for m in HIGHER_IS_BETTER if sum(m in s.leaks for s in all_results) > 1]
    about = ". ".join(f"{i}: {s.run.name}. {s.knowledge}" for i, s in enumerate(all_results, 1))
    drawings = []
    for metric in metrics:
        points = _tradeoff_points(all_results, metric)
        if len({p.run for p in points}) > 1:
            drawings.append(PaperFigure(f"utility-{metric}", _tradeoff_figure(all_results, metric, points), about))
    return drawings


def _tradeoff_points(all_results: Sequence[RunResults], metric: str) -> list[TradeoffPoint]:
    return [
        TradeoffPoint(run, results.accuracy[max(results.accuracy)], leak)
        for run, results in enumerate(all_results)
        if results.accuracy
        for leak in _pooled(results, metric)
        if leak.kind == "attack"
    ]


def _pooled(results: RunResults, metric: str) -> list[LeakPoint]:
    return leak_points([leak for leak in results.leaks.get(metric, ()) if leak.round is None])


def _tradeoff_figure(all_results: Sequence[RunResults], metric: str, points: Sequence[TradeoffPoint]) -> Figure:
    """Final accuracy against leakage; a grey mark shows the run's best baseline, above which there is leakage.

    Colours are runs and markers are attacks; a run's number is beside its strongest attack.
    """
    figure, axes = new_axes()
    higher = HIGHER_IS_BETTER[metric]
    handles: list[Artist] = []
    planned = dict.fromkeys(attack for results in all_results for attack in results.attacks)
    markers = {a: MARKERS[i % len(MARKERS)] for i, a in enumerate(planned) if any(p.leak.attack == a for p in points)}
    colours = {run: COLOURS[run % len(COLOURS)] for run in sorted({p.run for p in points})}
    for point in points:
        if point.leak.band:
            axes.hlines(point.accuracy, *point.leak.band, color=colours[point.run], linewidth=2.5, alpha=0.25)
        axes.plot(
            [point.leakage],
            [point.accuracy],
            color=colours[point.run],
            marker=markers[point.leak.attack],
            ls="",
            ms=4.5,
        )
    handles += [
        Line2D([], [], color=INK, marker=m, mfc="none", ls="", ms=4.5, label=display_name(a))
        for a, m in markers.items()
    ]
    handles += interval_entry(metric, [p.leak for p in points], Line2D([], [], color=INK, lw=2.5, alpha=0.25))
    by_run = {p.run: p.accuracy for p in points}
    baselines = [(f, a) for run, a in by_run.items() if (f := _best_baseline(all_results[run], metric)) is not None]
    if baselines:
        handles += axes.plot(*zip(*baselines, strict=True), color=MUTED, marker="|", ls="", ms=7, label="best baseline")
    front = pareto(points, higher)
    handles += axes.plot(
        [p.leakage for p in front], [p.accuracy for p in front], color=INK, lw=0.8, drawstyle="steps-post", zorder=1,
        label="Pareto front (strongest attacks)",
    )  # fmt: skip
    for point in strongest(points, higher):
        place = (point.leakage, point.accuracy)
        axes.annotate(str(point.run + 1), place, xytext=(3, 3), textcoords="offset points", size=7)
    axes.margins(0.1)
    axes.set(xlabel=LABELS.get(metric, metric), ylabel="test accuracy at the end")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if metric in FRACTIONS:
        percent_axis(axes.xaxis)
        axes.set_xlim(-0.04, 1.06)
    else:
        values = [*(p.leakage for p in points), *(floor for floor, _ in baselines)]
        axes.set_xlim(value_limits(metric, values, axes.get_xlim()))
    for run, colour in colours.items():
        handles.append(Patch(color=colour, label=f"{run + 1}  {all_results[run].run.name}"))
    add_legend(figure, handles)
    return figure


def _best_baseline(results: RunResults, metric: str) -> float | None:
    """The mean of the best baseline."""
    means = [leak.mean for leak in _pooled(results, metric) if leak.kind == "baseline"]
    return (max(means) if HIGHER_IS_BETTER[metric] else min(means)) if means else None
