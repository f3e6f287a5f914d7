"""The grid of a paper's table: the cells that the axes of a TOML file span, and what holds in which cell.

An axis is a list of tables, each with a name: `[[defense]]` is the axis `defense`. Another table of the file that is for some
cells only names them: `defenses = ["none", "sign"]`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from itertools import product

from fedgauge.attacks.plan import attack_name
from fedgauge.client.components import SpecError, Table, coerce
from fedgauge.simulations.experiments.sweep_file import Names, check_keys, layered, selection, tables_of
from fedgauge.simulations.reproduction.paper_tables import Setting

HEAD = ("title", "note", "seed", "version")
CELL_KEYS = ("data", *(f.name for f in fields(Setting) if f.name not in ("name", "images", "attacks")))
GRID_KEYS = ("axes", "cell_name", "attack", "attacks", "where", "reference")  # of the whole file
JOINED = ("data", "model", "train")  # their tables are joined key by key
Reference = tuple[str, str, Table]  # patterns of a cell's and an attack's names, the paper's figures


@dataclass(frozen=True)
class Cell:
    """One cell, and what the file says of it.

    Args:
        table: the keys of a cell; attacks: its attacks, each a table.
    """

    name: str
    table: Table
    attacks: Sequence[Table]


def expand(tables: Table) -> list[Cell]:
    """Return the cells of a table's grid, with the paper's figures of [reference] at the attacks that it names.

    Keys of a cell may be at the top, in the tables of the axes and in [[where]], which names its cells; the last value wins. The
    same is true for changes to attacks (`attacks`, by a name or a pattern); those at the top are defaults.

    Raises:
        SpecError: the file names an unknown key, axis, entry or attack.

    Example:
        >>> file = {"axes": ["rate", "bits"], "rate": [{"name": "slow"}, {"name": "fast"}], "bits": [{"name": "8"}]}
        >>> [cell.name for cell in expand(file)]
        ['slow 8', 'fast 8']
    """
    axes = {axis: tables_of(tables, axis) for axis in coerce(tables.get("axes", ["cell"]), Sequence[str], "axes")}
    check_keys(tables, (*HEAD, *GRID_KEYS, *axes, *CELL_KEYS), "the file")
    for axis, entries in axes.items():
        for i, entry in enumerate(entries, 1):
            check_keys(entry, ("name", "attack", "attacks", *CELL_KEYS), f"[[{axis}]] #{i}")
    names = {
        axis: [coerce(table.get("name"), str, f"[[{axis}]] #{i}: name") for i, table in enumerate(entries, 1)]
        for axis, entries in axes.items()
    }
    wheres, attacks = (
        [selection(t, names, f"[[{key}]] #{i}") for i, t in enumerate(tables_of(tables, key), 1)]
        for key in ("where", "attack")
    )
    for i, (_, rest) in enumerate(wheres, 1):
        check_keys(rest, ("attacks", *CELL_KEYS), f"[[where]] #{i}")
    template = coerce(tables.get("cell_name", " ".join(f"{{{axis}}}" for axis in axes)), str, "cell_name")
    references, cells = _references(tables), []
    for chosen_entries in product(*axes.values()):
        called = {axis: entry["name"] for axis, entry in zip(axes, chosen_entries, strict=True)}
        layers = [tables, *chosen_entries, *(where for chosen, where in wheres if _is_in(called, chosen))]
        on_it = [a for chosen, a in attacks if _is_in(called, chosen)]
        on_it += [a for e in chosen_entries for a in tables_of(e, "attack")]
        try:
            name = template.format_map(called).rstrip(", ")  # what an empty name leaves goes
        except (LookupError, ValueError, AttributeError) as error:
            raise SpecError(f"cell_name: {template!r} names what is no axis (there are: {', '.join(axes)})") from error
        of_cell = [{k: v for k, v in layer.items() if k in CELL_KEYS} for layer in layers]
        table = layered(of_cell, JOINED, f"cell {name}")
        cells.append(Cell(name, table, _attacks(name, layers, on_it, references)))
    made = [(cell.name, str(attack_name(attack))) for cell in cells for attack in cell.attacks]
    for pattern, attack, _ in references:
        if not any(fnmatchcase(cell, pattern) and fnmatchcase(called, attack) for cell, called in made):
            raise SpecError(f"[reference] names {pattern!r}, {attack!r}: no cell of the grid has such an attack")
    return cells


def _references(tables: Table) -> list[Reference]:
    return [
        (pattern, attack, coerce(figures, dict, f"[reference] {pattern!r}, {attack!r}"))
        for pattern, by_attack in coerce(tables.get("reference", {}), dict, "[reference]").items()
        for attack, figures in coerce(by_attack, dict, f"[reference] {pattern!r}").items()
    ]


def _is_in(place: Mapping[str, str], chosen: Names) -> bool:
    return all(place[axis] in names for axis, names in chosen.items())


def _attacks(
    name: str, layers: Sequence[Table], attacks: Sequence[Table], references: Sequence[Reference]
) -> Sequence[Table]:
    """The attacks of a cell, with the defaults at the top, the changes of the other layers and the paper's figures."""
    defaults, *changes = [coerce(layer.get("attacks", {}), dict, f"cell {name}: attacks") for layer in layers]
    made = []
    for attack in attacks:
        called = str(attack_name(attack))
        parts = [*_matching(defaults, called), attack, *(c for change in changes for c in _matching(change, called))]
        parts += [{"paper": figures} for c, a, figures in references if fnmatchcase(name, c) and fnmatchcase(called, a)]
        made.append(layered(parts, ("paper",), f"cell {name}, attack {called}"))
    return made


def _matching(by_name: Table, name: str) -> list[Table]:
    """Return the values with this name, or a pattern of it, as key."""
    matching = {pattern: value for pattern, value in by_name.items() if fnmatchcase(name, pattern)}
    return [coerce(value, dict, f"attacks: {pattern}") for pattern, value in matching.items()]
