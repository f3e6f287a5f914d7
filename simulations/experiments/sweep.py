"""Run a sweep: every defense and seed is a run of its own, trained in memory and attacked in its own process.

The runs lie in one folder, so that `fedgauge watch` and `fedgauge report` compare them. An interrupted sweep continues where
it stopped.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedgauge.client.components import SpecError
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.outcomes import failure
from fedgauge.simulations.checks.attack_trial import PATIENCE
from fedgauge.simulations.checks.scenario_check import try_first
from fedgauge.simulations.experiments.sweep_file import Sweep, SweepCell
from fedgauge.simulations.experiments.sweep_rows import SweepRow, is_done, rows, summary, write_rows
from fedgauge.simulations.run.create import create_run
from fedgauge.simulations.run.exit_status import FAILED, INAPPLICABLE, INCOMPLETE, INTERRUPTED, exit_status
from fedgauge.simulations.run.launch import OwnProcess, blame
from fedgauge.simulations.run.simulate import Interrupt

POLL = 0.2  # seconds between checks of the running cells


class _CellProcess(OwnProcess):
    """The process of one cell, with everything it started.

    Args:
        place: among the cells at work.
    """

    def __init__(self, cell: SweepCell, run: Run, place: int) -> None:
        self.cell, self.place = cell, place
        command = ("fedgauge.simulations.experiments.sweep_worker", str(run.folder.absolute()), str(place))
        super().__init__(run, "cell.log", *command, ray=False)


def try_cells(cells: Sequence[SweepCell], console: Console) -> None:
    """Try each scenario once, whatever its seed, before anything is trained; SpecError names the defense."""
    distinct = {cell.defense: cell for cell in cells}
    with console.status("") as status:
        for k, (name, cell) in enumerate(distinct.items(), 1):
            status.update(f"trying each defense once before training: {k} of {len(distinct)}")
            scenario = Scenario.from_tables(cell.tables)
            scenario.audit.devices_here()
            try_first(scenario, console, f"[[defense]] {name}", PATIENCE / len(distinct))


def run_cells(
    sweep: Sweep, folder: Path, parallel: int, interrupt: Interrupt, report: Callable[[str], None]
) -> list[SweepRow]:
    """Run the unfinished cells of a sweep, `parallel` at a time; returns the rows of all finished cells.

    sweep.csv, sweep.json and sweep.md in the folder are rewritten after every cell.

    Raises:
        SpecError: the folder holds another sweep.
        RefusedFile: its sweep.toml, or a cell, is a link.
    """
    folder = Run(folder).folder  # what a link means that the user named
    _refuse_folder(sweep, folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    run_files.write(folder / "sweep.toml", sweep.text.encode())
    waiting = [cell for cell in sweep.cells if not is_done(folder / cell.folder)]
    done = len(sweep.cells) - len(waiting)
    if done:
        report(f"{done} of {len(sweep.cells)} cells were already done")
    elif waiting:
        report(f"{len(waiting)} cells, {min(parallel, len(waiting))} at a time")
    at_work: list[_CellProcess] = []
    failures: dict[str, str] = {}
    started, ended = time.monotonic(), 0
    try:
        while (waiting and not interrupt.asked) or at_work:
            while waiting and len(at_work) < parallel and not interrupt.asked:
                cell = waiting.pop(0)
                place = min(set(range(parallel)) - {work.place for work in at_work})
                at_work.append(_CellProcess(cell, _prepare_run(cell, folder), place))
            for work in [w for w in at_work if w.status() is not None]:
                at_work.remove(work)
                work.close()
                ended += 1
                if status := work.status():
                    cause = f"its process ended with status {status}"
                    failures[work.cell.folder] = blame(work.run, cause, "cell.log")
                left = (time.monotonic() - started) / ended * len(waiting + at_work)
                report(
                    f"{done + ended} of {len(sweep.cells)} cells: {work.cell.folder}, about {left / 60:.0f} min left"
                )
                write_rows(folder, rows(sweep, folder, failures), sweep)
            if interrupt.asked:
                break
            time.sleep(POLL)
    finally:
        for work in at_work:
            work.close()
    result = rows(sweep, folder, failures)
    write_rows(folder, result, sweep)
    return result


def _refuse_folder(sweep: Sweep, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"{folder} is a file, but --output needs a folder for the sweep's runs")
    kept = Run(folder).folder / "sweep.toml"
    if run_files.look(kept) is not None:
        if run_files.read(kept) != sweep.text.encode():
            raise SpecError(
                f"{folder} holds the sweep of another file; name another folder with --output, or remove it"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise SpecError(f"{folder} is not empty and holds no sweep; name another folder with --output")


def _prepare_run(cell: SweepCell, folder: Path) -> Run:
    """The cell's run: the existing one if its training is done, else a new one."""
    path = folder / cell.folder
    if run_files.look(path / "ledger.sqlite") is not None:
        with Run(path).ledger() as ledger:
            if ledger.meta().get("state") == "trained":
                return Run(path)
    if path.exists():
        run_files.delete_folder(path)
    return create_run(Scenario.from_tables(cell.tables), path)


def run_sweep(path: Path, folder: Path, parallel: int) -> int:
    """The command `fedgauge sweep`: run the unfinished cells, print the matrix and missing results, write the comparison."""
    from fedgauge.simulations.reports.report import write_comparison

    sweep, console = Sweep.load(path), Console(stderr=True, markup=False)
    _refuse_folder(sweep, folder)  # before seconds are spent
    try_cells([cell for cell in sweep.cells if not (folder / cell.folder).exists()], console)
    with Interrupt().caught() as interrupt:
        result = run_cells(sweep, folder, parallel, interrupt, lambda text: console.print(text, highlight=False))
    if result:
        heads, *lines = summary(result, {cell.defense: cell.promise for cell in sweep.cells})
        table = Table(*heads, box=None)
        for line in lines:
            table.add_row(*line)
        Console(markup=False, width=None if sys.stdout.isatty() else 180).print(table)
    for row in (row for row in result if row.mean is None):
        print(f"{row.defense}, {row.attack}, seed {row.seed}: {row.reason or 'nothing was graded'}")
    ended = [Run(folder / cell.folder) for cell in sweep.cells if is_done(folder / cell.folder)]
    if ended:
        print(write_comparison(ended, folder / "comparison.html"))
    print(folder / "sweep.csv")
    if interrupt.asked:
        console.print(f"stopped; continue with the same command ({len(ended)} of {len(sweep.cells)} cells are done)")
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
