"""Reproduce a paper's table: run its attacks and compare our figures with the paper's, with n, interval and budget."""

import sys
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

from fedgauge.server.views.formatting import number
from fedgauge.simulations.experiments.results import ResultsFile, print_table
from fedgauge.simulations.experiments.runner import run_cells
from fedgauge.simulations.reproduction.figures import figures_table, head_of
from fedgauge.simulations.reproduction.measures import AttackOutcome, ComparedFigure
from fedgauge.simulations.reproduction.paper_tables import PaperTable, Setting
from fedgauge.simulations.reproduction.run_attack import compared_figures, run_attack
from fedgauge.simulations.reproduction.setups import build_setup


def reproduce_table(paper_table: PaperTable, output: Path | None, jobs: int) -> None:
    """Print the figures of a table, and keep them in a file, which is continued; the command `fedgauge reproduce`."""
    file = None if output is None else ResultsFile(output, ComparedFigure, head_of(paper_table))
    rows, console = [] if file is None else list(file.rows), Console(stderr=True, markup=False, highlight=False)
    if rows:
        console.print(f"{output} holds {len(rows)} of the figures; the others follow", soft_wrap=True)

    total = sum(len(cell.attacks) for cell in paper_table.cells)
    with console.status(f"{paper_table.name}: {total} attacks"):
        for found in reproduce(paper_table, {(row.cell, row.attack) for row in rows}, jobs):
            rows += found
            if file is not None:  # after every attack: an interruption loses only running ones
                file.write(rows)
            done = len({(row.cell, row.attack) for row in rows})
            figures = ", ".join(f"{row.metric} {number(row.here, None)}" for row in found)
            console.print(f"{done} of {total}: {found[0].cell}, {found[0].attack}: {figures}", soft_wrap=True)
    order = [cell.name for cell in paper_table.cells]
    print_table(figures_table(sorted(rows, key=lambda row: order.index(row.cell)), paper_table.title))
    if paper_table.note:
        print(paper_table.note)
    if output is not None:
        print(f"kept in {output}", file=sys.stderr)


def reproduce(
    paper_table: PaperTable, done: Collection[tuple[str, str]] = (), jobs: int = 1
) -> Iterator[list[ComparedFigure]]:
    """Yield the figures of each attack when it is done.

    Args:
        done: attacks that need not be run again, as names of cell and attack.
        jobs: cells at a time.

    Raises:
        Exception: what a cell raised, when its turn comes.
    """
    works = {
        cell.name: partial(_attack_cell, cell, paper_table.seed, left)
        for cell in paper_table.cells
        if (left := [spec.name for spec in cell.attacks if (cell.name, spec.name) not in done])
    }
    for _, found in run_cells(works, jobs):
        if isinstance(found, Exception):
            raise found
        yield found


def _attack_cell(cell: Setting, seed: int, left: Collection[str], place: int) -> Iterator[list[ComparedFigure]]:
    setup = build_setup(cell, seed)
    yield []
    outcomes: dict[str, AttackOutcome] = {}
    for spec in (spec for spec in cell.attacks if spec.name in left):
        for needed in cell.attacks:  # what it is compared with was perhaps done in an earlier call
            if needed.name in {spec.name, *cell.needed_by(spec)} and needed.name not in outcomes:
                outcomes[needed.name] = run_attack(needed, setup, cell.wave)
        yield compared_figures(cell, spec, outcomes[spec.name], outcomes, setup.note)
