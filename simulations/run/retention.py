"""Retention: deletes the parts of an old run that can be inverted; its scores stay."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from fedgauge.server.store.run import ROUNDS, Run

DAY = 86400.0  # seconds
DERIVED = (
    "report.html",
    "report.pdf",
    "tensorboard",
    "checkpoint.json",
)  # made from the private files, or useless without them


def prune(run: Run, days: float, now: float) -> int:
    """Delete a run's updates, reconstructions, client states, checkpoints and reports; returns how many files.

    Nothing is deleted if the newest of them is younger than `days`.

    Args:
        days: how old they may become, by the files' own times.
        now: seconds since 1970.

    Raises:
        RunBusy: a process trains or attacks it.
    """
    with run.lock("training"), run.lock("server"), run.lock("audit"):
        files = list(private(run))
        if not files or now - max(path.stat().st_mtime for path in files) < days * DAY:
            return 0
        with run.ledger() as ledger:
            for round in {o["round"] for o in ledger.observations() if o["digest"]}:
                ledger.mark_deleted(round)
            ledger.set_meta(pruned="yes")
        for path in files:
            path.unlink(missing_ok=True)
        shutil.rmtree(run.folder / "tensorboard", ignore_errors=True)
    return len(files)


def private(run: Run) -> Iterator[Path]:
    """The files of a run that reveal clients' data."""
    for name in (*ROUNDS, *DERIVED):
        path = run.folder / name
        yield from (p for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())
    yield from run.folder.glob("checkpoint-*.safetensors")
