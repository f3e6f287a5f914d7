"""A sweep file: defenses, attacks and seeds, checked and expanded into one scenario for each defense and seed."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedgauge.client import toml_text
from fedgauge.client.components import SpecError, Table, coerce
from fedgauge.client.files import read_file
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.roles import is_attack
from fedgauge.simulations.experiments.grids import check_keys, layered, names_of, selection, tables_of

TOP_KEYS = ("scenario", "seeds", "defense", "attack")
# keys of a [[defense]]; MERGED_KEYS are scenario tables, merged into those of [scenario]
REQUIRED = ("name", "chain")
OWN_KEYS = (*REQUIRED, "promise")
MERGED_KEYS = ("data", "model", "strategy", "secure_sum", "audit", "privacy")


@dataclass(frozen=True)
class SweepCell:
    """One run of the grid: a defense and a seed.

    Args:
        attacks: the names of those that its scenario plans.
        promise: what the defense claims, for the summary.
    """

    defense: str
    seed: int
    tables: Table
    attacks: tuple[str, ...]
    promise: str = ""

    @property
    def folder(self) -> str:
        """The folder name of its run."""
        return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', self.defense).strip('-.')}-seed{self.seed}"


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file: its text, and its cells, whose scenarios were all built once."""

    name: str
    text: str
    cells: tuple[SweepCell, ...]

    @classmethod
    def load(cls, path: Path) -> "Sweep":
        """Read and check a file; SpecError names the file, the table, the value and what is allowed."""
        try:
            data = read_file(path, toml_text.MOST)
            return cls(path.stem, data.decode(), tuple(_cells(toml_text.parse(data))))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            words = getattr(error, "strerror", None) or error
            raise SpecError(f"{path}: not a readable TOML file: {words}") from error
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from error


def _cells(tables: Table) -> list[SweepCell]:
    hint = "; this looks like a scenario, which fedgauge run takes" if "chain" in tables else ""
    check_keys(tables, TOP_KEYS, f"a sweep{hint}")
    shared = coerce(tables.get("scenario", {}), dict, "[scenario]")
    for key in ("chain", "attack", "seed"):
        if key in shared:
            raise SpecError(f"[scenario]: {key} is what the sweep varies; set it in [[defense]], [[attack]] or seeds")
    seeds = coerce(tables.get("seeds", [0]), Sequence[int], "seeds")
    defenses, found = tables_of(tables, "defense"), tables_of(tables, "attack")
    if not defenses or not found or not seeds or len(set(seeds)) < len(seeds):
        raise SpecError("a sweep needs at least one [[defense]], one [[attack]] and one seed; seeds must differ")
    for i, defense in enumerate(defenses, 1):
        if missing := [key for key in REQUIRED if not defense.get(key)]:
            raise SpecError(f"[[defense]] #{i} needs {missing[0]!r}")
    names = names_of("defense", defenses)
    attacks = [selection(attack, {"defense": names}, f"[[attack]] #{i}") for i, attack in enumerate(found, 1)]
    cells = []
    for i, (name, defense) in enumerate(zip(names, defenses, strict=True), 1):
        on_it = [attack for chosen, attack in attacks if name in chosen["defense"]]
        cells += [_cell(name, seed, shared, defense, on_it, f"[[defense]] #{i} ({name})") for seed in seeds]
    folders = [cell.folder for cell in cells]
    if repeated := sorted({f for f in folders if folders.count(f) > 1}):
        raise SpecError(f"two runs would be called {repeated[0]!r}; give each [[defense]] its own name")
    return cells


def _cell(name: str, seed: int, shared: Table, defense: Table, attacks: Sequence[Table], where: str) -> SweepCell:
    """One cell; its scenario is built once, so that mistakes show before anything runs."""
    check_keys(defense, (*OWN_KEYS, *MERGED_KEYS), where)
    own = {key: defense[key] for key in MERGED_KEYS if key in defense}
    tables = {
        **layered([shared, own], MERGED_KEYS, where),
        "seed": seed,
        "chain": coerce(defense.get("chain"), list, f"{where}: chain"),
        "attack": list(attacks),
    }
    try:
        planned = Scenario.from_tables(tables).plan.attacks
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error
    promise = coerce(defense.get("promise", ""), str, f"{where}: promise")
    return SweepCell(name, seed, tables, tuple(p.name for p in planned if is_attack(p.name)), promise)
