"""Export a run's scores for other tools, as one long table."""

import csv
import io
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
BATCH, LETTERS = 5000, 16_000_000  # rows of a table, and letters in them, that are held in memory


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
    if out.isatty():
        writer.writerows([run_files.printable(v) if isinstance(v, str) else v for v in row] for row in rows(run))
    else:
        writer.writerows(rows(run))


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

    kinds = [pyarrow.string()] + [pyarrow.int64()] * 2 + [pyarrow.string(), pyarrow.int64(), pyarrow.string()]
    kinds += [pyarrow.float64(), pyarrow.string(), pyarrow.float64(), pyarrow.string(), *[pyarrow.float64()] * 2]
    schema = pyarrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    own = run.folder / "scores.parquet"
    with (
        run_files.replacing(own) if path is None else writing(path) as file,
        pyarrow.parquet.ParquetWriter(file, schema) as writer,
    ):
        for some in _batches(rows(run)):
            arrays = [pyarrow.array(c, k) for c, k in zip(zip(*some, strict=True), kinds, strict=True)]
            writer.write_table(pyarrow.table(arrays, schema=schema))
    return path or own


def _batches(found: Iterable[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Rows by the thousand, fewer where they repeat long texts: parquet stores a text once, a table in memory once a row."""
    batch: list[tuple[Any, ...]] = []
    letters = 0
    for row in found:
        batch.append(row)
        letters += sum(len(value) for value in row if isinstance(value, str))
        if len(batch) >= BATCH or letters > LETTERS:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch
