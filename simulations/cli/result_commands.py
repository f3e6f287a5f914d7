"""`fedgauge watch`, `report`, `gate`, `verify`, `export` and `client-report`: show what runs have found."""

import argparse
import sys
import webbrowser
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run_files import printable
from fedgauge.simulations.cli.finding_runs import find_run, find_runs
from fedgauge.simulations.cli.gate_options import chosen_thresholds, conclude_gate
from fedgauge.simulations.cli.options import NO_RUNS, Commands, add_gate, port
from fedgauge.simulations.cli.run_summary import wide_console
from fedgauge.simulations.run.exit_status import FAILED, INAPPLICABLE, MISTAKE


def add_to(commands: Commands) -> None:
    """Register these commands."""
    page = commands.add(watch, with_run=False)
    page.add_argument("path", type=Path, nargs="?", metavar="RUN|FOLDER", help="default: all of --runs")
    page.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    page.add_argument("--port", type=port, metavar="N", help="default: 8765, or a free one if that is taken")
    page.add_argument("--token", default="", help="required of every visitor (default: a fresh one)")
    page.add_argument("--token-file", type=Path, metavar="FILE", help="a file that holds the token")
    page.add_argument("--open", action="store_true", help="open the browser")
    written = commands.add(report, with_run=False)
    written.add_argument("run", type=Path, nargs="+", metavar="RUN", help="a run's folder, or its name under runs/")
    written.add_argument("--figures", type=Path, metavar="FOLDER", help="each plot as PNG and SVG, one column wide")
    written.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="where the comparison of several runs goes (default: comparison.html beside the first)",
    )
    written.add_argument("--pdf", action="store_true", help="report.pdf beside report.html, by an installed Chromium")
    add_gate(commands.add(gate))
    commands.add(verify).add_argument(
        "--last", default="", metavar="DIGEST", help="of the last entry, as kept elsewhere"
    )
    table = commands.add(export)
    table.add_argument("--to", choices=("csv", "parquet"), default="csv")
    table.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="PATH",
        help="default: standard output (csv), or scores.parquet in the run",
    )
    commands.add(client_report, with_run=False).add_argument(
        "file", type=Path, metavar="CLIENT.toml", help="the owner's file"
    )


def watch(options: argparse.Namespace) -> int:
    """fedgauge watch [RUN|FOLDER]: show runs in the browser, while they work and afterwards; Ctrl-C ends it."""
    from fedgauge.server.dashboard.web import serve  # a web framework, which only this command needs

    below = options.runs / options.path if options.path is not None else options.runs
    path = options.path if options.path is not None and options.path.exists() else below
    if not path.is_dir():
        raise LedgerError(f"{path} is not a folder: name a run, or the folder in which runs are kept")

    def announce(address: str) -> None:
        print(address, flush=True)
        print("showing the runs until Ctrl-C", file=sys.stderr)
        if not (path / "ledger.sqlite").exists() and not any(path.glob("*/ledger.sqlite")):
            print(f"{path} has no runs yet; {NO_RUNS}", file=sys.stderr)
        if options.open:  # by a file, as every user of this machine can read the browser's command line
            opened = Path(private) / "open.html"
            opened.write_text(leading_to(address))
            webbrowser.open(opened.as_uri())

    token = options.token if options.token_file is None else options.token_file.read_text().strip()
    with TemporaryDirectory(prefix="fedgauge-") as private:
        serve(path, options.host, options.port, token, announce)
    return 0


def leading_to(address: str) -> str:
    """A page that leads the browser to an address."""
    return f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={escape(address)}">'


def report(options: argparse.Namespace) -> int:
    """fedgauge report RUN ...: write the HTML report of each run, and compare several; figures and a PDF if asked for."""
    from fedgauge.simulations.reports.pdf import find_browser, write_pdf
    from fedgauge.simulations.reports.report import write_comparison, write_report

    if options.pdf:
        find_browser()  # before the work, which may be long
    chosen = [run for named in options.run for run in find_runs(named, options.runs)]
    if options.output is not None and len(chosen) == 1:
        raise SpecError("--output is for the comparison of several runs; a run's own report is written into its folder")
    shown = []
    for run in chosen:
        try:
            run.check()
            print(write_report(run))
            if options.pdf:
                print(write_pdf(run))
            shown.append(run)
        except LedgerError as error:
            if len(chosen) == 1:
                raise
            print(printable(f"fedgauge: {error}"), file=sys.stderr)  # and the others are shown
    if len(shown) > 1:
        beside = shown[0].folder.absolute().parent / "comparison.html"
        print(write_comparison(shown, options.output or beside))
    if options.figures is not None:
        from fedgauge.simulations.reports.figures.write import write_figures

        paths, missing = write_figures(shown, options.figures)
        print(*paths, sep="\n", end="\n" if paths else "")
        for reason in missing:
            print(f"fedgauge: {reason}", file=sys.stderr)
    return 0 if len(shown) == len(chosen) else MISTAKE


def gate(options: argparse.Namespace) -> int:
    """fedgauge gate RUN: compare what a run's attacks reached with thresholds; the exit status says whether they hold."""
    from fedgauge.server.views.assurance.gate import gate_of_run
    from fedgauge.server.views.reading import read_once

    thresholds = chosen_thresholds(options)
    if not thresholds:
        raise SpecError("a gate needs a threshold: --fail-above psnr=20")
    run = find_run(options.run, options.runs)
    with read_once(run) as reading:
        results = gate_of_run(reading, thresholds)
    return conclude_gate(options, results, run.folder)


def verify(options: argparse.Namespace) -> int:
    """fedgauge verify RUN: check a run's audit record: its chain of digests, and what the run's folder holds."""
    from fedgauge.simulations.reports.audit_record import NAME, disagreements, read_record, words_unchecked

    run = find_run(options.run, options.runs)
    found = disagreements(run, options.last.strip().lower())
    entries = read_record(run.folder / NAME)
    for why in found:
        print(printable(f"fedgauge: {run.folder / NAME}: {why}"), file=sys.stderr)
    if found:
        return FAILED
    print(f"{len(entries)} entries hold; the last digest is {entries[-1].digest}")
    if options.last or not (why := words_unchecked(entries)):
        return 0
    print(
        printable(f"fedgauge: its verdict was not compared: {why}; give the digest that was kept: --last DIGEST"),
        file=sys.stderr,
    )
    return INAPPLICABLE


def export(options: argparse.Namespace) -> int:
    """fedgauge export RUN: every score as CSV or parquet."""
    from fedgauge.simulations.reports.export import save_csv, write_csv, write_parquet

    run = find_run(options.run, options.runs)
    if options.to == "parquet":
        print(write_parquet(run, options.output))
    elif options.output:
        save_csv(run, options.output)
        print(options.output)
    else:
        write_csv(run, sys.stdout)
    return 0


def client_report(options: argparse.Namespace) -> int:
    """fedgauge client-report CLIENT.toml: what a client of a deployment sent, answered and leaked, from its own log."""
    from fedgauge.simulations.reports.client_report import read, show

    show(read(options.file), wide_console())
    return 0
