"""Run a sweep: train and attack a run in memory for every defense and seed.

The runs are in one folder, so that `fedgauge watch` and `fedgauge report` compare them. An interrupted sweep continues.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console

from fedgauge.client.components import SpecError
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.formatting import number
from fedgauge.server.views.outcomes import failure
from fedgauge.simulations.checks.attack_trial import PATIENCE
from fedgauge.simulations.checks.scenario_check import try_first
from fedgauge.simulations.experiments.results import ResultsFile, digest_of, print_table
from fedgauge.simulations.experiments.runner import run_cells
from fedgauge.simulations.experiments.sweep_file import Sweep, SweepCell
from fedgauge.simulations.experiments.sweep_rows import SweepRow, failed_rows, is_done, rows_of, summary, write_tables
from fedgauge.simulations.run import in_memory
from fedgauge.simulations.run.create import create_run
from fedgauge.simulations.run.environment import one_thread
from fedgauge.simulations.run.exit_status import FAILED, INAPPLICABLE, INCOMPLETE, INTERRUPTED, exit_status


def try_cells(cells: Sequence[SweepCell], console: Console) -> None:
    """Try each scenario once, whatever its seed, before anything is trained; SpecError names the defense."""
    distinct = {cell.defense: cell for cell in cells}
    with console.status("trying each defense once before training"):
        for name, cell in distinct.items():
            scenario = Scenario.from_tables(cell.tables)
            scenario.audit.devices_here()
            try_first(scenario, console, f"[[defense]] {name}", PATIENCE / len(distinct))


def run_sweep(sweep: Sweep, file: ResultsFile[SweepRow], jobs: int) -> Iterator[list[SweepRow]]:
    """Yield the rows of all finished cells, in the order of the sweep: those that were there, then again after every cell.

    sweep.json, sweep.csv and sweep.md are rewritten each time.
    """
    folder, cells = file.path.parent, {cell.folder: cell for cell in sweep.cells}
    # of a ledger, not of the file: a cell's attacks may have been audited again
    kept = {name: rows_of(cell, folder) for name, cell in cells.items() if is_done(folder / name)}
    works = {name: partial(_train_and_attack, cell, folder) for name, cell in cells.items() if name not in kept}
    for name, found in chain([("", [])], run_cells(works, jobs)):
        if name:
            kept[name] = failed_rows(cells[name], found) if isinstance(found, Exception) else found
        rows = [row for known in cells for row in kept.get(known, ())]
        file.write(rows)
        write_tables(folder, rows, sweep)
        yield rows


def results_of(sweep: Sweep, folder: Path) -> ResultsFile[SweepRow]:
    """The results in a sweep's folder.

    Raises:
        SpecError: it holds anything else.
    """
    folder = Run(folder).folder  # what a link means that the user named
    computed = {cell.folder: digest_of(cell.tables) for cell in sweep.cells}
    file = ResultsFile(folder / "sweep.json", SweepRow, {"name": sweep.name, "version": 1, "computed": computed})
    if folder.exists() and not file.path.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(f"{folder} is not empty and holds no sweep; name another folder with --output")
    return file


def _train_and_attack(cell: SweepCell, folder: Path, place: int) -> Iterator[list[SweepRow]]:
    """Train one cell in memory unless that is done, and run the remaining attack jobs.

    Args:
        place: among the cells at work; they share the devices out between them.
    """
    run = _prepare_run(cell, folder)
    yield []
    with one_thread():
        with run.ledger() as ledger:
            if ledger.meta().get("state") != "trained":
                with run.lock("training"):
                    ledger.set_meta(state="training")
                    in_memory.train(run)
                    ledger.set_meta(state="trained")
        scenario = run.scenario()
        devices = scenario.audit.devices_here()
        serve(run, LocalExecutor(devices[place % len(devices)], scenario.audit.precision), scenario)
    with run.ledger() as ledger:
        ledger.set_meta(cell="ended")  # even after failures: the ledger has the rows and their reasons
    yield rows_of(cell, folder)


def _prepare_run(cell: SweepCell, folder: Path) -> Run:
    path = folder / cell.folder
    if run_files.look(path / "ledger.sqlite") is not None:
        with Run(path).ledger() as ledger:
            if ledger.meta().get("state") == "trained":
                return Run(path)
    if path.exists():
        run_files.delete_folder(path)
    return create_run(Scenario.from_tables(cell.tables), path)


def sweep_of_file(path: Path, folder: Path, jobs: int) -> int:
    """The command `fedgauge sweep`: run the unfinished cells, print the matrix and missing results, write the comparison."""
    from fedgauge.simulations.reports.report import write_comparison

    sweep, console = Sweep.load(path), Console(stderr=True, markup=False, highlight=False)
    file, rows, interrupted = results_of(sweep, folder), list[SweepRow](), False
    done: set[str] | None = None
    try_cells([cell for cell in sweep.cells if not (folder / cell.folder).exists()], console)
    try:
        for rows in run_sweep(sweep, file, jobs):
            for row in (row for row in rows if done is not None and row.run not in done):
                reached = row.reason if row.mean is None else f"{row.metric} {number(row.mean, None)}"
                console.print(f"{row.defense}, {row.attack}, seed {row.seed}: {reached}", soft_wrap=True)
            done = {row.run for row in rows}
            console.print(f"{len(done)} of {len(sweep.cells)} cells are done")
    except KeyboardInterrupt:
        interrupted = True
    if rows:
        print_table(summary(rows, sweep.defenses))
    for row in (row for row in rows if row.mean is None or row.reason):
        print(f"{row.defense}, {row.attack}, seed {row.seed}: {row.reason or 'nothing was graded'}")
    ended = [Run(folder / cell.folder) for cell in sweep.cells if is_done(folder / cell.folder)]
    if ended:
        print(write_comparison(ended, folder / "comparison.html"))
    print(folder / "sweep.csv")
    if interrupted:
        console.print("stopped; continue with the same command")
        return INTERRUPTED
    return FAILED if len(ended) < len(sweep.cells) else _status(ended)


def _status(ended: list[Run]) -> int:
    """The worst status of the cells; what failed is named with the command that tries it again."""
    statuses = {run: exit_status(run) for run in ended}
    for run in (run for run, status in statuses.items() if status == FAILED):
        with run.ledger() as ledger:
            if text := failure(ledger):  # the rows say why others have no number
                again = f"fedgauge audit {run.folder} --retry failed, then this sweep again"
                print(f"fedgauge: {run.name}: {text}; when the cause is mended: {again}", file=sys.stderr)
    if all(status == INAPPLICABLE for status in statuses.values()):
        print("fedgauge: no attack applies under any defense, so nothing is known of what leaks", file=sys.stderr)
        return INAPPLICABLE
    return next((status for status in (FAILED, INCOMPLETE) if status in statuses.values()), 0)
