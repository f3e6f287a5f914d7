"""`fedgauge watch`, `report`, `gate` and `export`: show what runs have found."""

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.views.gate import Threshold
from fedgauge.simulations.cli.finding_runs import find_run, find_runs
from fedgauge.simulations.cli.options import NO_RUNS, Commands, add_gate, flag, path, port, refuse, tell
from fedgauge.simulations.reports.gate_output import gate_lines, gate_status, write_junit
from fedgauge.simulations.run.exit_status import MISTAKE


def add_to(commands: Commands) -> None:
    page = commands.add(watch, with_run=False)
    path(page, "path", "RUN|FOLDER", "default: all of --runs", nargs="?")
    page.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    page.add_argument("--port", type=port, metavar="N", help="default: 8765, or a free one if that is taken")
    page.add_argument("--token", default="", help="token that every visitor must give (default: a new random one)")
    path(page, "--token-file", "FILE", "a file that holds the token")
    flag(page, "--open", "open the browser")
    written = commands.add(report, with_run=False)
    path(written, "run", "RUN", "a run's folder, or its name under runs/", nargs="+")
    path(written, "--figures", "FOLDER", "each plot as PNG and SVG, one column wide")
    text = "where the comparison of several runs goes (default: comparison.html next to the first)"
    path(written, "--output -o", "FILE", text)
    add_gate(commands.add(gate))
    table = commands.add(export)
    path(table, "--output -o", "PATH", "default: standard output")


def watch(options: argparse.Namespace) -> int:
    from fedgauge.server.dashboard.web import serve  # a web framework, which only this command needs

    below = options.runs / options.path if options.path is not None else options.runs
    shown = options.path if options.path is not None and options.path.exists() else below
    refuse({f"{shown} is not a folder: name a run, or the folder in which runs are kept": not shown.is_dir()})

    def announce(address: str) -> None:
        # a container's log must not hold the token
        hidden = f"{address.partition('=')[0]}=TOKEN of {options.token_file}"
        print(address if options.token_file is None else hidden, flush=True)
        print("showing the runs until Ctrl-C", file=sys.stderr)
        if not (shown / "ledger.sqlite").exists() and not any(shown.glob("*/ledger.sqlite")):
            print(f"{shown} has no runs yet; {NO_RUNS}", file=sys.stderr)
        if options.open:  # by a file, as every user of this machine can read the browser's command line
            opened = Path(private) / "open.html"
            opened.write_text(leading_to(address))
            webbrowser.open(opened.as_uri())

    token = options.token if options.token_file is None else options.token_file.read_text().strip()
    with TemporaryDirectory(prefix="fedgauge-") as private:
        serve(shown, options.host, options.port, token, announce)
    return 0


def leading_to(address: str) -> str:
    return f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={escape(address)}">'


def report(options: argparse.Namespace) -> int:
    from fedgauge.simulations.reports.report import write_comparison, write_report

    chosen = [run for named in options.run for run in find_runs(named, options.runs)]
    refuse({"--output needs several runs; a single run's report is in its folder": options.output and len(chosen) == 1})
    shown = []
    for run in chosen:
        try:
            print(write_report(run))
            shown.append(run)
        except LedgerError as error:
            tell(error)  # and the others are shown
    if len(shown) > 1:
        beside = shown[0].folder.absolute().parent / "comparison.html"
        print(write_comparison(shown, options.output or beside))
    if options.figures is not None:
        from fedgauge.simulations.reports.figures import write_figures

        paths, missing = write_figures(shown, options.figures)
        print(*paths, sep="\n", end="\n" if paths else "")
        for reason in missing:
            tell(reason)
    return 0 if len(shown) == len(chosen) else MISTAKE


def gate(options: argparse.Namespace) -> int:
    thresholds = chosen_thresholds(options)
    refuse({"a gate needs a threshold: --fail-above psnr=20": not thresholds})
    return conclude_gate(options, find_run(options.run, options.runs), thresholds)


def chosen_thresholds(options: argparse.Namespace) -> list[Threshold]:
    """The thresholds of --fail-above and --fail-below; SpecError if a file is named and no threshold."""
    found = [Threshold(name, bound) for name, bound in options.fail_above]
    found += [Threshold(name, bound, above=False) for name, bound in options.fail_below]
    refuse({"--junit needs a threshold: --fail-above psnr=20": options.junit and not found})
    return found


def conclude_gate(options: argparse.Namespace, run: Run, thresholds: Sequence[Threshold]) -> int:
    """Write the file that was asked for, print a line for each threshold, and return the exit status."""
    from fedgauge.server.views.gate import gate_of_run
    from fedgauge.server.views.snapshot import read_once

    with read_once(run) as reading:
        results = gate_of_run(reading, thresholds)
    if options.junit:
        write_junit(results, run.folder.name, options.junit)
    print(*gate_lines(results), sep="\n")
    return gate_status(results)


def export(options: argparse.Namespace) -> int:
    from fedgauge.simulations.reports.export import save_csv, write_csv

    run = find_run(options.run, options.runs)
    if options.output:
        save_csv(run, options.output)
        print(options.output)
    else:
        write_csv(run, sys.stdout)
    return 0
