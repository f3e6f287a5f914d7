"""Retention: deletes the parts of an old run that can be inverted; its scores stay."""

import os
from collections.abc import Iterator
from pathlib import Path

from fedgauge.server.store import run_files
from fedgauge.server.store.run import ROUNDS, Run

DAY = 86400.0  # seconds
EXAMPLES = ("observed", "truth")  # folders of what `fedgauge app` saw clients train on
DERIVED = ("report.html", "checkpoint.json")  # made from the private files, or useless without them


def prune(run: Run, days: float, now: float) -> int:
    """Delete a run's updates, reconstructions, observed examples, client states, checkpoints and reports; returns how many files.

    Nothing is deleted if the newest of them is younger than `days`.

    Args:
        days: how old they may become, by the files' own times.

    Raises:
        RunBusy: a process trains or attacks it.
        RefusedFile: something in it is a link or no file.
    """
    with run.lock("training"), run.lock("server"), run.lock("audit"):
        files = list(private(run))
        if not files or now - max(os.lstat(path).st_mtime for path in files) < days * DAY:
            return 0
        with run.ledger() as ledger:
            for round in {o["round"] for o in ledger.observations() if o["digest"]}:
                ledger.mark_deleted(round)
        for path in files:
            run_files.delete(path)
    return len(files)


def private(run: Run) -> Iterator[Path]:
    """The files of a run that reveal clients' data; RefusedFile if one is a link or no file."""
    for name in (*ROUNDS, *EXAMPLES):
        yield from (run.folder / name / n for n in run_files.names(run.folder / name))
    yield from (path for path in (run.folder / name for name in DERIVED) if run_files.look(path))
    names = run_files.names(run.folder)
    yield from (run.folder / n for n in names if n.startswith("checkpoint-") and n.endswith(".safetensors"))
