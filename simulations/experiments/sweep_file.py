"""A sweep file: defenses, attacks and seeds, checked and expanded into one scenario for each defense and seed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedgauge.client.components import SpecError, Table, coerce, errors_in
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.experiments.grid import Cell, expand, layered, read

# keys of a [[defense]]; MERGED are scenario tables, merged into those of [scenario]
MERGED = ("data", "model", "strategy", "secure_sum", "audit", "privacy")
KEYS = ("chain", "seed", *MERGED)


@dataclass(frozen=True)
class SweepCell:
    """One run of the grid: a defense and a seed.

    Args:
        folder: the folder name of its run.
        attacks: the names of those that its scenario plans.
    """

    defense: str
    seed: int
    folder: str
    tables: Table
    attacks: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file; the scenarios of its cells were built once."""

    name: str
    cells: tuple[SweepCell, ...]

    @property
    def defenses(self) -> list[str]:
        return list(dict.fromkeys(cell.defense for cell in self.cells))

    @classmethod
    def load(cls, path: Path) -> "Sweep":
        """Read and check a file; SpecError names the file, the table, the value and what is allowed."""
        return read(path, lambda tables: cls(path.stem, tuple(_cells(tables))))


def _cells(tables: Table) -> list[SweepCell]:
    shared = coerce(tables.get("scenario", {}), dict, "[scenario]")
    if varied := [key for key in ("chain", "attack", "seed") if key in shared]:
        raise SpecError(f"[scenario]: {varied[0]} is what the sweep varies; set it in [[defense]], [[attack]] or seeds")
    if beside := tables.keys() & {"rounds", "clients"}:
        raise SpecError(f"{min(beside)} is a key of the scenario: set it in [scenario]")
    if "axes" in tables:
        raise SpecError("axes: a sweep varies [[defense]] and seeds; leave it out")
    seeds = coerce(tables.get("seeds", [0]), Sequence[int], "seeds")
    if not (tables.get("defense") and tables.get("attack") and seeds):
        raise SpecError("a sweep needs at least one [[defense]], one [[attack]] and one seed")
    axes = {"axes": ["defense", "seed"], "seed": [{"name": str(seed), "seed": seed} for seed in seeds]}
    cells = [_cell(shared, cell) for cell in expand({**tables, **axes}, KEYS, MERGED, ("scenario", "seeds"))]
    folders = [cell.folder for cell in cells]
    if repeated := [f for f in folders if folders.count(f) > 1]:
        raise SpecError(f"two runs would be called {repeated[0]!r}; seeds and names of [[defense]] must differ")
    return cells


def _cell(shared: Table, cell: Cell) -> SweepCell:
    """One cell; its scenario is built once, so that mistakes show before anything runs."""
    defense, where = str(cell.place["defense"]["name"]), f"[[defense]] {cell.place['defense']['name']}"
    own = cell.table
    tables = {**layered([shared, own], MERGED, where), "attack": cell.attacks}
    with errors_in(where):
        planned = Scenario.from_tables(tables).plan.attacks
    folder = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', defense).strip('-.')}-seed{own['seed']}"
    return SweepCell(defense, own["seed"], folder, tables, tuple(p.name for p in planned if p.role == "attack"))
