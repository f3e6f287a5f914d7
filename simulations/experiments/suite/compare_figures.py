"""Compare kept figures of the same cells and attacks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from fedgauge.client.components import SpecError, coerce
from fedgauge.client.files import read_file
from fedgauge.server.store.run_files import printable
from fedgauge.simulations.experiments.measures import ComparedFigure
from fedgauge.simulations.experiments.paper_table_files import PAPERS
from fedgauge.simulations.experiments.reproduce_output import LARGEST_FILE, UNREADABLE, figures_of

Key = tuple[str, str, str]  # cell, attack, metric


def read_figures(path: Path) -> dict[str, Any]:
    """A file of figures, or those that fedgauge keeps, by the name of their table; SpecError if it is none."""
    ours = {kept.stem: kept for kept in PAPERS.glob("*/results/*.json")}
    if not path.exists():
        path = ours.get(str(path), path)
    try:
        kept: dict[str, Any] = json.loads(read_file(path, LARGEST_FILE))
        coerce(kept["name"], str, "name")
        for key, value in coerce(kept["computed"], dict, "computed").items():
            coerce(value, str, key)
        _computed_with(kept)
        figures_of(kept)
    except UNREADABLE as error:
        write = "write one with: fedgauge reproduce NAME --output FILE"
        raise SpecError(f"{path} is no file of figures ({str(error):.200}): {write}") from error
    return kept


def compared(files: Mapping[str, Mapping[str, Any]]) -> dict[Key, dict[str, ComparedFigure]]:
    """The figures of all files, by cell, attack and metric, then by file.

    Raises:
        SpecError: the files are of different tables, or computed the same attack of a cell otherwise.
    """
    (first, head), *others = files.items()
    found: dict[Key, dict[str, ComparedFigure]] = {}
    for name, other in others:
        table, theirs = (f"{of['name']}, version {of.get('version', 1)}" for of in (head, other))
        if table != theirs:
            raise SpecError(f"{first} holds figures of {table}, and {name} of {theirs}: they do not compare")
        for key in other["computed"].keys() & head["computed"].keys():
            if other["computed"][key] != head["computed"][key]:
                raise SpecError(
                    f"{name}: {key} was computed otherwise than in {first}: with another seed, n, budget or setting; compute it "
                    "again with one fedgauge"
                )
    for name, kept in files.items():
        for row in figures_of(kept)[0]:
            found.setdefault((row.cell, row.attack, row.metric), {})[name] = row
    return found


def comparison(found: Mapping[Key, Mapping[str, ComparedFigure]], files: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line for each cell, attack and metric, a column for each file; below, with which versions each was computed."""
    names = list(files)
    below = "\n".join(printable(f"{name}: {_computed_with(kept)}") for name, kept in files.items())
    table = Table(
        "cell", "attack", "metric", *(Column(Text(printable(name))) for name in names), "floor", caption=Text(below)
    )
    for (cell, attack, metric), rows in found.items():
        floor = next((row.floor for row in rows.values() if row.floor is not None), None)
        values = [_figure(rows.get(name)) for name in names]
        words = [cell, attack, metric, *values, "" if floor is None else f"{floor:.4g}"]
        table.add_row(*(Text(printable(text)) for text in words))
    return table


def _computed_with(kept: Mapping[str, Any]) -> str:
    packages = kept["environment"]["packages"]
    versions = ", ".join(f"{name} {packages.get(name, '?')}" for name in ("fedgauge", "torch"))
    return f"{kept['name']}, version {kept.get('version', 1)}, seed {kept.get('seed')}, {kept.get('date')}, with {versions}"


def _figure(row: ComparedFigure | None) -> str:
    if row is None or row.here is None:
        return "-"
    within = "" if row.low is None else f" ({row.low:.4g} to {row.high:.4g})"
    return f"{row.here:.4g}{within}, n {row.n}"
