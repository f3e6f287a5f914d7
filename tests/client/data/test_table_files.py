"""Files of tables that somebody else made: small ones that stand for endless cells, pipes, and devices."""

import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from fedgauge.client.data import table_files, tables
from fedgauge.client.data.tables import Tabular, adult, german_credit, table
from fedgauge.client.models.columns import MISSING
from tests.security.test_data_files import ENDLESS

ROWS = 4_000


READERS: dict[str, Callable[[Path], Tabular]] = {
    "own.csv": lambda path: table(path, "label"),
    "own.parquet": lambda path: table(path, "label"),
    "german.data": lambda path: german_credit(path=path.parent),
    "adult.data": lambda path: adult(path=path.parent),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("name", READERS)
def test_no_table_is_read_from_what_has_no_end(tmp_path: Path, name: str, kind: str) -> None:
    ENDLESS[kind](tmp_path / name)
    with pytest.raises(ValueError, match="is no file|has 1099511627776 bytes, and no such file has more than"):
        READERS[name](tmp_path / name)


def test_a_text_that_stands_in_every_row_is_kept_once(tmp_path: Path) -> None:
    """A file of kilobytes of which each row's text alone would be 64 KB."""
    long = "x" * (1 << 16) + " "
    texts = pyarrow.DictionaryArray.from_arrays([0, 1] * (ROWS // 2), [long, "y"])
    made = pyarrow.table({"a": list(range(ROWS)), "b": texts, "label": ["u", "v"] * (ROWS // 2)})
    pyarrow.parquet.write_table(made, tmp_path / "t.parquet", store_schema=False)
    assert (tmp_path / "t.parquet").stat().st_size < 1 << 20
    before, counted = pyarrow.default_memory_pool(), pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())
    pyarrow.set_memory_pool(counted)
    tracemalloc.start()
    try:
        found = table(tmp_path / "t.parquet", "label")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(before)
    assert len(found.x) + len(found.x_test) == ROWS
    assert list(found.columns)[1].categories == (long.strip(), "y")
    assert counted.max_memory() < 64 << 20 and peak < 64 << 20


def test_a_file_of_more_cells_or_bytes_than_any_table_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of equal numbers takes no room in a file: a few bytes stand for billions of rows."""
    made = pyarrow.table({"a": [1.0, 2.0] * 50, "label": ["u", "v"] * 50})
    pyarrow.parquet.write_table(made, tmp_path / "t.parquet")
    assert len(table(tmp_path / "t.parquet", "label").x) == 80
    for module, name in ((table_files, "MOST_CELLS"), (tables, "MOST_ARCHIVE")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, 199)
            with pytest.raises(ValueError, match="the limits of a table are|leave columns or rows out"):
                table(tmp_path / "t.parquet", "label")


def test_a_nested_column_is_not_unpacked(tmp_path: Path) -> None:
    nested = pyarrow.array([[0] * 1000] * 100)
    made = pyarrow.table({"a": [1.0, 2.0] * 50, "deep": nested, "label": ["u", "v"] * 50})
    pyarrow.parquet.write_table(made, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"column 'deep' holds list<.*drop = \[\"deep\"\]"):
        table(tmp_path / "t.parquet", "label")
    assert [c.name for c in table(tmp_path / "t.parquet", "label", drop=["deep"]).columns] == ["a"]


def test_columns_of_every_type_are_read_across_batches_and_row_groups(tmp_path: Path) -> None:
    rows = 40_000  # more than a batch and several row groups, whose dictionaries differ
    made = pyarrow.table(
        {
            "word": [f" w{i // 1000} " if i % 7 else None for i in range(rows)],
            "flag": [None if i % 3 else i % 2 == 0 for i in range(rows)],
            "price": [Decimal(i % 9) / 4 for i in range(rows)],
            "code": [None if i == 5 else i % 4 for i in range(rows)],
            "label": [i % 2 for i in range(rows)],
        }
    )
    pyarrow.parquet.write_table(made, tmp_path / "t.parquet", row_group_size=9_000)
    found = table(tmp_path / "t.parquet", "label", categorical=["code"])
    word, flag, price, code = found.columns
    assert word.categories == (*sorted(f"w{i}" for i in range(40)), MISSING)
    assert flag.categories == ("False", "True", MISSING) and code.categories == ("0", "1", "2", "3", MISSING)
    assert (price.low, price.high, price.decimals, found.names) == (0, 2, 2, ("0", "1"))
    cells = found.columns.cells(torch.cat([found.x, found.x_test]))
    assert int((cells[:, 0] == len(word.categories) - 1).sum()) == sum(i % 7 == 0 for i in range(rows))
