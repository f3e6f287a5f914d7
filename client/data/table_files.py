"""CSV and Parquet files that anyone may have made, as pyarrow tables of a bounded size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgauge.client.files import MOST_ARCHIVE, MOST_TABLE, open_data

EMPTY = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL")  # how files write a missing cell
MOST_CELLS = MOST_TABLE // 2  # of a file, as many as the largest text could hold


def read_csv(
    path: Path,
    texts: Sequence[str] = (),
    names: Sequence[str] | None = None,
    delimiter: str = ",",
    quote: str | bool = '"',
) -> Any:
    """Read a CSV file in UTF-8 as a table; a row with another number of fields than the first is an error.

    Args:
        texts: columns whose cells stay as they are written, also if they look like numbers.
        names: of the columns; default: the first line holds them. Lines that begin with | are then comments.
        quote: the character around texts with delimiters or line breaks; False: none.

    Raises:
        ValueError: the file is missing or damaged.
    """
    import pyarrow
    from pyarrow import csv

    def comment(row: Any) -> str:
        return "skip" if row.text.startswith("|") else "error"

    options = {
        "read_options": csv.ReadOptions(column_names=names, use_threads=False),
        "parse_options": csv.ParseOptions(
            delimiter=delimiter,
            quote_char=quote,
            newlines_in_values=bool(quote),
            invalid_row_handler=comment if names else None,
        ),
        "convert_options": csv.ConvertOptions(
            column_types=dict.fromkeys(texts, pyarrow.string()), null_values=list(EMPTY)
        ),
    }
    try:
        with open_data(path, MOST_TABLE) as file:
            return _checked(csv.read_csv(file, **options), path)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8 that can be read: {error}") from error


def read_parquet(path: Path) -> Any:
    """Read a Parquet file as a table; nested columns are null, as a few bytes may stand for any number of cells.

    Raises:
        ValueError: the file is missing, damaged, or has more than MOST_CELLS cells or MOST_ARCHIVE bytes.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with open_data(path, MOST_ARCHIVE) as file:
            schema = _checked(parquet.read_schema(file).empty_table(), path).schema
            flat = [field.name for field in schema if not pyarrow.types.is_nested(field.type)]
            opened = parquet.ParquetFile(file, read_dictionary=flat)  # each different text is kept once
            batches, rows, size = [], 0, 0
            for batch in opened.iter_batches(1 << 14, columns=flat):
                rows, size = rows + len(batch), size + batch.nbytes
                if rows * len(schema) > MOST_CELLS or size > MOST_ARCHIVE:
                    raise ValueError(f"{path}: the limits of a table are {MOST_CELLS} cells and {MOST_ARCHIVE} bytes")
                batches.append(batch)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is not a Parquet file that can be read: {error}") from error
    read = pyarrow.Table.from_batches(batches) if batches else schema.empty_table()
    columns = [read[name] if name in flat else pyarrow.nulls(rows, schema.field(name).type) for name in schema.names]
    return pyarrow.table(columns, schema.names)


def _checked(table: Any, path: Path) -> Any:
    if twice := [name for name in table.column_names if table.column_names.count(name) > 1]:
        raise ValueError(f"{path} has more than one column {twice[0]!r}")
    return table


def check_columns(table: Any, names: Sequence[str], path: Path) -> None:
    """Raise ValueError if the table lacks one of these columns."""
    there = table.column_names
    if lacking := [name for name in names if name not in there]:
        raise ValueError(f"{path} has no column {lacking[0]!r} (it has: {', '.join(map(repr, there)) or 'nothing'})")
