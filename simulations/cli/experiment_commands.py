"""`fedgauge sweep`, `reproduce` and `compare`: many runs, and a paper's tables."""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from fedgauge.client.components import SpecError
from fedgauge.simulations.cli.options import Commands
from fedgauge.simulations.cli.run_summary import wide_console

SUITE = "suite"


def add_to(commands: Commands) -> None:
    """Register these commands."""
    grid = commands.add(sweep, with_run=False)
    grid.add_argument("sweep", type=Path, metavar="SWEEP.toml")
    grid.add_argument("--output", "-o", type=Path, metavar="FOLDER", help="default: the file's name under runs/")
    grid.add_argument(
        "--parallel", type=int, default=2, metavar="N", help="cells at a time, one core each (default: 2)"
    )
    table = commands.add(reproduce, with_run=False)
    table.add_argument("name", metavar="NAME", help="a published table: a file's name in simulations/papers; or suite")
    table.add_argument("--level", choices=("small", "full"), help="of the suite (default: small)")
    text = "attack every chosen cell with this, too, on the cell's terms (repeatable)"
    table.add_argument("--attack", action="append", default=[], metavar="'NAME KEY=VALUE ...'", help=text)
    text = "add a cell with this defense beside each chosen cell that has none (repeatable)"
    table.add_argument("--defense", action="append", default=[], metavar="'NAME KEY=VALUE ...'", help=text)
    table.add_argument("--n", type=int, metavar="N", help="updates attacked in each setting, instead of the table's")
    table.add_argument("--budget", type=int, metavar="N", help="iterations of every attack, instead of the table's")
    table.add_argument("--cells", metavar="PATTERN", help="only these settings: part of their name, or with * and ?")
    table.add_argument("--attacks", metavar="PATTERN", help="only these attacks: part of their name, or with * and ?")
    table.add_argument("--json", action="store_true", help="one object per line instead of a table")
    table.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="keep the figures too, and continue what it holds"
    )
    several = commands.add(compare, with_run=False)
    text = "what fedgauge reproduce --output wrote; or suite_small: the figures that fedgauge keeps of it"
    several.add_argument("files", type=Path, nargs="+", metavar="FILE", help=text)


def sweep(options: argparse.Namespace) -> int:
    """fedgauge sweep SWEEP.toml: train and attack a grid of defenses, attacks and seeds in memory; continues where it stopped."""
    from fedgauge.simulations.experiments.sweep import run_sweep

    if options.parallel < 1:
        raise SpecError(f"--parallel must be at least 1, got {options.parallel}")
    return run_sweep(options.sweep, options.output or options.runs / options.sweep.stem, options.parallel)


def reproduce(options: argparse.Namespace) -> int:
    """fedgauge reproduce NAME: attack what a paper attacked, and print its figures beside ours."""
    from fedgauge.simulations.experiments import reproduce as reproduction
    from fedgauge.simulations.experiments.paper_table_files import load, restrict
    from fedgauge.simulations.experiments.reproduce_output import FiguresFile, ProgressReporter, show
    from fedgauge.simulations.experiments.suite.submissions import called, with_submissions

    chosen = restrict(load(_table_name(options)), options.n, options.budget, options.cells)
    paper_table = with_submissions(chosen, options.attack, options.defense)
    if options.attacks is not None:
        always = map(called, options.attack)
        paper_table = restrict(paper_table, None, None, "*", options.attacks, tuple(always))
    kept = None if options.output is None else FiguresFile(options.output, paper_table)
    rows = [] if kept is None else list(kept.rows)
    started = time.monotonic()
    if rows:
        print(f"{options.output} holds {len(rows)} of the figures; the others follow", file=sys.stderr)
    if options.json:
        print(*(row.to_json() for row in rows), sep="\n", end="\n" if rows else "", flush=True)
    with ProgressReporter(paper_table.name, Console(stderr=True)) as reporter:
        for found in reproduction.reproduce(paper_table, reporter, () if kept is None else kept.done):
            rows += found
            if kept is not None:  # after every attack: an interruption loses no more than one
                kept.add(found, time.monotonic() - started)
            if options.json:
                print(*(row.to_json() for row in found), sep="\n", flush=True)
    if not options.json:
        show(paper_table, rows, wide_console())
    if kept is not None:
        print(f"kept in {options.output}", file=sys.stderr)
    return 0


def _table_name(options: argparse.Namespace) -> str:
    name: str = options.name
    if name == SUITE:
        return f"{SUITE}_{options.level or 'small'}"
    if options.level is not None:
        raise SpecError(
            f"--level is the suite's: leave it out, or write: fedgauge reproduce {SUITE} --level {options.level}"
        )
    return name


def compare(options: argparse.Namespace) -> int:
    """fedgauge compare FILE ...: figures that several people computed of the same cells and attacks, side by side."""
    from fedgauge.simulations.experiments.suite.compare_figures import compared, comparison, read_figures

    if len({str(path) for path in options.files}) < len(options.files):
        raise SpecError("fedgauge compare takes each file once")
    files = {str(path): read_figures(path) for path in options.files}
    table = comparison(compared(files), files)
    wide_console().print(table)
    return 0
