"""What fedleak, as fedgauge was called before, wrote: recognised, and refused with what replaces it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedgauge.client import toml_text
from fedgauge.client.components import FORMER_PACKAGES
from fedgauge.server.store import run_files
from fedgauge.server.store.ledger_connection import LedgerError

NAME = "fedleak"
_KEYS_OF_DLG = {"fit": "restart_above", "enough": "tolerance"}


def refuse(folder: Path) -> None:
    """Raise LedgerError if fedleak wrote this run."""
    if _package(folder / "environment.json") or _scenario(folder / "scenario.toml"):
        raise LedgerError(
            f"{folder} is a run of {NAME}, as fedgauge was called before, and this version cannot read it: run its scenario "
            f"again, or open it with the {NAME} that wrote it"
        )


def replaced(tables: Mapping[str, Any]) -> str:
    """Which key or value of a scenario has another name today, and that name; empty if none has."""
    if "malice" in tables:
        return "[[malice]] is called [[server_attack]] now"
    tape, attacks = tables.get("tape"), tables.get("attack")
    if isinstance(tape, Mapping) and tape.get("keep") == "scored":
        return '[tape]: keep = "scored" is called keep = "attacked" now'
    for i, table in enumerate(attacks if isinstance(attacks, list) else [], 1):
        if isinstance(table, Mapping) and str(table.get("use")).rpartition(":")[2] in ("dlg", "idlg"):
            for before, now in _KEYS_OF_DLG.items():
                if before in table:
                    return f"[[attack]] #{i}: {before} is called {now} now"
    return ""


def _package(path: Path) -> bool:
    """Whether a run's list of versions names fedleak."""
    try:
        return NAME in json.loads(run_files.read(path, run_files.MOST_VERSIONS))["packages"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _scenario(path: Path) -> bool:
    """Whether a run's scenario has renamed keys, or names every component by its module, as fedleak's did."""
    try:
        tables = toml_text.parse(run_files.read(path))
    except (OSError, ValueError):
        return False
    names = list(_names(tables))
    dotted = all(":" in name for name in names) and any(name.split(".")[0] in FORMER_PACKAGES for name in names)
    return dotted or bool(replaced(tables))


def _names(value: object) -> Iterator[str]:
    """Every `use` in a scenario."""
    if isinstance(value, Mapping):
        if isinstance(value.get("use"), str):
            yield value["use"]
        for inner in value.values():
            yield from _names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _names(inner)
