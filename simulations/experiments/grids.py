"""Grids: the cells that the axes of a file span, and what holds in which cell; of sweeps and of paper tables.

An axis is a list of tables, each with a name: `[[defense]]` is the axis `defense`. Another table of the file that is for some
cells only names them: `defenses = ["none", "sign"]`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from fedgauge.client.components import SpecError, Table, coerce

Names = Mapping[str, Sequence[str]]  # by axis


def check_keys(table: Table, allowed: Collection[str], where: str) -> None:
    """SpecError if a table has a key that is not allowed."""
    if unknown := sorted(table.keys() - set(allowed)):
        raise SpecError(f"{where}: unknown key {unknown[0]!r} (it has: {', '.join(allowed)})")


def tables_of(tables: Table, key: str) -> list[Table]:
    """The [[key]] tables of a file."""
    if isinstance(tables.get(key), Mapping):
        raise SpecError(f"{key} must be a list of tables; write [[{key}]] instead of [{key}]")
    listed = coerce(tables.get(key, []), list, f"[[{key}]]")
    return [coerce(table, dict, f"[[{key}]] #{i}") for i, table in enumerate(listed, 1)]


def names_of(axis: str, entries: Sequence[Table]) -> list[str]:
    """The names of an axis's tables."""
    return [coerce(table.get("name"), str, f"[[{axis}]] #{i}: name") for i, table in enumerate(entries, 1)]


def selection(table: Table, axes: Names, where: str) -> tuple[Names, Table]:
    """The cells that a table is for, as names of each axis (default: all), and its other keys."""
    chosen, rest = {}, dict(table)
    for axis, names in axes.items():
        key = f"{axis}s"
        chosen[axis] = coerce(rest.pop(key, names), Sequence[str], f"{where}: {key}")
        if not chosen[axis]:
            raise SpecError(f"{where}: {key} is empty; name some, or leave the key out for all")
        for name in chosen[axis]:
            if name not in names:
                raise SpecError(f"{where}: unknown {axis} {name!r} (there are: {', '.join(names)})")
    return chosen, rest


def layered(layers: Iterable[Table], merged: Collection[str], where: str) -> dict[str, Any]:
    """One table of several: a later one replaces the keys of earlier ones, but tables under merged keys are joined."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            result[key] = {**result.get(key, {}), **coerce(value, dict, f"{where}: {key}")} if key in merged else value
    return result


# ------------------------------------------------------------------------------- paper tables, which are all our own

CELL_KEYS = (
    *("n", "clients", "wave", "data", "model", "chain", "weights", "train", "auxiliary", "server_attack", "rounds"),
    *("members", "alone", "faintest", "heavy"),
)
JOINED = ("data", "model", "train")
GRID_KEYS = ("axes", "cell_name", "attack", "attacks", "where", "reference")  # of the whole table
BEYOND_METRICS = ("spread", "n", "iterations", "restarts")  # of what a paper reports of an attack


def expand(tables: Table, others: Collection[str]) -> list[dict[str, Any]]:
    """The cells of a paper table, each a table of CELL_KEYS, name and attack.

    Keys of a cell may stand at the top, in the tables of the axes and in [[where]], which is for the cells that it names; the last
    one holds. So do changes to attacks (`attacks`, by a name or a pattern), of which those at the top are defaults.

    Args:
        others: further keys that the paper table has at the top.
    """
    axes = {axis: tables_of(tables, axis) for axis in coerce(tables.get("axes", ["cell"]), Sequence[str], "axes")}
    check_keys(tables, (*others, *GRID_KEYS, *axes, *CELL_KEYS), "the paper table")
    for axis, entries in axes.items():
        for i, entry in enumerate(entries, 1):
            check_keys(entry, ("name", "attack", "attacks", *CELL_KEYS), f"[[{axis}]] #{i}")
    names = {axis: names_of(axis, entries) for axis, entries in axes.items()}
    wheres = [selection(w, names, f"[[where]] #{i}") for i, w in enumerate(tables_of(tables, "where"), 1)]
    attacks = [selection(a, names, f"[[attack]] #{i}") for i, a in enumerate(tables_of(tables, "attack"), 1)]
    template = coerce(tables.get("cell_name", " ".join(f"{{{axis}}}" for axis in axes)), str, "cell_name")
    top = {key: value for key, value in tables.items() if key in (*CELL_KEYS, "attacks")}
    cells = []
    for each in product(*axes.values()):
        place = {axis: entry["name"] for axis, entry in zip(axes, each, strict=True)}
        layers = [top, *each, *(where for chosen, where in wheres if _is_in(place, chosen))]
        on_it = [a for chosen, a in attacks if _is_in(place, chosen)]
        on_it += [a for e in each for a in tables_of(e, "attack")]
        cells.append(_cell(template.format_map(place).rstrip(", "), layers, on_it))  # what an empty name leaves goes
    for pattern, by_attack in tables.get("reference", {}).items():
        of_it = [(name, figures, cell) for name, figures in by_attack.items() for cell in cells]
        for attack, figures in ((a, f) for name, f, cell in of_it for a in _named(cell, pattern, name)):
            attack["paper"] = {**attack.get("paper", {}), **figures}
    return cells


def _is_in(place: Mapping[str, str], chosen: Names) -> bool:
    return all(place[axis] in names for axis, names in chosen.items())


def _named(cell: Table, pattern: str, name: str) -> list[dict[str, Any]]:
    """The attacks of a cell, if a pattern is of the cell's name, and another of theirs."""
    return [a for a in cell["attack"] if fnmatchcase(cell["name"], pattern) and fnmatchcase(a["name"], name)]


def _cell(name: str, layers: Sequence[Table], attacks: Sequence[Table]) -> dict[str, Any]:
    own = [{k: v for k, v in layer.items() if k in CELL_KEYS} for layer in layers]
    defaults, *changes = [layer.get("attacks", {}) for layer in layers]
    made = []
    for attack in attacks:
        parts = [*_matching(defaults, attack["name"]), attack]
        parts += [c for change in changes for c in _matching(change, attack["name"])]
        made.append(layered(parts, ("paper",), f"cell {name}, attack {attack['name']}"))
    return {**layered(own, JOINED, f"cell {name}"), "name": name, "attack": made}


def _matching(by_name: Table, name: str) -> list[Table]:
    """The values whose key is this name, or a pattern of it."""
    return [value for pattern, value in by_name.items() if fnmatchcase(name, pattern)]
