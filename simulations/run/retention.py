"""Retention: a run's invertible part is deleted when it is old enough; its scores stay."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from fedgauge.server.store.run import ROUNDS, Run

DAY = 86400.0  # seconds
DERIVED = ("report.html", "report.pdf", "tensorboard", "checkpoint.json")  # made of it, or of no use without


def prune(run: Run, days: float, now: float) -> int:
    """Delete a run's updates, reconstructions, memories, checkpoints and reports; how many files that were.

    Nothing is deleted where the newest of them is younger.

    Args:
        days: how long they may lie there; counted by the files' own times.
        now: seconds since 1970.

    Raises:
        Busy: somebody trains or attacks it.
    """
    with run.lock("training"), run.lock("server"), run.lock("audit"):
        found = list(private(run))
        if not found or now - max(path.stat().st_mtime for path in found) < days * DAY:
            return 0
        with run.ledger() as ledger:
            for round in {o["round"] for o in ledger.observations() if o["digest"]}:
                ledger.mark_deleted(round)
            ledger.set_meta(pruned="yes")
        for path in found:
            path.unlink(missing_ok=True)
        shutil.rmtree(run.folder / "tensorboard", ignore_errors=True)
    return len(found)


def private(run: Run) -> Iterator[Path]:
    """The files of a run from which somebody's data can be had."""
    for name in (*ROUNDS, *DERIVED):
        path = run.folder / name
        yield from (p for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())
    yield from run.folder.glob("checkpoint-*.safetensors")
