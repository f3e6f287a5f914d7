"""Several runs compared: final test accuracy against leakage."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.strength import Tradeoff, best_of, mean_of
from fedgauge.simulations.reports.figures.data import LeakPoint, RunResults, leak_points
from fedgauge.simulations.reports.figures.leakage import interval_entry
from fedgauge.simulations.reports.figures.style import (
    COLOURS,
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


def tradeoff_figures(all_results: Sequence[RunResults]) -> list[PaperFigure]:
    metrics = [m for m in MEASURED if sum(m in s.leaks for s in all_results) > 1]
    about = ". ".join(f"{i}: {s.run.name}. {s.knowledge}" for i, s in enumerate(all_results, 1))
    drawings = []
    for metric in metrics:
        points = _tradeoff_points(all_results, metric)
        if len({p.run for p in points}) > 1:
            drawings.append(PaperFigure(f"utility-{metric}", _tradeoff_figure(all_results, metric, points), about))
    return drawings


def _tradeoff_points(all_results: Sequence[RunResults], metric: str) -> list[TradeoffPoint]:
    return [
        TradeoffPoint(run, own.accuracy, leak)
        for run, results in enumerate(all_results)
        if (own := results.tradeoffs.get(metric)) is not None and own.accuracy is not None
        for leak in leak_points(_pooled(results, metric))
        if leak.kind == "attack"
    ]


def _pooled(results: RunResults, metric: str) -> list[Leak]:
    return [leak for leak in results.leaks.get(metric, ()) if leak.round is None]


def front(tradeoffs: Sequence[Tradeoff]) -> list[list[tuple[float, float]]]:
    """Leakage and accuracy along the Pareto front of each data set, by accuracy."""
    best = [(t.data, t.place) for t in tradeoffs if t.place is not None and t.is_optimal(tradeoffs)]
    return [
        sorted({place for of, place in best if of == data}, key=lambda place: place[1])
        for data in dict.fromkeys(data for data, _ in best)
    ]


def _tradeoff_figure(all_results: Sequence[RunResults], metric: str, points: Sequence[TradeoffPoint]) -> Figure:
    """Final accuracy against leakage; a grey mark shows the run's best baseline, above which there is leakage.

    Colours are runs and markers are attacks; a run's number is beside its strongest attack.
    """
    figure, axes = new_axes()
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
    floors = {run: mean_of(best_of(_pooled(all_results[run], metric), "baseline")) for run in by_run}
    baselines = [(floor, by_run[run]) for run, floor in floors.items() if floor is not None]
    if baselines:
        handles += axes.plot(*zip(*baselines, strict=True), color=MUTED, marker="|", ls="", ms=7, label="best baseline")
    tradeoffs = {run: all_results[run].tradeoffs[metric] for run in by_run}
    for i, line in enumerate(front([*tradeoffs.values()])):
        drawn = axes.plot(*zip(*line, strict=True), color=INK, lw=0.8, drawstyle="steps-post", zorder=1)
        drawn[0].set_label("Pareto front (strongest attacks)")
        handles += [] if i else drawn
    for run, tradeoff in tradeoffs.items():
        if tradeoff.place is not None:
            axes.annotate(str(run + 1), tradeoff.place, xytext=(3, 3), textcoords="offset points", size=7)
    axes.margins(0.1)
    axes.set(xlabel=MEASURED[metric].label, ylabel="test accuracy at the end")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if MEASURED[metric].fraction:
        percent_axis(axes.xaxis)
        axes.set_xlim(-0.04, 1.06)
    else:
        values = [*(p.leakage for p in points), *(floor for floor, _ in baselines)]
        axes.set_xlim(value_limits(metric, values, axes.get_xlim()))
    for run, colour in colours.items():
        handles.append(Patch(color=colour, label=f"{run + 1}  {all_results[run].run.name}"))
    add_legend(figure, handles)
    return figure
