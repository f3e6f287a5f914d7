"""Export: a run's scores as one long table, for the tools that users already have."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from server.run import Run
from server.tape import write_bytes

COLUMNS = ("run", "round", "client", "attack", "example", "metric", "value", "status", "seconds", "knowledge")


def rows(run: Run) -> Iterator[tuple[Any, ...]]:
    """Every score in a stable order, as COLUMNS; example -1 speaks of the whole batch; value None: nothing to grade."""
    with run.ledger() as ledger:
        for row in ledger.scores():
            yield run.name, *(row[c] for c in COLUMNS[1:])


def write_csv(run: Run, out: TextIO) -> None:
    """As CSV with a header; an empty value is a missing one, inf an exact hit."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows(run))


def write_parquet(run: Run, path: Path) -> None:
    """As one parquet file."""
    import pyarrow
    import pyarrow.parquet

    kinds = [pyarrow.string()] + [pyarrow.int64()] * 2 + [pyarrow.string(), pyarrow.int64(), pyarrow.string()]
    kinds += [pyarrow.float64(), pyarrow.string(), pyarrow.float64(), pyarrow.string()]
    schema = pyarrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    columns = list(zip(*rows(run), strict=True)) or [() for _ in COLUMNS]
    table = pyarrow.table([pyarrow.array(c, k) for c, k in zip(columns, kinds, strict=True)], schema=schema)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    write_bytes(path, buffer.getvalue())
