"""The one file of results: rows as JSON, with what decides them, and the machine and versions that computed them."""

import hashlib
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from rich.console import Console
from rich.text import Text

from fedgauge.client.components import SpecError, coerce, errors_in
from fedgauge.client.files import read_file, replacing
from fedgauge.server.store.run_files import printable
from fedgauge.server.views.formatting import finite
from fedgauge.server.views.tables import Table
from fedgauge.simulations.experiments.measures import ComparedFigure
from fedgauge.simulations.experiments.paper_table_files import PAPERS
from fedgauge.simulations.experiments.paper_tables import PaperTable
from fedgauge.simulations.reports.terminal import rich_table
from fedgauge.simulations.run.environment import environment

LARGEST_FILE = 2**26  # bytes
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
Row = TypeVar("Row")


class ResultsFile(Generic[Row]):
    """The file of an experiment's results; it continues what it holds.

    Args:
        kind: of the rows, a dataclass.
        head: what the experiment is: name, version, and in `computed` a digest of all that decides the rows of a cell.

    Raises:
        SpecError: the file holds something else: another experiment or version, other settings, or rows of other packages.
    """

    def __init__(self, path: Path, kind: type[Row], head: Mapping[str, Any]) -> None:
        self.path, self.rows = path, list[Row]()
        self._head = {**head, "environment": environment()}
        self._seconds, self._started = 0.0, time.monotonic()
        if path.exists():
            kept = read_results(path)
            self._check(kept)
            self.rows, self._seconds = rows_of(kept, kind, str(path)), kept["seconds"]

    def write(self, rows: Sequence[Row]) -> None:
        kept = {
            **self._head,
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "seconds": round(self._seconds + time.monotonic() - self._started, 1),
            "rows": [{k: finite(v) if isinstance(v, float) else v for k, v in vars(row).items()} for row in rows],
        }
        with replacing(self.path) as file:
            file.write((json.dumps(kept, indent=1, allow_nan=False) + "\n").encode())

    def _check(self, kept: Mapping[str, Any]) -> None:
        here = {**self._head, **self._head["environment"]}
        there = {"version": 1, **kept, **kept["environment"]}
        for key in ("name", "version", "seed", "computed", "python", "commit", "packages"):
            if there.get(key) != here.get(key):
                words = f"another {key} ({there.get(key)} there, {here.get(key)} here)"
                words = "other cells, or settings of them" if key == "computed" else words
                raise SpecError(f"{self.path} is of {words}; name another file, or remove this one")


def read_results(path: Path) -> Mapping[str, Any]:
    """Read a file of results, or a kept one by the name of its table.

    Raises:
        SpecError: it is none.
    """
    if not path.exists():
        path = next(PAPERS.glob(f"*/results/{path}.json"), path)
    try:
        kept: dict[str, Any] = json.loads(read_file(path, LARGEST_FILE))
        for key, kind in {"name": str, "environment": dict, "seconds": float, "rows": list}.items():
            kept[key] = coerce(kept[key], kind, key)
        kept["computed"] = coerce(kept["computed"], Mapping[str, str], "computed")
        kept["environment"]["packages"] = coerce(kept["environment"]["packages"], dict, "packages")
    except UNREADABLE as error:
        write = "write one with: fedgauge reproduce NAME --output FILE"
        why = getattr(error, "strerror", None) or error
        raise SpecError(f"{path} is not a file of results ({str(why):.200}): {write}") from error
    return kept


def rows_of(kept: Mapping[str, Any], kind: type[Row], name: str) -> list[Row]:
    """The rows of a file.

    Raises:
        SpecError: one is of another kind.
    """
    kinds = get_type_hints(kind)
    with errors_in(f"{name} holds a row of another kind", *UNREADABLE):
        return [kind(**{k: coerce(v, kinds.get(k, Any), k) for k, v in row.items()}) for row in kept["rows"]]


def head_of(paper_table: PaperTable) -> Mapping[str, Any]:
    """Return the head of a table's file; `computed` has digests of all that decides an attack's figures except the code."""
    computed = {}
    for cell in paper_table.cells:
        setting = {key: value for key, value in asdict(cell).items() if key != "attacks"}
        for spec in cell.attacks:
            computed[f"{cell.name}: {spec.name}"] = digest_of([paper_table.seed, setting, asdict(spec)])
    head = {key: getattr(paper_table, key) for key in ("name", "title", "note", "seed", "version")}
    return {**head, "computed": computed}


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def print_table(table: Table) -> None:
    """Print a table; files and pipes get 180 columns, as fewer would cut names off."""
    made = rich_table(table)
    made.title = Text(printable(table.caption)) if table.caption else None
    Console(width=None if sys.stdout.isatty() else 180).print(made)


def markdown(table: Table, right: Collection[str] = ()) -> str:
    """A table as Markdown; the columns with these heads are to the right."""
    heads = [column.head for column in table.columns]
    below = ["---:" if head in right else "---" for head in heads]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in (heads, below, *table.rows))


# ------------------------------------------------------------------------------------------------------ papers' figures

HEADS = ("setting", "attack", "metric", "reference", "here", "95 % interval", "n", "baseline", "budget", "remarks")
OPTIONAL = ("reference", "95 % interval", "baseline", "budget", "remarks")  # left out where no row has any


def figures_table(rows: list[ComparedFigure], caption: str = "") -> Table:
    lines = [_texts(row) for row in rows]
    shown = [i for i, h in enumerate(HEADS) if h not in OPTIONAL or any(line[i] not in ("", "-") for line in lines)]
    return Table.texts(caption, [HEADS[i] for i in shown], [[line[i] for i in shown] for line in lines])


def _texts(row: ComparedFigure) -> list[str]:
    spread = "" if row.spread is None else f" ± {row.spread:g}"
    interval = "-" if row.low is None else f"{_number(row.low)} to {_number(row.high)}"
    figures = [_number(row.reference) + spread, _number(row.here), interval, str(row.n), _number(row.floor)]
    return [row.cell, row.attack, row.metric, *figures, row.budget, row.note]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def compared(files: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of several files' figures: a line for each cell, attack and metric, a column for each file.

    Raises:
        SpecError: the files have different tables, or different settings for the same attack of a cell.
    """
    (first, head), *others = files.items()
    for name, other in others:
        differ = [key for key in ("name", "version") if other.get(key, 1) != head.get(key, 1)]
        shared = other["computed"].keys() & head["computed"].keys()
        differ += [key for key in shared if other["computed"][key] != head["computed"][key]]
        if differ:
            raise SpecError(f"{first} and {name} cannot be compared: their settings of {differ[0]} differ")
    found: dict[tuple[str, str, str], dict[str, ComparedFigure]] = {}
    for name, kept in files.items():
        for row in rows_of(kept, ComparedFigure, name):
            found.setdefault((row.cell, row.attack, row.metric), {})[name] = row
    lines = []
    for key, by_file in found.items():
        floor = next((row.floor for row in by_file.values() if row.floor is not None), None)
        lines.append([*key, *(_compared(by_file.get(name)) for name in files), _number(floor)])
    caption = "\n".join(f"{name}: {_computed_with(kept)}" for name, kept in files.items())
    return Table.texts(caption, ["setting", "attack", "metric", *files, "baseline"], lines)


def _compared(row: ComparedFigure | None) -> str:
    if row is None or row.here is None:
        return "-"
    within = "" if row.low is None else f" ({row.low:.4g} to {row.high:.4g})"
    return f"{row.here:.4g}{within}, n {row.n}"


def _computed_with(kept: Mapping[str, Any]) -> str:
    packages = kept["environment"]["packages"]
    versions = ", ".join(f"{name} {packages.get(name, '?')}" for name in ("fedgauge", "torch"))
    return f"{kept['name']}, version {kept.get('version', 1)}, seed {kept.get('seed')}, {kept.get('date')}, with {versions}"
