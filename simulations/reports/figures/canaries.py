"""The epsilon that canaries show, round by round, beside the accounted one."""

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedgauge.simulations.reports.figures.style import COLOURS, LONG_DASH, PURPLE, add_legend, new_axes


def canaries_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure, axes = new_axes()
    rounds = [row["round"] for row in rows]
    # None stands for an infinite epsilon
    low, high, epsilon = ([nan if row[k] is None else row[k] for row in rows] for k in ("low", "high", "epsilon"))
    axes.fill_between(rounds, low, high, color=COLOURS[0], alpha=0.2, lw=0)
    handles = axes.plot(rounds, epsilon, color=COLOURS[0], marker="o", ms=3, label="seen by canaries")
    if all(row["accounted"] is not None for row in rows):
        handles += axes.plot(rounds, [row["accounted"] for row in rows], color=PURPLE, ls=LONG_DASH, label="accounted")
    axes.set(xlabel="round", ylabel="epsilon, all of a client's data")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(figure, handles)
    return figure
