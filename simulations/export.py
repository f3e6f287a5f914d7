"""Export: a run's scores as one long table, for the tools that users already have."""

import csv
import io
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, TextIO

from client.files import replacing
from server.run import Run

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


def save_csv(run: Run, path: Path) -> None:
    """As a CSV file."""
    with _written(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        write_csv(run, text)
        text.detach()  # else the wrapper's end would close the file before it is in place


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
    with _written(path) as file:
        file.write(buffer.getvalue())


def _written(path: Path) -> AbstractContextManager[IO[bytes]]:
    # /dev/stdout and a shell's >(...) are written into: putting a file in their place would destroy them
    return replacing(path) if path.is_file() or not path.exists() else path.open("wb")
