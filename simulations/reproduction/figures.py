"""The figures of a paper's table: what their file begins with, the kept ones, and their tables."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedgauge.client.components import SpecError
from fedgauge.server.views.tables import Table
from fedgauge.simulations.experiments.results import digest_of, read_results, rows_of
from fedgauge.simulations.reproduction.measures import ComparedFigure
from fedgauge.simulations.reproduction.paper_table_files import PAPERS
from fedgauge.simulations.reproduction.paper_tables import PaperTable

HEADS = ("setting", "attack", "metric", "reference", "here", "95 % interval", "n", "baseline", "budget", "remarks")
OPTIONAL = ("reference", "95 % interval", "baseline", "budget", "remarks")  # left out where no row has any


def head_of(paper_table: PaperTable) -> Mapping[str, Any]:
    """Return the head of a table's file; `computed` has digests of all that decides an attack's figures except the code."""
    computed = {}
    for cell in paper_table.cells:
        setting = {key: value for key, value in asdict(cell).items() if key != "attacks"}
        for spec in cell.attacks:
            computed[f"{cell.name}: {spec.name}"] = digest_of([paper_table.seed, setting, asdict(spec)])
    head = {key: getattr(paper_table, key) for key in ("name", "title", "note", "seed", "version")}
    return {**head, "computed": computed}


def read_figures(path: Path) -> Mapping[str, Any]:
    """Read a file of figures, or the kept one of a table by the table's name.

    Raises:
        SpecError: it is none.
    """
    kept = {each.stem: each for each in PAPERS.glob("*/results/*.json")}
    if not path.exists() and str(path) not in kept:
        known = ", ".join(sorted(kept))
        raise SpecError(f"{path}: write it with fedgauge reproduce NAME --output FILE, or name kept figures: {known}")
    return read_results(path if path.exists() else kept[str(path)])


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
