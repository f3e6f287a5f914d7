"""Draw a figure's specification with Matplotlib."""

from collections.abc import Sequence
from math import nan
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator, MultipleLocator, PercentFormatter

from fedgauge.server.views import figures as views
from fedgauge.simulations.reports.figures.style import INK, MUTED, SCALE, SYMBOLS, THEME, add_legend, new_axes

LETTERS = 30  # of an axis' label in a line
RASTER_FROM = 2000  # table entries from which the heat map is a bitmap even in SVG


def draw(spec: views.Figure) -> Figure:
    """Lines and points with their intervals and worst cases."""
    figure, axes = new_axes()
    right = axes.twinx() if spec.right else None
    handles: list[Artist] = []
    for series in spec.series:
        line = _draw_series(right if right is not None and series.role == "accuracy" else axes, series)
        handles += [line] if series.name else []
    if any(s.worst for s in spec.series):
        handles.append(Line2D([], [], color=INK, ls=":", marker="o", mfc="none", lw=1, label="worst case"))
    if spec.interval:
        handles.append(Patch(color=INK, alpha=0.2, lw=0, label=spec.interval))
    _set_axis(axes, "x", spec.x)
    _set_axis(axes, "y", spec.y)
    if right is not None and spec.right is not None:
        right.grid(False)
        _set_axis(right, "y", spec.right)
        axes.set_zorder(right.get_zorder() + 1)  # leakage is drawn above it
        axes.patch.set_visible(False)
    add_legend(figure, handles)
    return figure


def _draw_series(axes: Axes, series: views.Series) -> Artist:
    """Draw a series, and return its entry of the legend."""
    look, attack = series.look, series.role in ("attack", "run")
    color, marker = THEME[look.colour], SYMBOLS.get(look.symbol, "")
    x, mean, step = list(series.x), _numbers(series.mean), max(1, len(series.x) // 10)
    point = len(x) <= 1
    intervals = [(at, *ends) for at, *ends in zip(x, series.low, series.high, strict=False) if None not in ends]
    if intervals and point:
        axes.vlines(*zip(*intervals, strict=True), color=color, linewidth=2.5, alpha=0.3)
    elif len(intervals) > 1:
        at, low, high = zip(*intervals, strict=True)
        axes.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
    if worst := [(at, value) for at, value in zip(x, series.worst, strict=False) if value is not None]:
        hollow: dict[str, Any] = {"color": color, "marker": marker, "mfc": "none", "mew": 0.7, "markevery": step}
        axes.plot(*zip(*worst, strict=True), **hollow, ls="" if point else ":", lw=1)
    line = axes.plot(x, mean, zorder=3 if attack else 2.5)[0] if x else Line2D([], [])
    dash = (0, tuple(look.dash)) if look.dash else "-"
    line.set(color=color, linestyle="" if point and marker else dash, linewidth=SCALE * look.width, markevery=step)
    label = series.name.replace(" were ", " were\n")  # a long one is in two lines
    line.set(marker=marker if attack or point else "", label=label)
    if series.label:
        axes.annotate(series.label, (x[0], mean[0]), xytext=(3, 3), textcoords="offset points", size=7)
    return line


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [nan if value is None else value for value in values]


def _set_axis(axes: Axes, which: str, spec: views.Axis) -> None:
    axis: Axis = getattr(axes, f"{which}axis")
    axis.set_label_text(fill(spec.label, LETTERS) if which == "y" else spec.label)
    if spec.kind == "log":
        getattr(axes, f"set_{which}scale")("log")
    if spec.kind in ("fraction", "log"):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=None if spec.kind == "fraction" else 1))
    if spec.kind == "fraction":
        axis.set_major_locator(MultipleLocator(0.25) if (spec.low, spec.high) == views.WHOLE else MaxNLocator(4))
    if spec.kind == "number":  # as many at any size, as the layout's own change of size would make labels wider
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    if spec.kind == "round":
        axis.set_major_locator(MaxNLocator(integer=True))
    getattr(axes, f"set_{which}lim")(spec.low, spec.high)


def draw_heat_map(spec: views.HeatMap) -> Figure:
    """A square for each client and round, the brightest leaks most; hatched where there is no value."""
    figure, axes = new_axes(height=min(6.0, max(1.75, 0.8 + 0.17 * len(spec.clients))))
    table = np.array([_numbers(row) for row in spec.values])
    axes.grid(False)
    axes.set_facecolor("white")
    axes.patch.set(hatch="////", edgecolor=MUTED)
    low, high = sorted((spec.darkest, spec.brightest))
    mesh = axes.pcolormesh(
        np.ma.masked_invalid(table), cmap="cividis" if spec.darkest == low else "cividis_r", vmin=low, vmax=high,
        rasterized=table.size > RASTER_FROM, edgecolors="none",
    )  # fmt: skip
    if len(spec.rounds) <= 10 and len(spec.clients) <= 30:
        for (row, column), value in np.ndenumerate(table):
            if not np.isnan(value):
                red, green, blue, _ = mesh.to_rgba(value)
                color = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else INK
                axes.text(column + 0.5, row + 0.5, f"{value:.0f}", ha="center", va="center", size=7, color=color)
    figure.colorbar(mesh, ax=axes, label=f"worst {spec.by.label}", pad=0.02)
    axes.invert_yaxis()
    _number_axis(axes.xaxis, spec.rounds, 10)
    _number_axis(axes.yaxis, spec.clients, 16)
    axes.set(xlabel="attacked round", ylabel="client")
    return figure


def _number_axis(axis: Axis, names: Sequence[int], most: int) -> None:
    """Label evenly spaced rows or columns with their numbers, at their middle."""
    places = np.unique(np.linspace(0, len(names) - 1, min(most, len(names))).round().astype(int))
    axis.set_major_locator(FixedLocator((places + 0.5).tolist()))
    axis.set_ticklabels([str(names[i]) for i in places])
    axis.set_tick_params(length=0)
