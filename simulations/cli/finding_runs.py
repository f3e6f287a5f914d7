"""Find runs by folder, or by name under runs/."""

from pathlib import Path

from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.options import RUNS, refuse, tell


def find_run(named: Path, folder: Path) -> Run:
    """Find a run by its folder, or by its name in the folder of runs.

    Raises:
        LedgerError: there is none.
    """
    below = folder / named
    if not named.exists() and not below.exists():
        raise LedgerError(f"no run named {named}, here or in {folder}; `fedgauge runs` lists all runs")
    return Run.open(named if named.exists() or not below.exists() else below)


def find_runs(named: Path, folder: Path) -> list[Run]:
    """A run, or every run of a sweep's folder, unchecked, as one may be damaged; LedgerError if there is none."""
    place = named if named.exists() else folder / named
    return _runs_in(place) if (place / "sweep.json").exists() else [find_run(named, folder)]


def _runs_in(folder: Path) -> list[Run]:
    """Return the runs in a folder without links, which are named on standard error."""
    kept = []
    for path in sorted(folder.glob("*/ledger.sqlite")):
        run = Run(path.parent)  # which has resolved a link; asking the folder again may give another answer
        if run.folder != path.parent:
            tell(f"{path.parent} is a link and left out: name the run that it points to")
        else:
            kept.append(run)
    return kept


def all_runs(folder: Path) -> list[Run]:
    """Every run in the folder of runs, newest first; SpecError if a folder was named that is none."""
    wrong = (folder / "ledger.sqlite").exists() or (folder != RUNS and not folder.is_dir())
    refuse({f"{folder} is a run, or no folder: --runs names the folder in which runs are kept": wrong})
    return _runs_in(folder)[::-1]
