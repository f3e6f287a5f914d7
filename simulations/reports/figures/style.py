"""Style of figures in print: sizes, the page's colours, and the legend."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedgauge.server.dashboard import STATIC

WIDTH = 3.3  # inches: a column of most two-column papers
HEIGHT = 2.1  # inches: axes with their labels, without the legend
LINE_HEIGHT = 0.15  # inches: one line of text
SCALE = 0.55  # points of a line in print for each pixel on the page
# the page's own colours on a white ground
THEME = dict(re.findall(r"--([\w-]+): (#\w{6})", (STATIC / "style.css").read_text().partition("@media")[0]))
INK, MUTED, GRID, PURPLE = THEME["ink"], THEME["muted"], THEME["line"], THEME["limit"]
SYMBOLS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "star": "*", "triangle-down": "v",
    "line-ew": "_",
}  # fmt: skip
STYLE: dict[Any, Any] = {
    **{"axes.edgecolor": MUTED, "grid.color": GRID, "hatch.color": GRID},
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize"), 7.5),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7),
    **dict.fromkeys(("axes.linewidth", "grid.linewidth", "xtick.major.width", "ytick.major.width"), 0.5),
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so letters are the same everywhere
    "axes.grid": True,
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "text.parse_math": False,  # a dollar in a name does not start a formula
    "savefig.dpi": 300,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fedgauge",  # without it, ids are random in each file
}


@dataclass(frozen=True, eq=False)
class PaperFigure:
    """Figure with its file name and a description for its metadata."""

    name: str
    figure: Figure
    about: str

    def rendered(self, kind: Literal["png", "svg"]) -> bytes:
        """Render a file without date and program, so that equal ledgers give equal bytes."""
        metadata = {"Title": self.name, "Description": self.about}
        unnamed = {"Software": None} if kind == "png" else {"Date": None}
        data = io.BytesIO()
        with own_style():
            self.figure.savefig(data, format=kind, metadata={**metadata, **unnamed})
        self.figure.set_layout_engine("none")  # keep the layout
        return data.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Return the PNG with its width for a notebook."""
        return self.rendered("png"), {"width": round(144 * self.figure.get_size_inches()[0])}


@contextmanager
def own_style() -> Iterator[None]:
    """Draw in the style of fedgauge, whatever the user's style."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_axes() -> tuple[Figure, Axes]:
    figure = Figure((WIDTH, HEIGHT), layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02))
    return figure, figure.subplots()


def add_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Add a legend below the axes, by which the figure grows."""
    labels = [str(handle.get_label()) for handle in handles]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(3, int(WIDTH / (0.45 + 0.058 * longest))))
    per_column = -(-len(labels) // columns)
    lines = max(
        sum(label.count("\n") + 1 for label in labels[i : i + per_column]) for i in range(0, len(labels), per_column)
    )
    figure.set_size_inches(WIDTH, figure.get_size_inches()[1] + lines * LINE_HEIGHT)
    figure.legend(handles=[*handles], loc="outside lower left", ncols=columns)
