"""A sweep file: defenses, attacks and seeds, checked and expanded into one scenario for each defense and seed."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgauge.client import toml_text
from fedgauge.client.components import SpecError, Table, coerce
from fedgauge.client.files import read_file
from fedgauge.server.store.scenario import Scenario

TOP_KEYS = ("scenario", "seeds", "defense", "attack")
# keys of a [[defense]]; MERGED_KEYS are scenario tables, merged into those of [scenario]
REQUIRED = ("name", "chain")
OWN_KEYS = (*REQUIRED, "promise")
MERGED_KEYS = ("data", "model", "strategy", "secure_sum", "audit", "privacy")


@dataclass(frozen=True)
class SweepCell:
    """One run of the grid: a defense and a seed; promise: what the defense claims, for the summary."""

    defense: str
    seed: int
    tables: Table
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
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SpecError(f"{path}: there is no such file") from error
        except IsADirectoryError as error:
            raise SpecError(f"{path} is a folder; name a sweep file, like simulations/defenses.toml") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SpecError(f"{path}: not a readable TOML file: {error}") from error
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from error


def _cells(tables: Table) -> list[SweepCell]:
    if unknown := sorted(tables.keys() - set(TOP_KEYS)):
        hint = "; this looks like a scenario, which fedgauge run takes" if "chain" in tables else ""
        raise SpecError(f"unknown key {unknown[0]!r} (a sweep has: {', '.join(TOP_KEYS)}){hint}")
    shared = coerce(tables.get("scenario", {}), dict, "[scenario]")
    for key in ("chain", "attack", "seed"):
        if key in shared:
            raise SpecError(f"[scenario]: {key} is what the sweep varies; set it in [[defense]], [[attack]] or seeds")
    seeds = coerce(tables.get("seeds", [0]), Sequence[int], "seeds")
    defenses = [coerce(d, dict, f"[[defense]] #{i}") for i, d in enumerate(_tables(tables, "defense"), 1)]
    attacks = [coerce(a, dict, f"[[attack]] #{i}") for i, a in enumerate(_tables(tables, "attack"), 1)]
    if not defenses or not attacks or not seeds:
        raise SpecError(
            "a sweep needs at least one [[defense]], one [[attack]] and one seed (see simulations/defenses.toml)"
        )
    if len(set(seeds)) < len(seeds):
        raise SpecError(f"seeds must differ, got {list(seeds)}")
    for i, defense in enumerate(defenses, 1):
        if missing := [key for key in REQUIRED if not defense.get(key)]:
            raise SpecError(f"[[defense]] #{i} needs {missing[0]!r}")
    names = [coerce(d["name"], str, f"[[defense]] #{i}: name") for i, d in enumerate(defenses, 1)]
    _check_targets(attacks, names)
    cells = [
        SweepCell(
            name,
            seed,
            _scenario(shared, defense, name, attacks, seed, f"[[defense]] #{i} ({name})"),
            coerce(defense.get("promise", ""), str, f"[[defense]] #{i} ({name}): promise"),
        )
        for i, (name, defense) in enumerate(zip(names, defenses, strict=True), 1)
        for seed in seeds
    ]
    folders = [cell.folder for cell in cells]
    if repeated := sorted({f for f in folders if folders.count(f) > 1}):
        raise SpecError(f"two runs would be called {repeated[0]!r}; give each [[defense]] its own name")
    return cells


def _tables(tables: Table, key: str) -> list[Any]:
    if isinstance(tables.get(key), Mapping):
        raise SpecError(f"{key} must be a list of tables; write [[{key}]] instead of [{key}]")
    return list(coerce(tables.get(key, []), list, f"[[{key}]]"))


def _check_targets(attacks: Sequence[Table], names: Sequence[str]) -> None:
    for i, attack in enumerate(attacks, 1):
        targets = coerce(attack.get("defenses", names), Sequence[str], f"[[attack]] #{i}: defenses")
        if not targets:
            raise SpecError(f"[[attack]] #{i}: defenses is empty; name some, or leave the key out to attack all")
        for name in targets:
            if name not in names:
                raise SpecError(f"[[attack]] #{i}: unknown defense {name!r} (the sweep has: {', '.join(names)})")


def _scenario(shared: Table, defense: Table, name: str, attacks: Sequence[Table], seed: int, where: str) -> Table:
    """The scenario of one cell; it is built once, so that mistakes show before anything runs."""
    if unknown := sorted(defense.keys() - {*OWN_KEYS, *MERGED_KEYS}):
        raise SpecError(f"{where}: unknown key {unknown[0]!r} (it has: {', '.join((*OWN_KEYS, *MERGED_KEYS))})")
    merged = {k: dict(v) if isinstance(v, Mapping) else v for k, v in shared.items()}
    for key in (k for k in MERGED_KEYS if k in defense):
        merged[key] = {**merged.get(key, {}), **coerce(defense[key], dict, f"{where}: {key}")}
    own_attacks = [
        {k: v for k, v in a.items() if k != "defenses"} for a in attacks if name in a.get("defenses", [name])
    ]
    tables = {
        **merged,
        "seed": seed,
        "chain": coerce(defense.get("chain"), list, f"{where}: chain"),
        "attack": own_attacks,
    }
    try:
        Scenario.from_tables(tables)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error
    return tables
