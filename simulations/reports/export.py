"""Export a run's scores for other tools, as one long table."""

import csv
import io
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from fedgauge.client.components import SpecError
from fedgauge.client.files import writing
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run
from fedgauge.server.views.participation import may_have_sent
from fedgauge.server.views.privacy import Spending

COLUMNS = (
    "run", "round", "client", "attack", "example", "metric", "value", "status", "seconds", "knowledge", "epsilon", "delta",
)  # fmt: skip
BATCH = 5000  # rows of a table that are held in memory


def rows(run: Run) -> Iterator[tuple[Any, ...]]:
    """Every score in a stable order, as COLUMNS; example -1 is the whole batch; value None: there was nothing to grade.

    Epsilon is what the client has spent for one record by the end of the round, in the newest round with one that is under way;
    None if there is none or it is unknown here.
    """
    with run.ledger() as ledger:
        spending: Spending | None = None
        with suppress(SpecError):
            replies = ((o["round"], o["client"]) for o in ledger.observations() if may_have_sent(o, ledger.deployed))
            spending = Spending(run.scenario(), ledger, replies)
        for row in ledger.scores():
            epsilon = None if spending is None else spending.record(row["client"], row["round"])
            delta = None if spending is None or epsilon is None else spending.delta
            yield run.name, *(row[c] for c in COLUMNS[1:-2]), epsilon, delta


def write_csv(run: Run, out: TextIO) -> None:
    """Write CSV with a header; an empty value is missing, inf is an exact hit; a terminal gets no control codes."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows(run):
        writer.writerow([run_files.printable(v) if isinstance(v, str) and out.isatty() else v for v in row])


def save_csv(run: Run, path: Path) -> None:
    """Write a CSV file."""
    with writing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        write_csv(run, text)
        text.detach()  # otherwise the wrapper would close the file before it is in place


def write_parquet(run: Run, path: Path | None = None) -> Path:
    """Write one parquet file, scores.parquet in the run's folder if no path is given; returns its path."""
    import pyarrow
    import pyarrow.parquet

    text, whole, number = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    kinds = (text, whole, whole, text, whole, text, number, text, number, text, number, number)
    schema = pyarrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    own, found = run.folder / "scores.parquet", rows(run)
    with (
        run_files.replacing(own) if path is None else writing(path) as file,
        pyarrow.parquet.ParquetWriter(file, schema) as writer,
    ):
        while some := [dict(zip(COLUMNS, row, strict=True)) for row in islice(found, BATCH)]:
            writer.write_table(pyarrow.Table.from_pylist(some, schema))
    return path or own
