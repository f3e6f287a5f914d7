"""Find, read, check and restrict the files of simulations/papers."""

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedgauge.attacks.base import Budget
from fedgauge.client.components import SpecError, call, check_arguments, coerce, settings_of
from fedgauge.simulations.experiments import grids
from fedgauge.simulations.experiments.paper_tables import (
    AttackSpec,
    Images,
    PaperTable,
    Pretraining,
    Setting,
    check_link,
)

PAPERS = Path(__file__).parents[1] / "papers"


def names() -> list[str]:
    """The names of all tables that can be reproduced."""
    return sorted(path.stem for path in PAPERS.glob("*/*.toml"))


def load(name: str) -> PaperTable:
    """Read a table by name; SpecError if there is none or if it has a mistake."""
    if name not in names():
        raise SpecError(f"no paper table is called {name!r}; there are {', '.join(names())}")
    path = next(PAPERS.glob(f"*/{name}.toml"))
    try:
        return parse(name, tomllib.loads(path.read_text()))
    except SpecError as error:
        raise SpecError(f"{path.name}: {error}") from error


def parse(name: str, tables: Mapping[str, Any]) -> PaperTable:
    """A table from parsed TOML, whose cells are those of its grid."""
    cells = tuple(map(_cell, grids.expand(tables, ("title", "note", "seed", "version"))))
    head = {key: coerce(tables.get(key, ""), str, key) for key in ("title", "note")}
    seed, version = (coerce(tables.get(key, least), int, key) for key, least in (("seed", 0), ("version", 1)))
    return PaperTable(name, **head, seed=seed, cells=cells, version=version)


def _cell(table: Mapping[str, Any]) -> Setting:
    where = f"cell {table['name']}"
    specs = [_attack_spec(t, f"{where}, attack #{j}") for j, t in enumerate(table["attack"], 1)]
    for j, link in enumerate(coerce(table.get("chain", []), list, f"{where}: chain"), 1):
        check_link(link, f"{where}, chain #{j}")
    made = {
        "images": settings_of(Images, table.get("data"), f"{where}: data"),
        "attacks": tuple(specs),
        "train": settings_of(Pretraining, table["train"], f"{where}: train") if "train" in table else None,
    }
    rest = {key: value for key, value in table.items() if key not in ("data", "attack", "train")}
    made |= check_arguments(Setting, {"wave": 64, "chain": [], **rest}, where, made)
    cell: Setting = call(Setting, made, where)
    cell.build_server_attack()
    return cell


def _attack_spec(table: Mapping[str, Any], where: str) -> AttackSpec:
    own = {f.name for f in fields(AttackSpec)} - {"table", "budget", "trace"}
    spent = {f.name for f in fields(Budget)}
    arguments = {k: v for k, v in table.items() if k in own}
    paper = {k: coerce(v, float, f"{where}: paper {k}") for k, v in arguments.pop("paper", {}).items()}
    auxiliary = coerce(arguments.pop("auxiliary", None), dict | None, f"{where}: auxiliary")
    made = {
        "table": {k: v for k, v in table.items() if k not in own | spent},
        "budget": settings_of(Budget, {k: v for k, v in table.items() if k in spent}, where),
        "paper": paper,
        "auxiliary": auxiliary,
    }
    spec: AttackSpec = call(AttackSpec, check_arguments(AttackSpec, arguments, where, made) | made, where)
    spec.build()
    spec.images(f"attack {spec.name}")
    return spec


def restrict(
    paper_table: PaperTable,
    n: int | None,
    budget: int | None,
    cells: str | None,
    attacks: str | None = None,
    always: Collection[str] = (),
) -> PaperTable:
    """The table with another n, other iterations, or only the cells and attacks whose names match (a part, or with * and ?).

    Without a pattern: all cells but the heavy ones, and all attacks. A chosen attack brings the attack it is compared with, and
    those called `always` are chosen.
    """
    for option, value in (("--n", n), ("--budget", budget)):
        if value is not None and value < 1:
            raise SpecError(f"{option} must be at least 1, got {value}")
    chosen = [c for c in paper_table.cells if (not c.heavy if cells is None else matches(c.name, cells))]
    if not chosen:
        known = ", ".join(c.name for c in paper_table.cells)
        raise SpecError(
            f"no cell of {paper_table.name} is chosen by --cells {cells!r} (heavy ones are if named): {known}"
        )

    def chosen_attacks(cell: Setting) -> list[AttackSpec]:
        names = {t.name for t in cell.attacks if attacks is None or t.name in always or matches(t.name, attacks)}
        names |= {t.against for t in cell.attacks if t.name in names}
        specs = [t for t in cell.attacks if t.name in names]
        return specs if budget is None else [replace(t, budget=replace(t.budget, iterations=budget)) for t in specs]

    changed = [replace(c, n=n or c.n, attacks=tuple(specs)) for c in chosen if (specs := chosen_attacks(c))]
    if not changed:
        known = ", ".join(dict.fromkeys(t.name for c in chosen for t in c.attacks))
        raise SpecError(f"no attack of {paper_table.name} matches {attacks!r}; it has: {known}")
    return replace(paper_table, cells=tuple(changed))


def matches(name: str, pattern: str) -> bool:
    """Whether a name contains a pattern, or matches it with * and ?."""
    return pattern in name or fnmatchcase(name, pattern)
