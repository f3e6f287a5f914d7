"""What `fedgauge reproduce` prints: the table and the progress."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fedgauge.simulations.experiments.measures import UNITS
from fedgauge.simulations.experiments.paper_tables import TEXT_METRICS, PaperTable
from fedgauge.simulations.experiments.reproduce import ComparedFigure


def show(paper_table: PaperTable, rows: Sequence[ComparedFigure], console: Console) -> None:
    """Print a reproduction as a table, then what differs from the paper."""
    reference = "paper" if paper_table.world is None else "bound"
    floor = "random words" if any(row.metric in TEXT_METRICS for row in rows) else "mean image"
    headings = ("cell", "attack", "metric", reference, "here", "95 % interval", "n", floor, "budget", "remarks")
    table = Table(*headings, title=paper_table.title)
    for row in rows:
        table.add_row(*_row_texts(row))
    console.print(table)
    if paper_table.note:
        console.print(paper_table.note.strip(), markup=False, highlight=False)


def _row_texts(row: ComparedFigure) -> list[str]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    unit = UNITS.get(row.metric, "")
    paper = number(row.reference) + (f" ± {row.spread:g}" if row.spread is not None else "")
    interval = "-" if row.low is None else f"{number(row.low)} to {number(row.high)}"
    metric = f"{row.metric} ({unit})" if unit else row.metric
    floor = "" if row.floor is None else number(row.floor)
    return [row.cell, row.attack, metric, paper, number(row.here), interval, str(row.n), floor, row.budget, row.note]


class ProgressReporter:
    """Shows the current step: one live line in a terminal, else a line for each step."""

    def __init__(self, name: str, console: Console) -> None:
        self.name = name
        self.console = console
        self._status = console.status(f"{name}: starting")

    def __enter__(self) -> "ProgressReporter":
        if self.console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, text: str) -> None:
        if self.console.is_terminal:
            self._status.update(f"{self.name}: {text}")
        else:
            self.console.print(f"{self.name}: {text}", markup=False, highlight=False, soft_wrap=True)
