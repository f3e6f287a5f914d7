"""`fedgauge sweep`, `reproduce` and `compare`: many runs, and a paper's tables."""

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from fedgauge.client.components import SpecError
from fedgauge.simulations.cli.options import Commands, flag, path, several, whole
from fedgauge.simulations.cli.run_summary import wide_console

SUITE = "suite"


def add_to(commands: Commands) -> None:
    """Register these commands."""
    grid = commands.add(sweep, with_run=False)
    path(grid, "sweep", "SWEEP.toml")
    path(grid, "--output -o", "FOLDER", "default: the file's name under runs/")
    whole(grid, "--parallel", "cells at a time, one core each (default: 2)", default=2)
    table = commands.add(reproduce, with_run=False)
    table.add_argument("name", metavar="NAME", help="a published table: a file's name in simulations/papers; or suite")
    table.add_argument("--level", choices=("small", "full"), help="of the suite (default: small)")
    text = "attack every chosen cell with this, too, on the cell's terms (repeatable)"
    several(table, "--attack", "'NAME KEY=VALUE ...'", text)
    text = "add a cell with this defense beside each chosen cell that has none (repeatable)"
    several(table, "--defense", "'NAME KEY=VALUE ...'", text)
    whole(table, "--n", "updates attacked in each setting, instead of the table's")
    whole(table, "--budget", "iterations of every attack, instead of the table's")
    for option, of in (("--cells", "settings"), ("--attacks", "attacks")):
        table.add_argument(option, metavar="PATTERN", help=f"only these {of}: part of their name, or with * and ?")
    flag(table, "--json", "one object per line instead of a table")
    path(table, "--output -o", "FILE", "keep the figures too, and continue what it holds")
    text = "what fedgauge reproduce --output wrote; or suite_small: the figures that fedgauge keeps of it"
    path(commands.add(compare, with_run=False), "files", "FILE", text, nargs="+")


def sweep(options: argparse.Namespace) -> int:
    """fedgauge sweep SWEEP.toml: train and attack a grid of defenses, attacks and seeds in memory; continues where it stopped."""
    from fedgauge.simulations.experiments.sweep import run_sweep

    if options.parallel < 1:
        raise SpecError(f"--parallel must be at least 1, got {options.parallel}")
    return run_sweep(options.sweep, options.output or options.runs / options.sweep.stem, options.parallel)


def reproduce(options: argparse.Namespace) -> int:
    """fedgauge reproduce NAME: attack what a paper attacked, and print its figures beside ours."""
    from fedgauge.simulations.experiments import reproduce as reproduction
    from fedgauge.simulations.experiments.measures import ComparedFigure
    from fedgauge.simulations.experiments.paper_table_files import load, restrict
    from fedgauge.simulations.experiments.reproduce_output import FiguresFile, ProgressReporter, show
    from fedgauge.simulations.experiments.suite.submissions import called, with_submissions

    if options.level is not None and options.name != SUITE:
        raise SpecError(f"--level is the suite's: leave it out, or write: fedgauge reproduce {SUITE} --level small")
    name = f"{SUITE}_{options.level or 'small'}" if options.name == SUITE else options.name
    chosen = restrict(load(name), options.n, options.budget, options.cells)
    paper_table = with_submissions(chosen, options.attack, options.defense)
    if options.attacks is not None:
        always = tuple(map(called, options.attack))
        paper_table = restrict(paper_table, None, None, "*", options.attacks, always)
    kept = None if options.output is None else FiguresFile(options.output, paper_table)
    rows = [] if kept is None else list(kept.rows)
    started = time.monotonic()
    if rows:
        print(f"{options.output} holds {len(rows)} of the figures; the others follow", file=sys.stderr)

    def say(found: Sequence[ComparedFigure]) -> None:
        for row in found if options.json else ():
            print(row.to_json(), flush=True)

    say(rows)
    with ProgressReporter(paper_table.name, Console(stderr=True)) as reporter:
        for found in reproduction.reproduce(paper_table, reporter, () if kept is None else kept.done):
            rows += found
            if kept is not None:  # after every attack: an interruption loses no more than one
                kept.add(found, time.monotonic() - started)
            say(found)
    if not options.json:
        show(paper_table, rows, wide_console())
    if kept is not None:
        print(f"kept in {options.output}", file=sys.stderr)
    return 0


def compare(options: argparse.Namespace) -> int:
    """fedgauge compare FILE ...: figures that several people computed of the same cells and attacks, side by side."""
    from fedgauge.simulations.experiments.suite.compare_figures import compared, comparison, read_figures

    if len(set(map(str, options.files))) < len(options.files):
        raise SpecError("fedgauge compare takes each file once")
    files = {str(file): read_figures(file) for file in options.files}
    wide_console().print(comparison(compared(files), files))
    return 0
