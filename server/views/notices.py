"""Notices: what a reader must know before trusting a run's figures."""

import shlex
from collections.abc import Iterator

from fedgauge.attacks.grading.image_metrics import LPIPS_PIXELS
from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE
from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger_types import EMPTY
from fedgauge.server.views.reading import Reading

Notice = tuple[str, str]  # what is missing, and the command that helps; empty if none does


def notices(reading: Reading) -> list[Notice]:
    """What a reader must know before trusting a figure."""
    return [*_training_notices(reading), *_audit_notices(reading), *_flat(reading), *_data(reading)]


def _training_notices(reading: Reading) -> Iterator[Notice]:
    state, planned = reading.meta.get("state", ""), reading.tables["rounds"]
    trained = max(reading.rounds, default=0)
    if reading.state == "training":
        yield f"The run is still training: {trained} of {planned} rounds so far.", ""
    elif reading.state == "failed" and EMPTY in reading.meta:
        yield f"The training failed: {reading.meta[EMPTY]}.", ""
    elif trained < planned:
        how = {"failed": "The training failed", "interrupted": "The training was interrupted"}
        what = f"after {trained} of {planned} rounds" if trained else "before its first round"
        logs = "; see logs/flower.log in the run folder" if state == "failed" else ""
        yield f"{how.get(state, 'The training ended')} {what}{logs}.", ""


def _audit_notices(reading: Reading) -> Iterator[Notice]:
    progress, meta = reading.progress, reading.meta
    again = f"fedgauge audit {shlex.quote(str(reading.run.folder))}"
    waiting = progress.queued + progress.leased
    if not reading.tables.get("audit", {}).get("curious", True):
        yield (
            "The server was not curious ([audit] curious = false): it kept no updates. Set it to true and run again.",
            "",
        )
    elif waiting and meta.get("replay") == "mismatch":
        yield f"{waiting} of {progress.total} attacks wait, because the replay check failed.", ""
    elif waiting and reading.state in ("training", "attacking"):
        yield f"{waiting} of {progress.total} attacks have not been done yet.", ""
    elif waiting:
        yield f"{waiting} of {progress.total} attacks have not been done yet. Continue with:", again
    elif not progress.total and any(o["digest"] for o in reading.ledger.observations()):
        yield "Updates are on the tape, but no attack is planned for them. Attack them with:", again
    elif not progress.total and reading.sizes:
        yield "No update is on the tape, so there is nothing to attack.", ""
    if progress.failed:
        errors = "; ".join(reading.ledger.errors()[:3])
        words = f"{progress.failed} of {progress.total} attacks failed: {errors}. When the cause is mended, try them again with:"
        yield words, f"{again} --retry failed"
    if meta.get("truth_doubts"):
        yield f"The grades may be against wrong examples: {meta['truth_doubts']}.", ""
    if "uploads" in meta:
        yield f"No update can be attacked: {meta['uploads']}", ""
    if reading.ledger.foreign and meta.get("training"):
        if meta.get("training_fits") != "True":
            yield f"Whether the assumed local training is right: {meta['training']}", ""
    elif meta.get("replay", "ok") != "ok":
        yield f"The replay check did not succeed ({meta['replay']}): {meta.get('replay_detail', '')}", ""


def _flat(reading: Reading) -> Iterator[Notice]:
    flat = [row["name"] for row in reading.attacks if NO_DERIVATIVE in row["knowledge"]]
    if flat:
        yield f"{', '.join(flat)}: {NO_DERIVATIVE}.", ""


def _data(reading: Reading) -> Iterator[Notice]:
    try:
        shape = reading.scenario.federation.shards.dataset.shape
    except SpecError as error:
        yield f"The private examples cannot be shown on this machine: {error}", ""
        return
    perceptual = any(metric.startswith("lpips_") for metric in reading.metrics)
    if reading.metrics and not perceptual and len(shape) == 3 and min(shape[1:]) >= LPIPS_PIXELS:
        yield "LPIPS: unavailable (no backbone weights).", ""
