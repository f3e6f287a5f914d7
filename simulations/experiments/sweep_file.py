"""A sweep file: defenses, attacks and seeds, checked and expanded into one scenario for each defense and seed."""

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgauge.client import toml_text
from fedgauge.client.components import SpecError, Table, coerce, errors_in
from fedgauge.client.files import read_file
from fedgauge.server.store.scenario import Scenario

TOP = ("seeds", "scenario", "defense", "attack")
# keys of a [[defense]]; MERGED are scenario tables, merged into those of [scenario]
MERGED = ("data", "model", "strategy", "secure_sum", "audit", "privacy")
KEYS = ("name", "chain", *MERGED)
Names = Mapping[str, Sequence[str]]  # by kind of table, such as defense


@dataclass(frozen=True)
class SweepCell:
    """One run of the grid: a defense and a seed."""

    defense: str
    seed: int
    folder: str  # its run's name
    tables: Table
    attacks: tuple[str, ...]  # names of those that its scenario plans


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
        with errors_in(path, OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            return cls(path.stem, tuple(_cells(toml_text.parse(read_file(path, toml_text.MOST)))))


def _cells(tables: Table) -> list[SweepCell]:
    check_keys(tables, TOP, "a sweep, whose scenario is in [scenario]")
    shared = coerce(tables.get("scenario", {}), dict, "[scenario]")
    if varied := [key for key in ("chain", "attack", "seed") if key in shared]:
        raise SpecError(f"[scenario]: {varied[0]} is what the sweep varies; set it in [[defense]], [[attack]] or seeds")
    seeds = coerce(tables.get("seeds", [0]), Sequence[int], "seeds")
    defenses, attacks = tables_of(tables, "defense"), tables_of(tables, "attack")
    if not (defenses and attacks and seeds):
        raise SpecError("a sweep needs at least one [[defense]], one [[attack]] and one seed")
    for i, defense in enumerate(defenses, 1):
        check_keys(defense, KEYS, f"[[defense]] #{i}")
    names = {"defense": [coerce(t.get("name"), str, f"[[defense]] #{i}: name") for i, t in enumerate(defenses, 1)]}
    chosen = [selection(attack, names, f"[[attack]] #{i}") for i, attack in enumerate(attacks, 1)]
    if "" in names["defense"]:
        raise SpecError(f"[[defense]] #{names['defense'].index('') + 1} needs a name")
    cells = []
    for name, defense in zip(names["defense"], defenses, strict=True):
        of_defense = {key: value for key, value in defense.items() if key != "name"}
        of_defense["attack"] = [attack for of, attack in chosen if name in of["defense"]]
        cells += [_cell(name, seed, [shared, {"seed": seed}, of_defense]) for seed in seeds]
    folders = [cell.folder for cell in cells]
    if repeated := [f for f in folders if folders.count(f) > 1]:
        raise SpecError(f"two runs would be called {repeated[0]!r}; seeds and names of [[defense]] must differ")
    return cells


def _cell(defense: str, seed: int, layers: Sequence[Table]) -> SweepCell:
    """One cell; its scenario is built once, so that mistakes show before anything runs."""
    where = f"[[defense]] {defense}"
    tables = layered(layers, MERGED, where)
    with errors_in(where):
        planned = Scenario.from_tables(tables).plan.attacks
    folder = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', defense).strip('-.')}-seed{seed}"
    return SweepCell(defense, seed, folder, tables, tuple(p.name for p in planned if p.role == "attack"))


def tables_of(tables: Table, key: str) -> list[Table]:
    listed = coerce(tables.get(key, []), list, f"[[{key}]]")
    return [coerce(table, dict, f"[[{key}]] #{i}") for i, table in enumerate(listed, 1)]


def layered(layers: Iterable[Table], joined: Collection[str], where: str) -> Table:
    """One table of several: a later one replaces the keys of earlier ones, but tables under joined keys are joined."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            result[key] = {**result.get(key, {}), **coerce(value, dict, f"{where}: {key}")} if key in joined else value
    return result


def check_keys(table: Table, allowed: Collection[str], where: str) -> None:
    if unknown := sorted(table.keys() - set(allowed)):
        raise SpecError(f"{where}: unknown key {unknown[0]!r} (it has: {', '.join(dict.fromkeys(allowed))})")


def selection(table: Table, kinds: Names, where: str) -> tuple[Names, Table]:
    """The names that a table is for, such as `defenses = ["none", "sign"]` (default: all), and its other keys."""
    chosen, rest = {}, dict(table)
    for kind, names in kinds.items():
        chosen[kind] = coerce(rest.pop(f"{kind}s", names), Sequence[str], f"{where}: {kind}s")
        if unknown := [name for name in chosen[kind] if name not in names]:
            raise SpecError(f"{where}: unknown {kind} {unknown[0]!r} (there are: {', '.join(names)})")
    return chosen, rest
