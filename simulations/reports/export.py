"""Export of a run's scores as one long table."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from fedgauge.client.files import writing
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run
from fedgauge.server.views.tables import Cell

OF_SCORES = ("round", "client", "attack", "example", "metric", "value", "status", "seconds", "knowledge")
COLUMNS = ("run", *OF_SCORES)


def rows(run: Run) -> Iterator[list[Cell]]:
    """Yield every score in a stable order, with the values of COLUMNS; example -1 is the whole batch."""
    with run.ledger(readonly=True) as ledger, ledger.snapshot():
        for row in ledger.scores():
            yield [run.name, *(row[key] for key in OF_SCORES)]


def write_csv(run: Run, out: TextIO) -> None:
    """Write CSV with a header; inf is an exact reconstruction."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows(run):
        writer.writerow([run_files.printable(v) if isinstance(v, str) and out.isatty() else v for v in row])


def save_csv(run: Run, path: Path) -> None:
    with writing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        write_csv(run, text)
        text.detach()  # otherwise the wrapper would close the file before it is in place
