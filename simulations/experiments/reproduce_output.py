"""What `fedgauge reproduce` prints and keeps: the table, the progress, and a file of the figures."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedgauge.attacks.modality.membership import MEMBERSHIP
from fedgauge.attacks.modality.registry import MODALITIES, modality_measured
from fedgauge.client.components import SpecError, coerce
from fedgauge.client.files import read_file, replacing
from fedgauge.server.store.run_files import printable
from fedgauge.simulations.experiments.measures import DERIVED, ComparedFigure, all_measures, metric_of, unit_of
from fedgauge.simulations.experiments.paper_tables import PaperTable
from fedgauge.simulations.run.environment import environment

LARGEST_FILE = 2**26  # bytes of kept figures
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def show(paper_table: PaperTable, rows: Sequence[ComparedFigure], console: Console) -> None:
    """Print a reproduction as a table, then what differs from the paper."""
    floor = _floor_name({metric_of(row.metric) for row in rows if row.metric not in DERIVED})
    headings = ("cell", "attack", "metric", "paper", "here", "95 % interval", "n", floor, "budget", "remarks")
    table = Table(*headings, title=paper_table.title)
    for row in rows:
        table.add_row(*(Text(printable(text)) for text in _row_texts(row)))
    console.print(table)
    if paper_table.note:
        console.print(paper_table.note.strip(), markup=False, highlight=False)


def _floor_name(metrics: Set[str]) -> str:
    """What the floor is, for a heading: the first baseline's name, where all figures are of one kind of data."""
    several = sum(modality.main.metric in metrics for modality in MODALITIES.values()) > 1
    if several or metrics & MEMBERSHIP.keys():
        return "floor"
    return next(iter(modality_measured(metrics).baselines)).replace("_", " ")


def _row_texts(row: ComparedFigure) -> list[str]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    unit = unit_of(row.metric) if row.metric in all_measures() else ""
    paper = number(row.reference) + (f" ± {row.spread:g}" if row.spread is not None else "")
    interval = "-" if row.low is None else f"{number(row.low)} to {number(row.high)}"
    metric = f"{row.metric} ({unit})" if unit else row.metric
    floor = "" if row.floor is None else number(row.floor)
    return [row.cell, row.attack, metric, paper, number(row.here), interval, str(row.n), floor, row.budget, row.note]


class ProgressReporter:
    """Shows the current step: one live line in a terminal, else a line for each step."""

    def __init__(self, name: str, console: Console) -> None:
        self.name, self.console = name, console
        self.status = console.status(f"{name}: starting")

    def __enter__(self) -> "ProgressReporter":
        if self.console.is_terminal:
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def __call__(self, text: str, *, passing: bool = False) -> None:
        if self.console.is_terminal:
            self.status.update(f"{self.name}: {text}")
        elif not passing:
            self.console.print(f"{self.name}: {text}", markup=False, highlight=False, soft_wrap=True)


class FiguresFile:
    """A file that keeps a reproduction: figures, settings, seed, machine, versions, date. It continues what it holds.

    Raises:
        SpecError: the file holds something else: another table, or figures of other settings, another seed or other versions.
    """

    def __init__(self, path: Path, paper_table: PaperTable) -> None:
        self.path = path
        self.rows: list[ComparedFigure] = []
        self._seconds = 0.0
        self._head: dict[str, Any] = {
            **{key: getattr(paper_table, key) for key in ("name", "title", "note", "seed", "version")},
            "settings": digest_of([asdict(cell) for cell in paper_table.cells]),
            "computed": computed(paper_table),
            "environment": environment(),
        }
        try:
            kept = json.loads(read_file(path, LARGEST_FILE))
            self._check(kept)
            self.rows, self._seconds = figures_of(kept)
        except FileNotFoundError:
            return
        except SpecError:
            raise
        except UNREADABLE as error:
            raise self._refusal(f"is no file of figures ({str(error):.200})") from error

    @property
    def done(self) -> set[tuple[str, str]]:
        """The names of cell and attack of all figures in the file."""
        return {(row.cell, row.attack) for row in self.rows}

    def add(self, rows: Iterable[ComparedFigure], seconds: float) -> None:
        """Keep further figures; a reader, and whoever continues after an interruption, sees all of them or none.

        Args:
            seconds: since the call began.
        """
        self.rows += rows
        kept = {
            **self._head,
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "seconds": round(self._seconds + seconds, 1),
            "rows": [asdict(row) for row in self.rows],
        }
        with replacing(self.path) as file:
            file.write((json.dumps(kept, indent=1, allow_nan=False) + "\n").encode())

    def _check(self, kept: Any) -> None:
        for key in ("name", "version", "seed", "settings"):
            if kept.get(key, 1 if key == "version" else None) != self._head[key]:
                raise self._refusal(
                    f"holds figures of another {key} ({kept.get(key)!r} there, {self._head[key]!r} here)"
                )
        for key in ("python", "commit", "packages"):
            if (there := kept["environment"].get(key)) != (here := self._head["environment"][key]):
                raise self._refusal(f"holds figures that were computed with another {key} ({there} there, {here} here)")

    def _refusal(self, words: str) -> SpecError:
        return SpecError(f"{self.path} {words}; name another file with --output, or remove this one")


def figures_of(kept: Mapping[str, Any]) -> tuple[list[ComparedFigure], float]:
    """A file's rows and seconds; TypeError if one of them is of another kind."""
    kinds = get_type_hints(ComparedFigure)
    try:
        rows = [{key: coerce(value, kinds.get(key, Any), key) for key, value in row.items()} for row in kept["rows"]]
        return [ComparedFigure(**row) for row in rows], coerce(kept["seconds"], float, "seconds")
    except SpecError as error:
        raise TypeError(str(error)) from error


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def computed(paper_table: PaperTable) -> dict[str, str]:
    """Return, by cell and attack, a digest of all that decides the attack's figures but the code: settings, budget, seed."""
    found = {}
    for cell in paper_table.cells:
        setting = {key: value for key, value in asdict(cell).items() if key != "attacks"}
        for spec in cell.attacks:
            found[f"{cell.name}: {spec.name}"] = digest_of([paper_table.seed, setting, asdict(spec)])
    return found
