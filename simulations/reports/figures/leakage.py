"""Leakage over rounds, one figure for each metric."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.roles import is_attack
from fedgauge.simulations.reports.figures.data import LeakPoint, RunResults, leak_points
from fedgauge.simulations.reports.figures.style import (
    FRACTION_LIMITS,
    INK,
    LineStyle,
    add_legend,
    display_name,
    new_axes,
    percent_axis,
    value_limits,
)

LETTERS = 30  # of an axis' label in a line


def leakage_figure(results: RunResults, metric: str, leaks: Sequence[Leak]) -> Figure:
    points = leak_points([leak for leak in leaks if leak.round is not None])
    by_attack = {a: own for a in results.order if (own := [s for s in points if s.attack == a])}
    attacks = [a for a in by_attack if is_attack(a)]
    figure, axes = new_axes()
    last = max(1, *results.accuracy, *(leak.round for leak in points))
    handles: list[Artist] = []
    for attack, own_points in by_attack.items():
        style = results.line_styles[attack]
        if len(own_points) > 1:
            handles.append(_draw_rounds(axes, own_points, style))
        elif attack in attacks:  # side by side, as error bars would hide each other
            shift = 0.03 * last * (attacks.index(attack) - (len(attacks) - 1) / 2)
            handles.append(_draw_single_round(axes, own_points[0], style, shift))
        else:
            handles.append(_draw_level(axes, own_points[0], style, 0.15 * last))
    if any(leak.worst is not None for leak in points):
        handles.append(Line2D([], [], color=INK, ls=":", marker="o", mfc="none", lw=1, label="worst case"))
    handles += interval_entry(metric, [s for s in points if s.attack in attacks], Patch(color=INK, alpha=0.2, lw=0))
    if results.accuracy:
        handles += _draw_accuracy(axes, results.accuracy)
    right_margin = 1.18 if any(len(own_points) == 1 for own_points in by_attack.values()) else 1.03
    axes.set(xlim=(-0.03 * last, right_margin * last), xlabel="round", ylabel=fill(MEASURED[metric].label, LETTERS))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if MEASURED[metric].fraction:
        percent_axis(axes.yaxis)
        axes.set_ylim(FRACTION_LIMITS)
    else:
        values = [value for s in points for value in (s.mean, s.worst) if value is not None]
        axes.set_ylim(value_limits(metric, values, axes.get_ylim()))
    add_legend(figure, handles)
    return figure


def _draw_rounds(axes: Axes, points: Sequence[LeakPoint], style: LineStyle) -> Artist:
    """Draw the means of one attack, baseline or limit; an attack also gets its 95 % band and its worst case (dotted)."""
    attack, marker_step = points[0].kind == "attack", max(1, len(points) // 10)
    bands = [(leak.round, leak.band) for leak in points if leak.band]
    if attack and len(bands) > 1:
        rounds, low, high = [r for r, _ in bands], [b[0] for _, b in bands], [b[1] for _, b in bands]
        axes.fill_between(rounds, low, high, color=style.color, alpha=0.2, linewidth=0)
    if worst := [(leak.round, leak.worst) for leak in points if leak.worst is not None]:
        x, y = [r for r, _ in worst], [w for _, w in worst]
        axes.plot(
            x, y, color=style.color, ls=":", lw=1, marker=style.marker, mfc="none", mew=0.7, markevery=marker_step
        )
    (line,) = axes.plot(
        [s.round for s in points], [s.mean for s in points], **style.line, marker=style.marker if attack else "",
        markevery=marker_step, label=display_name(points[0].attack), zorder=3 if attack else 2.5,
    )  # fmt: skip
    return line


def _draw_single_round(axes: Axes, leak: LeakPoint, style: LineStyle, shift: float) -> Artist:
    """Draw the mean of one attack in its only round, with its 95 % interval and its worst case."""
    point: dict[str, Any] = {"color": style.color, "ls": "", "marker": style.marker}
    x = leak.round + shift
    if leak.band:
        axes.vlines(x, *leak.band, color=style.color, linewidth=2.5, alpha=0.3)
    (line,) = axes.plot([x], [leak.mean], **point, label=display_name(leak.attack), zorder=3)
    if leak.worst is not None:
        axes.plot([x], [leak.worst], **point, mfc="none", mew=0.7)
    return line


def _draw_level(axes: Axes, leak: LeakPoint, style: LineStyle, half: float) -> Artist:
    """Draw the mean of a baseline or a limit in its only round as a short line, since its dashes identify it."""
    x = [leak.round - half, leak.round + half]
    (line,) = axes.plot(x, [leak.mean] * 2, **style.line, label=display_name(leak.attack))
    return line


def interval_entry(metric: str, points: Sequence[LeakPoint], sample: Artist) -> list[Artist]:
    """The interval's entry in a legend, with the number of clients if it is small."""
    clusters = [leak.clusters for leak in points if leak.band]
    if not clusters:
        return []
    clients = (
        f" ({min(clusters)} clients)" if len({*clusters}) == 1 else f" ({min(clusters)} to {max(clusters)} clients)"
    )
    sample.set_label(
        "95 % interval" + (" (Wilson)" if MEASURED[metric].rate else clients if min(clusters) < 10 else "")
    )
    return [sample]


def _draw_accuracy(axes: Axes, accuracy: Mapping[int, float]) -> list[Artist]:
    right = axes.twinx()
    right.grid(False)
    handles = right.plot(
        list(accuracy), list(accuracy.values()), color=INK, lw=0.9, marker="" if len(accuracy) > 1 else ".",
        label="test accuracy (right)",
    )  # fmt: skip
    right.set(ylabel="test accuracy", ylim=FRACTION_LIMITS)
    percent_axis(right.yaxis)
    axes.set_zorder(right.get_zorder() + 1)  # leakage is drawn above it
    axes.patch.set_visible(False)
    return [*handles]
