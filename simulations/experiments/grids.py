"""Grids: the cells that the axes of a file span, and what holds in which cell; of sweeps and of paper tables.

An axis is a list of tables, each with a name: `[[defense]]` is the axis `defense`. Another table of the file that is for some
cells only names them: `defenses = ["none", "sign"]`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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


# --------------------------------------------------------------------------------------------------------- paper tables

CELL_KEYS = (
    *("n", "clients", "wave", "data", "model", "chain", "weights", "train", "auxiliary", "server_attack", "rounds"),
    *("members", "alone", "faintest", "heavy"),
)
JOINED = ("data", "model", "train")
GRID_KEYS = ("axes", "cell_name", "attack", "attacks", "where", "reference")  # of the whole table
BEYOND_METRICS = ("spread", "n", "iterations", "restarts")  # of what a paper reports of an attack


def expand(tables: Table, others: Collection[str]) -> list[dict[str, Any]]:
    """The cells of a paper table, each a table of CELL_KEYS, name and attack; SpecError names what is unknown.

    Keys of a cell may stand at the top, in the tables of the axes and in [[where]], which is for the cells that it names; the last
    one holds. So do changes to attacks (`attacks`, by a name or a pattern), of which those at the top are defaults.

    Args:
        others: further keys that the paper table has at the top.
    """
    axes = _axes(tables, others)
    names = {axis: names_of(axis, entries) for axis, entries in axes.items()}
    wheres = [selection(w, names, f"[[where]] #{i}") for i, w in enumerate(tables_of(tables, "where"), 1)]
    for i, (_, where) in enumerate(wheres, 1):
        check_keys(where, ("attacks", *CELL_KEYS), f"[[where]] #{i}")
    attacks = [selection(a, names, f"[[attack]] #{i}") for i, a in enumerate(tables_of(tables, "attack"), 1)]
    template = coerce(tables.get("cell_name", " ".join(f"{{{axis}}}" for axis in axes)), str, "cell_name")
    top = {key: value for key, value in tables.items() if key in (*CELL_KEYS, "attacks")}
    cells = []
    for entries in product(*axes.values()):
        place = {axis: entry["name"] for axis, entry in zip(axes, entries, strict=True)}
        layers = [top, *entries, *(where for chosen, where in wheres if _is_in(place, chosen))]
        own = [a for chosen, a in attacks if _is_in(place, chosen)] + [
            a for e in entries for a in tables_of(e, "attack")
        ]
        cells.append(_cell(_cell_name(template, place), layers, own))
    _check_names(cells)
    _check_changes([top, *(e for entries in axes.values() for e in entries), *(where for _, where in wheres)], cells)
    _add_references(coerce(tables.get("reference", {}), dict, "[reference]"), cells)
    return cells


def _axes(tables: Table, others: Collection[str]) -> dict[str, list[Table]]:
    """The tables of each axis, after a check of their keys and of those at the top."""
    axes = {axis: tables_of(tables, axis) for axis in coerce(tables.get("axes", ["cell"]), Sequence[str], "axes")}
    if not axes:
        raise SpecError("axes is empty; name some, or leave the key out for a table of [[cell]]s")
    if taken := [axis for axis in axes if axis in (*others, *GRID_KEYS, *CELL_KEYS)]:
        raise SpecError(f"axes: {taken[0]!r} is a key of paper tables; give the axis another name")
    if missing := [axis for axis, entries in axes.items() if not entries and axis != "cell"]:
        raise SpecError(f"axes: there is no [[{missing[0]}]]")
    check_keys(tables, (*others, *GRID_KEYS, *axes, *CELL_KEYS), "the paper table")
    for axis, entries in axes.items():
        for i, entry in enumerate(entries, 1):
            check_keys(entry, ("name", "attack", "attacks", *CELL_KEYS), f"[[{axis}]] #{i}")
    return axes


def _is_in(place: Mapping[str, str], chosen: Names) -> bool:
    return all(place[axis] in names for axis, names in chosen.items())


def _cell_name(template: str, place: Mapping[str, str]) -> str:
    """The name of a cell; what an empty name leaves at its end is dropped."""
    try:
        return template.format_map(place).rstrip(", ")
    except (LookupError, ValueError, AttributeError) as error:
        raise SpecError(
            f"cell_name: {template!r} may name the axes {', '.join(place)} in braces, and no other"
        ) from error


def _cell(name: str, layers: Sequence[Table], attacks: Sequence[Table]) -> dict[str, Any]:
    where = f"cell {name}"
    own = [{k: v for k, v in layer.items() if k in CELL_KEYS} for layer in layers]
    defaults, *changes = [coerce(layer.get("attacks", {}), dict, f"{where}: attacks") for layer in layers]
    made = []
    for attack in attacks:
        called = coerce(attack.get("name"), str, f"{where}: the name of an attack")
        of_it = [attack, *(c for change in changes for c in _matching(change, called, where))]
        made.append(layered([*_matching(defaults, called, where), *of_it], ("paper",), f"{where}, attack {called}"))
    return {**layered(own, JOINED, where), "name": name, "attack": made}


def _matching(by_name: Table, name: str, where: str) -> Iterator[Table]:
    """The values whose key is this name, or a pattern of it."""
    for pattern, value in by_name.items():
        if fnmatchcase(name, pattern):
            yield coerce(value, dict, f"{where}: {pattern}")


def _check_names(cells: Sequence[Table]) -> None:
    if repeated := _repeated([cell["name"] for cell in cells]):
        raise SpecError(f"two cells are called {repeated!r}; tell them apart by cell_name")
    for cell in cells:
        if repeated := _repeated([attack["name"] for attack in cell["attack"]]):
            raise SpecError(f"cell {cell['name']}: two of its attacks are called {repeated!r}")


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def _check_changes(layers: Iterable[Table], cells: Sequence[Table]) -> None:
    known = list(dict.fromkeys(attack["name"] for cell in cells for attack in cell["attack"]))
    for pattern in (p for layer in layers for p in coerce(layer.get("attacks", {}), dict, "attacks")):
        if cells and not any(fnmatchcase(name, pattern) for name in known):
            raise SpecError(f"attacks: no attack is called {pattern!r} (there are: {', '.join(known)})")


def _add_references(references: Table, cells: Sequence[dict[str, Any]]) -> None:
    """Give the attacks the paper's figures: by cell and attack (names or patterns), then by metric."""
    for pattern, by_attack in references.items():
        where = f"[reference] {pattern!r}"
        matching = [cell for cell in cells if fnmatchcase(cell["name"], pattern)]
        if not matching:
            raise SpecError(f"{where}: no cell has this name (there are: {', '.join(cell['name'] for cell in cells)})")
        attacks = [attack for cell in matching for attack in cell["attack"]]
        for name, figures in coerce(by_attack, dict, where).items():
            of_it = [attack for attack in attacks if fnmatchcase(attack["name"], name)]
            if not of_it:
                known = ", ".join(dict.fromkeys(attack["name"] for attack in attacks))
                raise SpecError(f"{where}: no attack is called {name!r} there (there are: {known})")
            for attack in of_it:
                attack["paper"] = {**attack.get("paper", {}), **coerce(figures, dict, f"{where}: {name}")}
