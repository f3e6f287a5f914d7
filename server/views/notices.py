"""Notices: what a reader must know before trusting a run's figures."""

import shlex
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE
from fedgauge.attacks.modality.image_metrics import LPIPS_PIXELS
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger_types import EMPTY
from fedgauge.server.views.formatting import listed, shortened
from fedgauge.server.views.outcomes import failure
from fedgauge.server.views.participation import app_clients, other_sizes
from fedgauge.server.views.reading import Reading, jobs_of_run

MOST_ROUNDS = 3  # told one by one


class Notice(NamedTuple):
    """What is missing, and the command that helps; empty if none does."""

    words: str
    command: str = ""


def notices(reading: Reading) -> list[Notice]:
    """What a reader must know before trusting a figure."""
    return [*_training_notices(reading), *_audit_notices(reading), *_data(reading)]


def _training_notices(reading: Reading) -> Iterator[Notice]:
    state, planned = reading.meta.get("state", ""), reading.tables["rounds"]
    trained = max(reading.rounds, default=0)
    if reading.state == "training":
        yield Notice(f"The run is still training: {trained} of {planned} rounds so far.")
    elif reading.state == "failed" and EMPTY in reading.meta:
        yield Notice(f"The training failed: {reading.meta[EMPTY]}.")
    elif trained < planned:
        how = {"failed": "The training failed", "interrupted": "The training was interrupted"}
        what = f"after {trained} of {planned} rounds" if trained else "before its first round"
        logs = "; see logs/flower.log in the run folder" if state == "failed" else ""
        yield Notice(f"{how.get(state, 'The training ended')} {what}{logs}.")
    yield from _problems(reading)
    yield from _diverged(reading)


def _problems(reading: Reading) -> Iterator[Notice]:
    """What could not be recorded, and rounds that were undone, each kind once."""
    alike = Counter(problem.code for problem in reading.ledger.problems())
    for problem in reading.ledger.problems():
        if more := alike.pop(problem.code, 0):
            where = "Recording" if problem.round is None else f"Round {problem.round}"
            yield Notice(f"{where}: {shortened(problem.words)}{f' (and {more - 1} more)' if more > 1 else ''}.")


def _diverged(reading: Reading) -> Iterator[Notice]:
    """What a user's own app returned that was no number."""
    for number, told in reading.returned:
        if named := [name for name, value in told.items() if value is None]:
            words = shortened(listed(named, MOST_ROUNDS, ", "))
            yield Notice(f"In round {number} first, the app returned what is infinite or no number ({words}).")
            return


def _audit_notices(reading: Reading) -> Iterator[Notice]:
    jobs, meta = jobs_of_run(reading), reading.meta
    again = f"fedgauge audit {shlex.quote(str(reading.run.folder))}"
    progress, waiting = jobs.progress, jobs.progress.waiting
    if not reading.tables.get("audit", {}).get("curious", True):
        yield Notice(
            "The server was not curious ([audit] curious = false): it kept no updates. Set it to true and run again."
        )
    elif waiting and meta.get("replay") == "mismatch":
        yield Notice(f"{jobs.words}: the others wait, because the replay check failed.")
    elif waiting and reading.state in ("training", "attacking"):
        yield Notice(f"So far {jobs.words}.")
    elif waiting:
        yield Notice(f"{jobs.words}. Continue with:", again)
    elif not progress.total and any(o["digest"] for o in reading.ledger.observations()):
        yield Notice("Updates are on the tape, but no attack is planned for them. Attack them with:", again)
    elif not progress.total and reading.sizes:
        yield Notice("No update is on the tape, so there is nothing to attack.")
    if words := reading.plan_coverage.words:
        yield Notice(f"{words}.")
    if words := failure(reading.ledger):
        words = f"{words[0].upper()}{words[1:]}. When the cause is mended, try them again with:"
        yield Notice(words, f"{again} --retry failed")
    if words := other_sizes(app_clients(reading.ledger), reading.tables["data"].get("batch_size", 1)):
        yield Notice(f"{words[0].upper()}{words[1:]}.")
    if meta.get("truth_doubts"):
        yield Notice(f"The grades may be against wrong examples: {meta['truth_doubts']}.")
    if reading.ledger.foreign and meta.get("training"):
        if reading.ledger.training_fits is not True:
            yield Notice(f"Whether the assumed local training is right: {meta['training']}")
    elif meta.get("replay", "ok") != "ok":
        yield Notice(f"The replay check did not succeed ({meta['replay']}): {meta.get('replay_detail', '')}")


def _data(reading: Reading) -> Iterator[Notice]:
    if flat := [row["name"] for row in reading.attacks if row["flat"]]:
        yield Notice(f"{', '.join(flat)}: {NO_DERIVATIVE}.")
    try:
        dataset = reading.scenario.federation.shards.dataset
    except SpecError as error:
        yield Notice(f"The private examples cannot be shown on this machine: {error}")
        return
    perceptual = {metric for metric in modality_of(dataset).measured if metric.startswith("lpips_")}
    measured = not perceptual or perceptual & {*reading.metrics}
    if reading.metrics and not measured and min(dataset.shape[1:]) >= LPIPS_PIXELS:
        yield Notice("LPIPS: unavailable (no backbone weights).")
