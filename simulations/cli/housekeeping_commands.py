"""`fedgauge runs`, `stop` and `prune`: list runs, end one, delete what is old."""

import argparse
import os
import signal
import time
from contextlib import suppress

from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import RunBusy
from fedgauge.server.store.run_files import printable
from fedgauge.server.views.formatting import in_unit
from fedgauge.server.views.notices import notices
from fedgauge.server.views.snapshot import RunLine, read_once, tables_of
from fedgauge.server.views.tables import Table
from fedgauge.simulations.cli.finding_runs import all_runs, find_run, find_runs
from fedgauge.simulations.cli.options import NO_RUNS, Commands, between, days, path, tell
from fedgauge.simulations.cli.run_summary import wide_console
from fedgauge.simulations.reports.terminal import rich_table
from fedgauge.simulations.run.exit_status import FAILED, MISTAKE


def add_to(commands: Commands) -> None:
    commands.add(runs, with_run=False)
    text = "for attacks in flight (default: 120)"
    commands.add(stop).add_argument("--patience", type=between(float, 0), default=120.0, metavar="SECONDS", help=text)
    old = commands.add(prune, with_run=False)
    path(old, "run", "RUN", "default: all of --runs", nargs="*")
    old.add_argument("--days", type=days, metavar="N", help="age (default: the scenario's [tape] retention_days)")


def runs(options: argparse.Namespace) -> int:
    rows = []
    for run in all_runs(options.runs):
        try:
            line = RunLine(run)
        except (LedgerError, OSError) as error:
            rows.append([run.folder.name, "unreadable", *[""] * 5])
            tell(error)
            continue
        done = f"{line.done}/{line.total}" + (" so far" if line.state == "training" else "")
        done += f", {line.failed} failed" if line.failed else ""
        reached = "" if line.best is None else f"{line.measure.name} {in_unit(line.best, line.measure)}"
        shown = [line.state, f"{line.round}/{line.rounds}", line.chain, ", ".join(line.attacks), done, reached]
        rows.append([run.folder.name, *shown])
    if rows:
        heads = ("run", "state", "rounds", "chain", "attacks", "jobs done", "best")
        wide_console().print(rich_table(Table.texts("", heads, rows)))
    else:
        tell(f"no runs in {options.runs}; {NO_RUNS}")
    return 0


def stop(options: argparse.Namespace) -> int:
    run = find_run(options.run, options.runs)
    holders = {purpose: pid for purpose in ("training", "audit") if (pid := run.holder(purpose)) is not None}
    if not holders:
        print(printable(f"{run.name}: nothing is at work"))
        return 0
    with suppress(ProcessLookupError):
        os.kill(next(iter(holders.values())), signal.SIGTERM)  # a driver that still trains parks the audit itself
    deadline = time.monotonic() + options.patience
    while any(run.at_work(purpose) for purpose in ("training", "audit")):
        if time.monotonic() > deadline:
            tell(f"{run.name} is still finishing its attacks in flight")
            return FAILED
        time.sleep(0.2)
    with read_once(run) as reading:
        left = [f"{notice.words} {notice.command}" for notice in notices(reading) if notice.command]
    print(printable(" ".join([f"{run.name}: stopped.", *left])))
    return 0


def prune(options: argparse.Namespace) -> int:
    from fedgauge.simulations.run.retention import prune as delete

    status, named = 0, [run for name in options.run for run in find_runs(name, options.runs)]
    for run in named if options.run else reversed(all_runs(options.runs)):
        try:
            age = options.days if options.days is not None else tables_of(run).get("tape", {}).get("retention_days")
            if age is None:
                words = "kept; set --days, or [tape] retention_days in its scenario, to delete it"
            else:
                deleted = delete(run, age, time.time())
                words = f"{deleted} files deleted" if deleted else f"kept; it is younger than {age} days"
        except RunBusy as error:
            words = f"kept because it is at work: {error}"
        except (LedgerError, OSError) as error:  # the others' retention does not wait for this one
            tell(error)
            words, status = "kept because it cannot be read", MISTAKE
        print(printable(f"{run.name}: {words}"))
    return status
