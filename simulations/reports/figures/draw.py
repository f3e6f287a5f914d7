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
    of_rounds = spec.x.kind == "round"
    lone = [s for s in spec.series if of_rounds and len(s.x) == 1 and s.role == "attack"]
    step = 0.03 * (spec.x.high or 1)
    handles: list[Artist] = []
    for series in spec.series:
        place = right if right is not None and series.role == "accuracy" else axes
        shift = step * (lone.index(series) - (len(lone) - 1) / 2) if series in lone else 0.0
        half = 5 * step if of_rounds and series.role in ("baseline", "limit") else 0.0
        line = _draw_series(place, series, shift, half)
        handles += [line] if series.name else []
    handles += _common_entries(spec)
    _set_axis(axes, "x", spec.x)
    _set_axis(axes, "y", spec.y)
    if any(len(s.x) == 1 for s in spec.series) and of_rounds and spec.x.high:
        axes.set_xlim(right=1.15 * spec.x.high)  # room for what is drawn next to a round
    if right is not None and spec.right is not None:
        right.grid(False)
        _set_axis(right, "y", spec.right)
        axes.set_zorder(right.get_zorder() + 1)  # leakage is drawn above it
        axes.patch.set_visible(False)
    add_legend(figure, handles)
    return figure


def _draw_series(axes: Axes, series: views.Series, shift: float, half: float) -> Artist:
    """Draw a series, and return its entry of the legend.

    Args:
        shift: to the right, so that the only points of several attacks stand side by side.
        half: of the length of a short line in place of a point, so that its dashes can be seen.
    """
    look, attack = series.look, series.role in ("attack", "run")
    color, marker = THEME[look.colour], SYMBOLS.get(look.symbol, "")
    width, dash = SCALE * look.width, (0, tuple(look.dash)) if look.dash else "-"
    x, mean, step = [v + shift for v in series.x], _numbers(series.mean), max(1, len(series.x) // 10)
    if len(x) == 1 and half:
        x, mean = [x[0] - half, x[0] + half], [*mean, *mean]
    intervals = [(at, *ends) for at, *ends in zip(x, series.low, series.high, strict=False) if None not in ends]
    if len(series.x) > 1 and len(intervals) > 1:
        at, low, high = zip(*intervals, strict=True)
        axes.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
    elif intervals and len(x) == 1:
        at, low, high = zip(*intervals, strict=True)
        axes.vlines(at, low, high, color=color, linewidth=2.5, alpha=0.3)
    hollow: dict[str, Any] = {"color": color, "marker": marker, "mfc": "none", "mew": 0.7, "markevery": step}
    if worst := [(at, value) for at, value in zip(x, series.worst, strict=False) if value is not None]:
        axes.plot(*zip(*worst, strict=True), **hollow, ls=":" if len(x) > 1 else "", lw=1)
    point = len(x) == 1 or not x
    line = Line2D([], []) if not x else axes.plot(x, mean, zorder=3 if attack else 2.5)[0]
    line.set(color=color, linestyle="" if point and marker else dash, linewidth=width, markevery=step)
    line.set(marker=marker if attack or point else "", label=_in_lines(series.name))
    if series.label:
        axes.annotate(series.label, (x[0], mean[0]), xytext=(3, 3), textcoords="offset points", size=7)
    return line


def _common_entries(spec: views.Figure) -> list[Artist]:
    """The entries of a legend for worst cases and intervals."""
    found: list[Artist] = []
    if any(s.worst for s in spec.series):
        found.append(Line2D([], [], color=INK, ls=":", marker="o", mfc="none", lw=1, label="worst case"))
    if spec.interval:
        found.append(Patch(color=INK, alpha=0.2, lw=0, label=spec.interval))
    return found


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [nan if value is None else value for value in values]


def _in_lines(name: str) -> str:
    """A name for a legend, in two lines if it is long."""
    return name.replace(" were ", "\nwere ")


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
    figure.colorbar(mesh, ax=axes, label=f"worst {spec.label}", pad=0.02)
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
