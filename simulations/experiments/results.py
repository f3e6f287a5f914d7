"""The one file of results: rows as JSON, with what decides them, and the machine and versions that computed them."""

import hashlib
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
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
from fedgauge.simulations.reports.terminal import rich_table
from fedgauge.simulations.run.environment import environment

LARGEST_FILE = 2**26  # bytes
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
Row = TypeVar("Row")


class ResultsFile(Generic[Row]):
    """The file of an experiment's results; it continues what it holds.

    Args:
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
    """Read a file of results.

    Raises:
        SpecError: it is none.
    """
    try:
        kept: dict[str, Any] = json.loads(read_file(path, LARGEST_FILE))
        for key, kind in {"name": str, "environment": dict, "seconds": float, "rows": list}.items():
            kept[key] = coerce(kept[key], kind, key)
        kept["computed"] = coerce(kept["computed"], Mapping[str, str], "computed")
        kept["environment"]["packages"] = coerce(kept["environment"]["packages"], dict, "packages")
    except UNREADABLE as error:
        why = getattr(error, "strerror", None) or error
        remedy = "fedgauge sweep and reproduce write one by --output"
        raise SpecError(f"{path} is not a file of results ({str(why):.200}): {remedy}") from error
    return kept


def rows_of(kept: Mapping[str, Any], kind: type[Row], name: str) -> list[Row]:
    """The rows of a file.

    Raises:
        SpecError: one is of another kind.
    """
    kinds = get_type_hints(kind)
    with errors_in(f"{name} holds a row of another kind", *UNREADABLE):
        return [kind(**{k: coerce(v, kinds.get(k, Any), k) for k, v in row.items()}) for row in kept["rows"]]


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def print_table(table: Table) -> None:
    """Print a table; files and pipes get 180 columns, as fewer would cut names off."""
    made = rich_table(table)
    made.title = Text(printable(table.caption)) if table.caption else None
    Console(width=None if sys.stdout.isatty() else 180).print(made)


def markdown(table: Table, right: Collection[str]) -> str:
    """A table as Markdown; the columns with these heads are to the right."""
    heads = [column.head for column in table.columns]
    below = ["---:" if head in right else "---" for head in heads]
    rows = ([str(cell).replace("|", "\\|") for cell in row] for row in (heads, below, *table.rows))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
