"""Figures for papers: each plot of a run as PNG and SVG, one column wide, drawn with Matplotlib in the page's colours."""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, MultipleLocator, PercentFormatter

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.client.files import replacing
from fedgauge.server.dashboard import STATIC
from fedgauge.server.store.run import Run
from fedgauge.server.views import figures as views
from fedgauge.server.views.compare import named_readings, utility_figure
from fedgauge.server.views.snapshot import RunSnapshot, read_once

WIDTH, HEIGHT = 3.3, 2.1  # inches: a column of most two-column papers; axes with their labels
LETTERS = 30  # of an axis' label in a line
SCALE = 0.55  # points of a line in print for each pixel on the page
# the page's own colours on a white ground
THEME = dict(re.findall(r"--([\w-]+): (#\w{6})", (STATIC / "style.css").read_text("utf-8").partition("@media")[0]))
SYMBOLS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "star": "*", "triangle-down": "v",
    "line-ew": "_",
}  # fmt: skip
STYLE: dict[Any, Any] = {
    **{"font.size": 7.5, "axes.labelsize": 7.5, "lines.markersize": 3.5, "legend.frameon": False},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": THEME["line"]},
    "text.parse_math": False,  # a dollar in a name does not start a formula
    "savefig.dpi": 300,
    "savefig.bbox": "tight",  # with the legend, which is below the axes
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fedgauge",  # without it, ids are random in each file
}


def write_figures(runs: Sequence[Run], folder: Path) -> tuple[list[Path], list[str]]:
    """Write every figure of the runs and of their comparison.

    Returns:
        The paths, and the reasons for missing figures. Several runs have a folder each.
    """
    written, missing = list[Path](), list[str]()
    with ExitStack() as stack, matplotlib.style.context(STYLE, after_reset=True):  # whatever the user's style
        distinct = {run.folder.absolute(): run for run in runs}
        named = named_readings([stack.enter_context(read_once(run)) for run in distinct.values()])
        for name, reading in named.items():
            if not len(reading.scores):
                missing.append(f"{reading.run.name}: no attack has a score yet, so there is nothing to draw")
                continue
            place, about = folder / name if len(named) > 1 else folder, f"{reading.run.name}. {_knowledge(reading)}"
            others = views.success_figure(reading), views.membership_figure(reading)
            for spec in filter(None, (*views.rounds_figures(reading), *others)):
                written += _save(draw(spec), place / spec.name, about)
        if len(named) > 1:
            about = ". ".join(f"{i}: {r.run.name}. {_knowledge(r)}" for i, r in enumerate(named.values(), 1))
            specs = [drawn for metric in MEASURED if (drawn := utility_figure(named, metric)) is not None]
            compared = [spec for spec in specs if sum(bool(series.label) for series in spec.series) > 1]
            for spec in compared:
                written += _save(draw(spec), folder / spec.name, about)
            if not compared:
                missing.append("the runs are not compared: fewer than two have both accuracy and leakage")
    return written, missing


def _save(figure: Figure, path: Path, about: str) -> Iterator[Path]:
    """Write a figure without date and program, so that equal ledgers give equal bytes."""
    for kind, unnamed in (("png", "Software"), ("svg", "Date")):
        with replacing(file := Path(f"{path}.{kind}")) as out:
            figure.savefig(out, format=kind, metadata={"Title": path.name, "Description": about, unnamed: None})
        yield file


def _knowledge(reading: RunSnapshot) -> str:
    return ". ".join(f"{row['name']}: {row['knowledge']}" for row in reading.attacks if row["role"] != "baseline")


def draw(spec: views.Figure) -> Figure:
    figure = Figure((WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    right = axes.twinx() if spec.right else None
    handles: list[Artist] = []
    for series in spec.series:
        line = _draw_series(right if right is not None and series.role == "accuracy" else axes, series)
        handles += [line] if series.name else []
    if any(s.worst for s in spec.series):
        handles.append(Line2D([], [], color="black", ls=":", marker="o", mfc="none", label="worst case"))
    if spec.interval:
        handles.append(Patch(color="black", alpha=0.2, label=spec.interval))
    _set_axis(axes, "x", spec.x)
    _set_axis(axes, "y", spec.y)
    if right is not None and spec.right is not None:
        right.grid(False)
        _set_axis(right, "y", spec.right)
    longest = max(len(line) for handle in handles for line in str(handle.get_label()).split("\n"))
    columns = max(1, min(3, 60 // (longest + 4)))
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0), ncols=columns)
    return figure


def _draw_series(axes: Axes, series: views.Series) -> Artist:
    look, color, x, point = series.look, THEME[series.look.colour], series.x, len(series.x) <= 1
    attack = series.role in ("attack", "run")
    symbol = SYMBOLS.get(look.symbol, "") if attack or point else ""
    style: dict[str, Any] = {"color": color, "marker": symbol, "markevery": max(1, len(x) // 10)}
    mean, low, high, worst = (np.array(v, float) for v in (series.mean, series.low, series.high, series.worst))
    if len(low) and point:
        axes.vlines(x, low, high, color=color, linewidth=2.5, alpha=0.3)
    elif len(low):
        axes.fill_between(x, low, high, color=color, alpha=0.2)
    if len(worst):
        axes.plot(x, worst, ls="" if point else ":", mfc="none", lw=1, **style)
    dash = "" if point and symbol else (0, tuple(look.dash)) if look.dash else "-"
    label = series.name.replace(" were ", " were\n")  # a long one is in two lines
    line = axes.plot(x, mean, ls=dash, lw=SCALE * look.width, label=label, zorder=3 if attack else 2.5, **style)[0]
    if series.label:
        axes.annotate(series.label, (x[0], mean[0]), xytext=(3, 3), textcoords="offset points")
    return line


def _set_axis(axes: Axes, which: str, spec: views.Axis) -> None:
    axis = getattr(axes, f"{which}axis")
    axis.set_label_text(fill(spec.label, LETTERS) if which == "y" else spec.label)
    if spec.kind == "log":
        getattr(axes, f"set_{which}scale")("log")
    if spec.kind in ("fraction", "log"):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=None if spec.kind == "fraction" else 1))
    if spec.kind == "fraction":
        axis.set_major_locator(MultipleLocator(0.25) if (spec.low, spec.high) == views.WHOLE else MaxNLocator(4))
    if spec.kind == "round":
        axis.set_major_locator(MaxNLocator(integer=True))
    getattr(axes, f"set_{which}lim")(spec.low, spec.high)
