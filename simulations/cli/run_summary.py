"""The end of `fedgauge run` and `fedgauge audit`: print scores, the verdict, notices and the report."""

import sys
from itertools import islice

from rich.console import Console

from fedgauge.client.deployment.self_grading import NOT_ALLOWED
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.run_files import printable
from fedgauge.server.views.leak_tables import rounds_table
from fedgauge.server.views.notices import audit_command, notices
from fedgauge.server.views.outcomes import MOST_REASONS
from fedgauge.server.views.participation import guarded, participation
from fedgauge.server.views.privacy import canaries
from fedgauge.server.views.snapshot import RunSnapshot, read_once
from fedgauge.server.views.verdict import ungraded_reason, verdict_of
from fedgauge.simulations.cli.options import tell
from fedgauge.simulations.reports.terminal import rich_table

# columns of the results
SHOWN = ("round", "accuracy", "attack", "mean", "worst", "baseline", "labels", "lost", "ungraded")


def print_summary(run: Run, quiet: bool) -> None:
    """Print a run's results on standard output; its folder comes last."""
    from fedgauge.simulations.reports.report import write_report

    report = write_report(run)  # first: the reader of our output may go
    with read_once(run) as reading:
        noted = [" ".join(filter(None, notice)) for notice in notices(reading)]
        if quiet:
            for text in filter(None, (_clients(reading.ledger), *noted)):
                tell(text)
        else:
            _print_results(reading, noted)
    print(f"report: {report}")
    print(run.folder)


def wide_console() -> Console:
    """A terminal's width, at least 80; in files and pipes 160 columns, as 80 would cut names off. It takes no text for markup."""
    return Console(markup=False, width=max(80, Console().width) if sys.stdout.isatty() else 160)


def _print_results(reading: RunSnapshot, noted: list[str]) -> None:
    console, command = wide_console(), audit_command(reading)

    def say(text: str, style: str | None = None, wrap: bool = False) -> None:
        words = printable(text.replace("fedgauge audit RUN", command))
        width = Console().width if wrap else None
        console.print(words, style=style, markup=False, highlight=False, soft_wrap=not wrap, width=width)

    ledger, meta = reading.ledger, reading.meta
    table = rounds_table(reading).only(*SHOWN)
    if table.rows:
        console.print(rich_table(table))
    verdict = verdict_of(reading).sentences if ledger.attacks() or not table.rows else ()
    said = "\n".join(verdict)
    if said:
        say(said, "bold", wrap=console.is_terminal)  # a file has whole lines
    if reading.scores.left_ungraded and (reason := ungraded_reason(reading)) not in said:
        say(f"reconstructions without a grade, which the report shows: {reason}")
    reasons: dict[str, list[str]] = {}
    for row in ledger.reasons():
        if row["reason"] not in said:
            reasons.setdefault(row["reason"], []).append(f"{row['attack']} ({row['jobs']} x)")
    for text in (
        canaries(reading),
        meta.get("server_attack") and f"malicious server: {meta['server_attack']}",  # its failure
        _clients(ledger),
        _grading(ledger),
        *islice((f"{', '.join(attacks)}: {reason}" for reason, attacks in reasons.items()), MOST_REASONS),
    ):
        if text:
            say(text)
    for text in noted:
        if text[1:-1] not in said:  # within a sentence there, without capital and full stop
            say(text, "yellow")


def _clients(ledger: Ledger) -> str:
    """Return the reports of clients' guards; for a deployment, the missing clients with their reasons."""
    observations = ledger.observations()
    if not ledger.deployed:
        return guarded(observations)
    return participation(observations)


def _grading(ledger: Ledger) -> str:
    """Return how a deployment's clients graded the attacks, and how owners can allow it."""
    grading = ledger.meta().get("grading")
    if grading is None or "truth" in ledger.meta():
        return grading or ""
    allow = '; an owner may allow it: mode = "scores" under [grading] in client.toml (all: fedgauge deploy init --grading scores)'
    refused = any(row["reason"] == NOT_ALLOWED for row in ledger.graded())
    return f"grading: {grading}{allow if refused else ''}; no client grades labels"
