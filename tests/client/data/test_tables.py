"""Tables: what a row's numbers mean, how files become rows, and which files are refused in words."""

import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgauge.client.components import SpecError, build
from fedgauge.client.data.tables import adult, census, german_credit, table
from fedgauge.client.federation import DATASET
from fedgauge.client.models.columns import MISSING, Column, Columns
from tests.client.data.refusals import refused

MIXED = Columns(
    (
        Column("age", mean=40.0, std=12.5, low=0.0, high=100.0),
        Column("trade", ("baker", "driver", MISSING)),
        Column("debt", mean=-3.0, std=0.5, decimals=2, optional=True),
        Column("home", ("own", "rent"), shares=(0.25, 0.75)),
    )
)
PEOPLE = """age,trade,debt,income
31,baker,1.5,low
45,driver,,high
52,baker,0.25,high
28,?,2.0,low
39,driver,1.0,low
61,baker,3.5,high
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@settings(max_examples=50)
@given(st.floats(0, 100), st.integers(0, 2), st.one_of(st.just(math.nan), st.floats(-5, -1)), st.integers(0, 1))
def test_a_row_gives_back_its_cells(age: float, trade: int, debt: float, home: int) -> None:
    cells = torch.tensor([[age, trade, debt, home]], dtype=torch.float64)
    found = MIXED.cells(MIXED.rows(cells))
    assert torch.allclose(found, cells, atol=1e-4, equal_nan=True)
    assert bool(MIXED.right(cells, found).all())


def test_entries_are_those_that_can_be_computed_by_hand() -> None:
    row = MIXED.rows(torch.tensor([52.5, 1.0, math.nan, 0.0], dtype=torch.float64))
    share = math.sqrt(0.25 * 0.75)
    assert row.tolist() == pytest.approx([1.0, 0, 1, 0, 0, 1, 0.75 / share, -0.75 / share])
    assert MIXED.written(MIXED.cells(row).tolist()) == ["52", "driver", MISSING, "own"]


def test_a_number_is_right_to_a_third_of_a_deviation_and_a_missing_cell_only_if_it_is_missing() -> None:
    truth = torch.tensor([40.0, 0, math.nan, 1], dtype=torch.float64)
    for guess, right in (
        ([40 + 0.318 * 12.5, 0, math.nan, 1], [True] * 4),
        ([40 - 0.32 * 12.5, 1, -3.0, 1], [False, False, False, True]),
    ):
        assert MIXED.right(truth, torch.tensor(guess, dtype=torch.float64)).tolist() == right


def test_csv_and_parquet_give_the_same_table(tmp_path: Path) -> None:
    people = written(tmp_path / "people.csv", PEOPLE)
    from pyarrow import csv

    pyarrow.parquet.write_table(csv.read_csv(people), tmp_path / "people.parquet")
    one, other = (table(tmp_path / f"people.{kind}", "income", test=0.34) for kind in ("csv", "parquet"))
    assert torch.equal(one.x, other.x) and torch.equal(one.y_test, other.y_test) and one.columns == other.columns
    one.check()
    assert one.names == ("high", "low") and one.fitted == ("columns", "classes")
    age, trade, debt = one.columns
    assert trade.categories == ("baker", "driver", MISSING) and debt.optional and not age.optional
    assert (age.low, age.high, age.decimals, debt.decimals) == (28, 61, 0, 2)
    cells = one.columns.cells(one.x)
    assert float(cells[:, 0].mean()) == pytest.approx(age.mean, abs=1e-4)  # of the training rows alone
    assert float(one.x[:, 0].std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_a_declared_table_takes_nothing_from_the_data(tmp_path: Path) -> None:
    people = written(tmp_path / "people.csv", PEOPLE)
    columns = {"trade": ["driver", "baker", MISSING], "age": {"mean": 40, "std": 10, "low": 0, "high": 99}}
    found = table(people, "income", columns=columns, classes=["low", "high"])
    assert found.fitted == () and [c.name for c in found.columns] == ["trade", "age"]
    ages = torch.cat([found.x, found.x_test])[:, 3] * 10 + 40
    assert sorted(ages.round().int().tolist()) == [28, 31, 39, 45, 52, 61]
    assert not table(people, "income", missing="drop").columns.every[2].optional


def test_whole_numbers_that_no_float_holds_are_numbers(tmp_path: Path) -> None:
    rows = "".join(f"{2**53 + 1 + i},{'ab'[i % 2]}\n" for i in range(9))
    (column,) = table(written(tmp_path / "ids.csv", f"id,label\n{rows}"), "label").columns
    assert column.numeric and column.low == pytest.approx(2**53)


LONG = "\n".join(f"person {i},{'ab'[i % 2]}" for i in range(200))


@pytest.mark.parametrize(
    ("text", "arguments", "name"),
    [
        (PEOPLE, {"label": "wage"}, "wage"),
        (PEOPLE, {"columns": {"trade": ["driver"]}}, "baker"),
        (PEOPLE, {"columns": {"trade": {"mean": 0, "std": 1}}}, "trade"),
        (PEOPLE, {"columns": {"age": ["31"]}}, "age"),
        (PEOPLE, {"columns": {"debt": {"mean": 0, "std": 1}}}, "debt"),
        (PEOPLE, {"columns": {"debt": "number"}}, "debt"),
        (PEOPLE, {"columns": {"debt": []}}, "debt"),
        (PEOPLE, {"columns": {"debt": {"mean": "0", "std": 1}}}, "mean"),
        (PEOPLE, {"columns": {"debt": {"mean": 0, "deviation": 1}}}, "deviation"),
        (PEOPLE, {"columns": {"age": {"mean": 1, "std": 0}}}, "std"),
        (PEOPLE, {"drop": ["shoe"]}, "shoe"),
        (PEOPLE, {"path": "none.csv"}, "none.csv"),
        (PEOPLE, {"classes": ["low", "middle"]}, "classes"),
        (f"name,income\n{LONG}", {}, "name"),
        (f"name,income\n{LONG}", {"label": "name"}, "name"),
        ("a,income\n1,x\n2,\n3,y\n", {}, "no label"),
        ("a,income\n1,x\n2,x\n3,x\n", {}, "one class"),
        ("a,income\n,x\n,y\n,x\n", {}, "'a'"),
        ("born,income\n2001-05-01,x\n2002-06-07,y\n2003-01-01,x\n", {}, "'born'"),
        ("a,income\n1,x\ninf,y\n", {}, "'a'"),
        ("PAR1", {"path": "torn.parquet"}, "torn.parquet"),
    ],
)
def test_files_that_are_no_tables_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, arguments: dict[str, Any], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = arguments.get("path", "own.csv")
    if path != "none.csv":
        written(tmp_path / path, text)
    refused(name, **{"use": "table", "path": path, "label": "income", **arguments})


def test_gaps_line_breaks_and_codes_are_read_as_they_are_written(tmp_path: Path) -> None:
    rows = 'zip,note,size,income\n007,"two\nlines",1,low\n,é,,high\n010,?,x,low\n007,é,2,high\n'
    found = table(written(tmp_path / "odd.csv", rows), "income", test=0.25, categorical=["zip"])
    zips, notes, size = found.columns
    assert zips.categories == ("007", "010", MISSING) and notes.categories == ("two\nlines", "é", MISSING)
    assert size.categories == ("1", "2", "x", MISSING), "numbers beside texts are texts"
    for bad in ("", "a,a,income\n1,2,x\n", "a,income\n1,x,\n", "a,income\n1\n", "a,income\n\xff,x\nb,y\nb,x\n"):
        path = tmp_path / "bad.csv"
        path.write_bytes(bad.encode("latin-1"))
        with pytest.raises(SpecError):
            build({"use": "table", "path": str(path), "label": "income"}, "[data]", DATASET)


def test_the_census_is_the_same_everywhere_and_can_be_learned_from() -> None:
    one = census()
    one.check()
    assert (len(one.y), len(one.y_test)) == (3200, 800)
    assert 0.4 < float(one.y.double().mean()) < 0.6
    first = one.columns.written(one.columns.cells(one.x[0]).tolist())
    assert first == ["56", "11", "34", "12", "office", "permanent", "family", "east", "car", "female"]
    scaled = census("scaled").x.double()  # every entry has mean 0 and variance 1 over the training rows
    assert float(scaled.mean(0).abs().max()) < 1e-4 and float((scaled.std(0, correction=0) - 1).abs().max()) < 1e-4


def test_the_published_files_are_read_in_their_public_form(tmp_path: Path) -> None:
    line = "{}, Private, 77516, {}, 13, Divorced, Sales, Husband, White, Male, 2174, 0, 40, Cuba, {}\n"
    training = "".join(line.format(30 + i, "HS-grad" if i % 2 else "?", "<=50K" if i % 3 else ">50K") for i in range(8))
    written(tmp_path / "adult.data", training + "\n")
    written(tmp_path / "adult.test", "|1x3 Cross validator\n" + line.format(50, "HS-grad", ">50K."))
    found = adult(path=tmp_path)
    assert (len(found.y), len(found.y_test), found.y_test.tolist(), len(found.columns)) == (4, 1, [1], 14)
    assert len(adult(path=tmp_path, missing="keep").y) == 8
    credit = "A11 {} A34 A43 1169 A65 A75 4 A93 A101 4 A121 67 A143 A152 2 A173 1 A192 A201 {}\n"
    written(tmp_path / "german.data", "".join(credit.format(6 + i, 1 + i % 2) for i in range(10)))
    risks = german_credit(path=tmp_path)
    assert (len(risks.y), len(risks.y_test), len(risks.columns), risks.names) == (8, 2, 20, ("good", "bad"))
    with pytest.raises(SpecError):
        build({"use": "adult", "path": str(tmp_path / "nowhere")}, "[data]", DATASET)


@pytest.mark.parametrize("use", ["lenet", "convsmall", "tiny_bert"])
def test_a_network_of_other_examples_is_refused(use: str, make_federation: Callable[..., Any]) -> None:
    with pytest.raises(SpecError):
        _ = make_federation(data={"use": "census"}, model={"use": use}).model
    with pytest.raises(SpecError):
        _ = make_federation(model={"use": "ft_transformer"}).model


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
