"""CSV and Parquet files as pyarrow tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgauge.client.files import reading

EMPTY = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL")  # how files write a missing cell


def read_table(
    path: Path,
    texts: Sequence[str] = (),
    names: Sequence[str] | None = None,
    delimiter: str = ",",
    needed: Sequence[str] = (),
) -> Any:
    """Read a Parquet file, by its name, or else a CSV file in UTF-8.

    Args:
        texts: columns of a CSV file to read as text, even if they look like numbers.
        names: column names; default: the first line. If given, lines that begin with | are comments.
        delimiter: between fields, which may be quoted unless it is a tab.
        needed: columns that the file must have.

    Raises:
        ValueError: the file is missing or damaged, or a column is missing or duplicated.
    """
    import pyarrow
    from pyarrow import csv, parquet

    def comment(row: Any) -> str:
        return "skip" if row.text.startswith("|") else "error"

    quoted = delimiter != "\t"
    marks = {"delimiter": delimiter, "quote_char": quoted and '"', "newlines_in_values": quoted}
    with reading(path, "a CSV file in UTF-8 or a Parquet file"):
        if path.suffix.lower() in (".parquet", ".pq"):
            table = parquet.read_table(path)
        else:
            table = csv.read_csv(
                path,
                csv.ReadOptions(column_names=names, use_threads=False),
                csv.ParseOptions(invalid_row_handler=comment if names else None, **marks),
                csv.ConvertOptions(column_types=dict.fromkeys(texts, pyarrow.string()), null_values=list(EMPTY)),
            )
    columns = table.column_names
    if wrong := [name for name in (*needed, *columns) if columns.count(name) != 1]:
        raise ValueError(f"{path} needs one column {wrong[0]!r} (it has: {', '.join(map(repr, columns))})")
    return table
