"""Finds runs by folder, or by name under runs/."""

from pathlib import Path

from fedgauge.server.store.run import Run


def find_run(named: Path, folder: Path) -> Run:
    """A run by its folder, or by its name in the folder of runs."""
    below = folder / named
    return Run.open(named if named.exists() or not below.exists() else below)


def find_runs(named: Path, folder: Path) -> list[Run]:
    """A run, or every run of a sweep's folder."""
    place = named if named.exists() else folder / named
    if not (place / "sweep.toml").exists():
        return [find_run(named, folder)]
    return [Run.open(path.parent) for path in sorted(place.glob("*/ledger.sqlite"))]
