"""Draw a figure's specification with Matplotlib."""

from collections.abc import Sequence
from math import nan
from textwrap import fill
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, MultipleLocator, PercentFormatter

from fedgauge.server.views import figures as views
from fedgauge.simulations.reports.figures.style import INK, SCALE, SYMBOLS, THEME, add_legend, new_axes

LETTERS = 30  # of an axis' label in a line


def draw(spec: views.Figure) -> Figure:
    """Draw lines and points with their intervals and worst cases."""
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
