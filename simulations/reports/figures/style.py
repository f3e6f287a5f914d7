"""How figures look: colours, sizes, line styles, and the axes and legends that all share."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MultipleLocator, PercentFormatter

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views.overview import LIMIT_NAMES
from fedgauge.server.views.roles import role_of

WIDTH = 3.3  # inches: a column of most two-column papers
HEIGHT = 2.1  # inches: axes with their labels, without the legend
LINE_HEIGHT = 0.15  # inches: one line of text
FRACTION_LIMITS = (-0.02, 1.03)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # of Okabe and Ito, in the report's order
MARKERS = (
    "o",
    "s",
    "D",
    "^",
    "P",
    "*",
    "v",
)  # one more than colours, so that the seventh attack differs from all before it
DASHES: tuple[Any, ...] = ("--", "-.", (0, (1.5, 3)), (0, (6, 1.5)), (0, (4, 1.5, 1, 1.5, 1, 1.5)))
INK, MUTED, GRID, PURPLE = "#1b1f24", "#59636e", "#d5dae0", "#6a3d9a"
LONG_DASH = (0, (9, 3))
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so letters are the same everywhere
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.titlesize": 7.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "hatch.color": GRID,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.35,
    "text.parse_math": False,  # a dollar in a name does not start a formula
    "savefig.dpi": 300,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fedgauge",  # without it, ids are random in each file
}


@dataclass(frozen=True, eq=False)
class PaperFigure:
    """A figure, its file name without ending, and the description in its metadata."""

    name: str
    figure: Figure
    about: str

    def rendered(self, kind: Literal["png", "svg"]) -> bytes:
        """The file, with no date and no program in it, so that equal ledgers give equal bytes."""
        metadata = {"Title": self.name, "Description": self.about}
        unnamed = {"Software": None} if kind == "png" else {"Date": None}
        data = io.BytesIO()
        with own_style():
            self.figure.savefig(data, format=kind, metadata={**metadata, **unnamed})
        self.figure.set_layout_engine("none")  # layout is half of the work, so do it once
        return data.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """As a notebook shows it: the PNG, at its width on a screen of 144 dots an inch."""
        return self.rendered("png"), {"width": round(144 * self.figure.get_size_inches()[0])}


@contextmanager
def own_style() -> Iterator[None]:
    """Draw as all figures here are drawn, whatever the user's own style; afterwards the caller's settings are back."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


@dataclass(frozen=True)
class LineStyle:
    """How an attack, baseline or limit is drawn."""

    color: str
    dash: Any
    marker: str
    width: float

    @property
    def line(self) -> dict[str, Any]:
        """Arguments for Matplotlib's plot."""
        return {"color": self.color, "linestyle": self.dash, "linewidth": self.width}


def line_styles(order: Sequence[str]) -> dict[str, LineStyle]:
    """A style for each name: attacks coloured with a marker each, baselines grey and dashed, limits purple with long dashes."""
    styles, attacks, baselines = {}, count(), count()
    for name in order:
        match role_of(name):
            case "attack":
                i = next(attacks)
                styles[name] = LineStyle(COLOURS[i % len(COLOURS)], "-", MARKERS[i % len(MARKERS)], 1.3)
            case "limit":
                styles[name] = LineStyle(PURPLE, LONG_DASH, "_", 1.3)
            case "baseline":
                styles[name] = LineStyle(MUTED, DASHES[next(baselines) % len(DASHES)], "_", 0.9)
    return styles


def new_axes(height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure((WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02))
    return figure, figure.subplots()


def display_name(attack: str) -> str:
    return LIMIT_NAMES.get(attack, attack).replace(" were ", "\nwere ")


def percent_axis(axis: Axis) -> None:
    axis.set_major_locator(MultipleLocator(0.25))
    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def value_limits(metric: str, values: Sequence[float], whole: tuple[float, float]) -> tuple[float, float]:
    """Axis limits that show all values, and intervals only as far as values stay readable (two clients' are vast)."""
    low, high = min(values), max(values)
    margin = 0.5 * max(high - low, 1e-3 * max(abs(low), abs(high)), 1e-9)
    low, high = max(whole[0], low - margin), min(whole[1], high + margin)
    return low if MEASURED[metric].higher_is_better else max(low, -0.03 * high), high  # errors are never negative


def add_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Add a legend below the axes, with as many columns as the longest name allows; the figure grows by its height."""
    labels = [str(handle.get_label()) for handle in handles]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(3, int(WIDTH / (0.45 + 0.058 * longest))))
    per_column = -(-len(labels) // columns)
    lines = max(
        sum(label.count("\n") + 1 for label in labels[i : i + per_column]) for i in range(0, len(labels), per_column)
    )
    figure.set_size_inches(WIDTH, figure.get_size_inches()[1] + lines * LINE_HEIGHT)
    figure.legend(handles=[*handles], loc="outside lower left", ncols=columns)
