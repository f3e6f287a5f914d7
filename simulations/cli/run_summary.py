"""What `fedgauge run` and `fedgauge audit` print at their end: scores, failures, the report, and what to do next."""

import sys

from rich.console import Console
from rich.table import Table

from fedgauge.client.deployment.self_grading import NOT_ALLOWED
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.views.leakage import RoundLeak, round_table
from fedgauge.server.views.reading import state_of, tables_of
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.server_attacks import server_attack_effects
from fedgauge.simulations.live import json_log
from fedgauge.simulations.live.participation import guarded, participation
from fedgauge.simulations.live.view import Log

MOST_REASONS = 10  # reasons printed at the end of a run: some contain a number, and so differ from job to job


def print_summary(run: Run, log: Log) -> None:
    """Print a run's results on standard output; its folder comes last."""
    from fedgauge.simulations.reports.report import write_report

    if log == "json":
        report = write_report(run)
        with run.ledger() as ledger:
            state = state_of(run, ledger)
        json_log.finish(run, state, report)
        return
    if log == "quiet":
        _print_errors(run)
    else:
        _print_results(run)
    print(f"report: {write_report(run)}")
    print(run.folder)


def is_mismatched(run: Run) -> bool:
    """Whether the replay check failed."""
    with run.ledger() as ledger:
        return ledger.meta().get("replay") == "mismatch"


def next_step(run: Run, ledger: Ledger) -> str:
    """What is left to do on a run that is at rest, and the command for it; empty if nothing is."""
    from fedgauge.simulations.run.create import restart_command

    progress = ledger.progress()
    waiting = progress.queued + progress.leased
    if not ledger.attacks():
        return "the server was not curious ([audit] curious = false): there is nothing to attack"
    if waiting and ledger.meta().get("replay") == "mismatch":
        return (
            f"{waiting} attacks wait: they would invert a computation that differs from the clients'. Correct what differs, "
            f"in the scenario or in the code, and check again with: fedgauge audit {run.folder} (--force: attack anyway)"
        )
    if waiting:
        return f"{waiting} attacks are parked; continue with: fedgauge audit {run.folder}"
    if not ledger.observations():
        command = restart_command(run, ledger)
        return f"it ended before its first round: there is nothing to attack; begin again with: {command}"
    return ""


def wide_console() -> Console:
    """A terminal's own width; in files and pipes 160 columns, as 80 would cut names off."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def _print_errors(run: Run) -> None:
    """Print on standard error why some attacks were not carried out."""
    with run.ledger() as ledger:
        meta, progress = ledger.meta(), ledger.progress()
        if meta.get("replay") == "mismatch":
            print(f"fedgauge: replay check: {meta['replay_detail']}", file=sys.stderr)
        if progress.failed:
            print(f"fedgauge: {progress.failed} attacks failed: {'; '.join(ledger.errors())}", file=sys.stderr)
        for text in filter(None, (_clients(ledger), next_step(run, ledger))):
            print(f"fedgauge: {text}", file=sys.stderr)


def _print_results(run: Run) -> None:
    """Print the table of scores, failures, and what to do next."""
    console = wide_console()
    with run.ledger() as ledger:
        scores = Scores.read(ledger)
        of = f"{scores.measure.name} ({scores.measure.unit})"
        values = [f"{which} {of}" for which in ("mean", "best", "baseline")]
        table = Table("round", "accuracy", "attack", *values, "label accuracy", box=None)
        for line in round_table(scores, ledger):
            table.add_row(*_cells(line))
        if table.row_count:
            console.print(table)
        meta, progress = ledger.meta(), ledger.progress()
        if "replay_detail" in meta:
            style = "yellow" if meta["replay"] != "ok" else None
            console.print(f"replay check: {meta['replay_detail']}", style=style, markup=False, highlight=False)
        effects = server_attack_effects(run.scenario(), scores, ledger) if tables_of(run).get("server_attack") else {}
        for name, effect in effects.items():
            _print_line(console, f"malicious server, {name}: {effect}")
        for text in filter(None, (_clients(ledger), _grading(ledger))):
            _print_line(console, text)
        if progress.failed:
            console.print(
                f"{progress.failed} attacks failed: {'; '.join(ledger.errors())}", style="yellow", markup=False
            )
        reasons = ledger.reasons()
        for row in reasons[:MOST_REASONS]:
            _print_line(console, f"{row['attack']} ({row['jobs']} x): {row['reason']}")
        if len(reasons) > MOST_REASONS:
            _print_line(console, f"and {len(reasons) - MOST_REASONS} more reasons of attacks")
        if text := next_step(run, ledger):
            _print_line(console, text, "yellow" if meta.get("replay") == "mismatch" else None)


def _print_line(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _clients(ledger: Ledger) -> str:
    """What clients' guards reported; of a deployment, which clients gave no update, and why. Empty if there is nothing."""
    observations = ledger.observations()
    if not ledger.deployed:
        return guarded(observations)
    absent = participation(observations)
    return absent and f"{absent} (in full: fedgauge client-report CLIENT.toml, at the client)"


def _grading(ledger: Ledger) -> str:
    """What a deployment's clients reported of the attacks' success, and how their owners can allow more."""
    grading = ledger.meta().get("grading")
    if grading is None:
        return ""
    allow = 'an owner may allow it: mode = "scores" under [grading] in client.toml (all: fedgauge deploy init --grading scores)'
    parts = [f"grading: {grading}", *([allow] if NOT_ALLOWED in grading else []), "labels are graded by no client"]
    return "; ".join(parts)


def _cells(line: RoundLeak) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None or value != value else format(value, form)

    return [
        str(line.round),
        number(line.accuracy, ".1%"),
        line.attack,
        number(line.psnr.mean, ".1f"),
        number(line.psnr.best, ".1f"),
        number(line.baseline.mean if line.baseline else None, ".1f"),
        number(line.labels, ".0%"),
    ]
