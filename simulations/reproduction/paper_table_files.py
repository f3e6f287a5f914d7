"""Find, read, check and restrict the files of simulations/papers, and add the attacks of other people to them."""

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path

from fedgauge.attacks.base import Budget
from fedgauge.attacks.plan import attack_name, modalities_of
from fedgauge.client import toml_text
from fedgauge.client.components import SpecError, Table, call, check_arguments, errors_in, resolve, settings_of
from fedgauge.client.federation import DATASET, TRANSFORM
from fedgauge.client.files import read_file
from fedgauge.client.models.build import MODEL
from fedgauge.server.store.scenario import component_of
from fedgauge.simulations.reproduction.grid import HEAD, Cell, expand
from fedgauge.simulations.reproduction.measures import all_measures
from fedgauge.simulations.reproduction.paper_tables import (
    STRONGEST,
    AttackSpec,
    Images,
    PaperTable,
    Pretraining,
    Setting,
)

PAPERS = Path(__file__).parents[1] / "papers"


def packaged() -> dict[str, Path]:
    return {path.stem: path for path in sorted(PAPERS.glob("*/*.toml"), key=lambda path: path.stem)}


def load(name: str) -> PaperTable:
    """Read a table: one of simulations/papers by its name, or a user's own by the path of its file.

    Raises:
        SpecError: there is none, or it has a mistake.
    """
    path = Path(name) if name.endswith(".toml") else packaged().get(name)
    if path is None:
        raise SpecError(
            f"no paper table is called {name!r}: name your own file, NAME.toml, or one of {', '.join(packaged())}"
        )
    with errors_in(path, OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return parse(path.stem, toml_text.parse(read_file(path, toml_text.MOST)))


def parse(name: str, tables: Table) -> PaperTable:
    """Make a table from parsed TOML, with the cells of its grid."""
    cells = tuple(map(_setting, expand(tables)))
    _check_distinct("cells", [cell.name for cell in cells])
    head = {"title": "", "note": "", "seed": 0} | {key: tables[key] for key in HEAD if key in tables}
    return PaperTable(**check_arguments(PaperTable, head, "the table", {"name": name, "cells": cells}), cells=cells)


def _setting(cell: Cell) -> Setting:
    where, table = f"cell {cell.name}", cell.table
    specs = [_attack_spec(t, f"{where}, attack #{j}") for j, t in enumerate(cell.attacks, 1)]
    made = {
        "name": cell.name,
        "images": settings_of(Images, table.get("data"), f"{where}: data"),
        "attacks": tuple(specs),
        "train": settings_of(Pretraining, table["train"], f"{where}: train") if "train" in table else None,
    }
    rest = {key: value for key, value in table.items() if key not in ("data", "train")}
    made |= check_arguments(Setting, {"wave": 64, "chain": [], **rest}, where, made)
    setting: Setting = call(Setting, made, where)
    setting.build_server_attack()
    resolve(setting.images.table, f"{where}: data", DATASET)
    resolve(setting.model, f"{where}: model", MODEL)
    for i, link in enumerate(setting.chain, 1):
        resolve(link, f"{where}: chain #{i}", TRANSFORM)
    names = [spec.name for spec in specs]
    _check_distinct(f"attacks of {where}", names)
    if setting.images.part == "test" and (tests := [spec.name for spec in specs if spec.tests_membership]):
        raise SpecError(f"{where}, attack {tests[0]}: members are in the training part: set data.part to 'train'")
    for spec in specs:
        if spec.against not in ("", STRONGEST, *names):
            raise SpecError(f"{where}, attack {spec.name}: against: the cell has no attack {spec.against!r}")
        if unknown := [metric for metric in spec.metrics if metric not in all_measures()]:
            known = ", ".join(all_measures())
            raise SpecError(f"{where}, attack {spec.name}: nothing is measured as {unknown[0]!r} (there are: {known})")
    return setting


def _check_distinct(what: str, names: Sequence[str]) -> None:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise SpecError(f"two {what} are called {repeated[0]!r}; give one of them another name")


def _attack_spec(table: Table, where: str) -> AttackSpec:
    own = {f.name for f in fields(AttackSpec)} - {"table", "budget"}
    spent = {f.name for f in fields(Budget)}
    made = {
        "name": attack_name(table),
        "table": {k: v for k, v in table.items() if k not in own | spent},
        "budget": settings_of(Budget, {k: v for k, v in table.items() if k in spent}, where),
    }
    arguments = check_arguments(AttackSpec, {**made, **{k: v for k, v in table.items() if k in own}}, where)
    spec: AttackSpec = call(AttackSpec, arguments, where)
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
    """Change the n and iterations of a table, or keep only matching cells and attacks (part of a name, or with * and ?).

    Without a pattern: all cells but the heavy ones, and all attacks. A chosen attack brings the attack it is compared with, and
    those called `always` are chosen.
    """
    chosen = [c for c in paper_table.cells if (not c.heavy if cells is None else _matches(c.name, cells))]

    def chosen_attacks(cell: Setting) -> list[AttackSpec]:
        names = {t.name for t in cell.attacks if attacks is None or t.name in always or _matches(t.name, attacks)}
        names = names.union(*(cell.needed_by(t) for t in cell.attacks if t.name in names))
        specs = [t for t in cell.attacks if t.name in names]
        return specs if budget is None else [replace(t, budget=replace(t.budget, iterations=budget)) for t in specs]

    changed = [replace(c, n=n or c.n, attacks=tuple(specs)) for c in chosen if (specs := chosen_attacks(c))]
    if not changed:
        known = [c.name for c in paper_table.cells], sorted({t.name for c in paper_table.cells for t in c.attacks})
        listed = "; its attacks: ".join(map(", ".join, known))
        raise SpecError(
            f"{paper_table.name} has nothing for --cells {cells!r} --attacks {attacks!r}; its cells: {listed}"
        )
    return replace(paper_table, cells=tuple(changed))


def _matches(name: str, pattern: str) -> bool:
    """Return whether a name contains a pattern, or matches it with * and ?."""
    return pattern in name or fnmatchcase(name, pattern)


# ------------------------------------------------------------------------------------------------- attacks of other people


def with_submissions(paper_table: PaperTable, attacks: Sequence[str]) -> PaperTable:
    """Add further attacks to every cell that they fit.

    An attack gets the budget, knowledge and metrics of the cell's first attack, and is compared with the strongest if that one
    is. A test of membership fits cells of members, and a registered attack those of its kind of data.

    Args:
        attacks: components as text, such as 'mine:sharper rate=0.1'.

    Raises:
        SpecError: a component is unknown, has no such argument, names what the cell decides, or fits no cell.
    """
    cells = list(paper_table.cells)
    for text in attacks:
        name, table = submitted(text)
        made = [_attacked(cell, name, table) for cell in cells]
        if made == cells:
            why = "every selected cell already has it or cannot run it"
            raise SpecError(f"--attack {name}: {why}: rename it (name=...), or select other --cells")
        cells = made
    return replace(paper_table, cells=tuple(cells))


def submitted(text: str) -> tuple[str, Table]:
    """Parse the name and the settings of an attack from text: 'mine:sharper rate=0.1'."""
    table = component_of(text)
    return str(attack_name(table)), {key: value for key, value in table.items() if key != "name"}


def _attacked(cell: Setting, name: str, table: Table) -> Setting:
    """A cell with a further attack, if it is about what the cell's first one is about."""
    like = cell.attacks[0]
    if name in {attack.name for attack in cell.attacks}:
        return cell
    spec = replace(like, name=name, table=table, paper={}, against=like.against if like.against == STRONGEST else "")
    spec.build()
    # nothing is known of what data a user's own module reconstructs
    own, others = (modalities_of(str(of.table["use"])) for of in (spec, like))
    of_alike_data = spec.tests_membership or not own or not others or any(modality in others for modality in own)
    fits = spec.tests_membership == like.tests_membership and of_alike_data
    return replace(cell, attacks=(*cell.attacks, spec)) if fits else cell
