"""Export of a run's scores as one long table."""

import csv
import io
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TextIO

from fedgauge.client.components import SpecError
from fedgauge.client.files import writing
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run
from fedgauge.server.views.participation import may_have_sent
from fedgauge.server.views.privacy import Spending
from fedgauge.server.views.tables import Cell, Column, Table

TEXTS, COUNTS = ("run", "attack", "metric", "status", "knowledge"), ("round", "client", "example")
KEYS = (
    "run",
    "round",
    "client",
    "attack",
    "example",
    "metric",
    "value",
    "status",
    "seconds",
    "knowledge",
    "epsilon",
    "delta",
)
COLUMNS = [Column(key, key, "text" if key in TEXTS else "count" if key in COUNTS else "number") for key in KEYS]
BATCH = 5000  # rows of a table that are held in memory


def tables(run: Run) -> Iterator[Table]:
    """Yield every score in a stable order, in pieces; example -1 is the whole batch.

    Epsilon is the client's loss for one record by the end of the round; None if unknown.
    """
    with run.ledger() as ledger:
        spending: Spending | None = None
        with suppress(SpecError):
            replies = ((o["round"], o["client"]) for o in ledger.observations() if may_have_sent(o, ledger.deployed))
            spending = Spending(run.scenario(), ledger, replies)
        scores = ledger.scores()
        while some := list(islice(scores, BATCH)):
            rows: list[list[Cell]] = []
            for row in some:
                epsilon = None if spending is None else spending.record(row["client"], row["round"])
                delta = None if spending is None or epsilon is None else spending.delta
                rows.append([run.name, *(row[key] for key in KEYS[1:-2]), epsilon, delta])
            yield Table("scores", COLUMNS, rows)


def write_csv(run: Run, out: TextIO) -> None:
    """Write CSV with a header; inf is an exact reconstruction."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(KEYS)
    for table in tables(run):
        for row in table.rows:
            writer.writerow([run_files.printable(v) if isinstance(v, str) and out.isatty() else v for v in row])


def save_csv(run: Run, path: Path) -> None:
    """Write a CSV file."""
    with writing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        write_csv(run, text)
        text.detach()  # otherwise the wrapper would close the file before it is in place


def write_parquet(run: Run, path: Path | None = None) -> Path:
    """Write one parquet file, by default scores.parquet in the run's folder, and return its path."""
    import pyarrow
    import pyarrow.parquet

    kinds = {"text": pyarrow.string(), "count": pyarrow.int64(), "number": pyarrow.float64()}
    schema = pyarrow.schema([(column.key, kinds[column.form]) for column in COLUMNS])
    own = run.folder / "scores.parquet"
    with (
        run_files.replacing(own) if path is None else writing(path) as file,
        pyarrow.parquet.ParquetWriter(file, schema) as writer,
    ):
        for table in tables(run):
            writer.write_table(pyarrow.Table.from_pylist(table.records, schema))
    return path or own
