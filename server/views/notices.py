"""Notices: what to know before trusting the figures of a run."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE
from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger_types import EMPTY, sanitised
from fedgauge.server.store.scenario import run_command
from fedgauge.server.views.outcomes import failure, inapplicable, none_accepted
from fedgauge.server.views.participation import other_sizes
from fedgauge.server.views.snapshot import RunSnapshot

ENDED = {"training": "is still running", "failed": "failed", "interrupted": "was interrupted"}


class Notice(NamedTuple):
    """A gap in a run, and the command that closes it; empty if none does."""

    words: str
    command: str = ""


def audit_command(reading: RunSnapshot) -> str:
    return run_command("audit", reading.run.folder, reading.tables)


def _is_resumable(reading: RunSnapshot) -> bool:
    """Return whether the training of a simulation ended early, which is continued before the attacks."""
    ended = reading.state in ("interrupted", "failed") and not reading.run.model.exists()
    return ended and not reading.ledger.deployed


def notices(reading: RunSnapshot) -> list[Notice]:
    return [*_of_training(reading), *_of_attacks(reading)]


def _of_training(reading: RunSnapshot) -> Iterator[Notice]:
    trained, planned = max(reading.rounds, default=0), reading.tables["rounds"]
    if EMPTY in reading.meta and reading.state == "failed":
        yield Notice(f"The training failed: {reading.meta[EMPTY]}.")
    elif trained < planned or reading.state == "training":
        state = "training" if reading.state == "training" else reading.meta.get("state", "")
        logs = "; see logs/flower.log in the run folder" if state == "failed" else ""
        words, again = f"The training {ENDED.get(state, 'ended')} after {trained} of {planned} rounds{logs}.", ""
        if _is_resumable(reading):
            words, again = f"{words} Continue it with:", run_command("run --resume", reading.run.folder, reading.tables)
        yield Notice(words, again)
    problems = reading.ledger.problems()
    alike = Counter(problem.code for problem in problems)
    for problem in problems:  # each kind once
        if more := alike.pop(problem.code, 0):
            where = "Recording" if problem.round is None else f"Round {problem.round}"
            yield Notice(f"{where}: {sanitised(problem.words)}{f' (and {more - 1} more)' if more > 1 else ''}.")


def _of_attacks(reading: RunSnapshot) -> Iterator[Notice]:
    jobs, meta, ledger = reading.jobs, reading.meta, reading.ledger
    again, waiting = audit_command(reading), jobs.waiting
    if not reading.tables.get("audit", {}).get("curious", True):
        yield Notice("The server was not curious: set [audit] curious = true and run again.")
    elif waiting and meta.get("replay") == "mismatch":
        words = "the others wait, because the replay check failed: attacks would not invert what the clients computed"
        yield Notice(
            f"{jobs.words}: {words}. After correcting scenario or code (or with --force) check again with:", again
        )
    elif waiting:
        at_work = reading.state in ("training", "attacking") or _is_resumable(reading)
        yield Notice(f"{jobs.words}.") if at_work else Notice(f"{jobs.words}. Continue with:", again)
    elif not jobs.total and any(o["digest"] for o in reading.observations):
        yield Notice("Updates were recorded, but no attack is planned for them. Attack them with:", again)
    if words := none_accepted(ledger) or inapplicable(ledger):
        yield Notice(f"{words}.")
    if words := reading.plan_coverage.words:
        yield Notice(f"{words}.")
    if words := failure(ledger):
        yield Notice(f"{words}. After correcting the cause, try them again with:", f"{again} --retry failed")
    if words := other_sizes(ledger, reading.tables):
        yield Notice(f"{words}.")
    if meta.get("truth_doubts"):
        yield Notice(f"The grades may be against wrong examples: {meta['truth_doubts']}.")
    if ledger.foreign and meta.get("training") and ledger.training_fits is not True:
        state = "may be wrong" if ledger.training_fits is False else "was not verified"
        yield Notice(f"The assumed local training {state}: {meta['training']}")
    elif not ledger.foreign and meta.get("replay", "ok") != "ok":
        yield Notice(f"The replay check did not succeed ({meta['replay']}): {meta.get('replay_detail', '')}")
    if flat := [row["name"] for row in reading.attacks if row["flat"]]:
        yield Notice(f"{', '.join(flat)}: {NO_DERIVATIVE}.")
    try:
        reading.scenario  # noqa: B018
    except SpecError as error:
        yield Notice(f"The private examples cannot be shown on this machine: {error}")
