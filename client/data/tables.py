"""Private tables: rows of numeric and categorical cells from CSV or Parquet, two published ones, and a made-up census.

A row is encoded as the network takes it: numbers scaled, categories one-hot. The categories, means, deviations and
bounds are declared in [data] columns, or else computed from the training rows by `fitted`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.components import Part, coerce, settings_of
from fedgauge.client.data import census as made_up
from fedgauge.client.data.corpora import held_out, numbers
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data.table_files import EMPTY, read_table
from fedgauge.client.data_folder import data_folder
from fedgauge.client.files import reading
from fedgauge.client.models.columns import MISSING, Column, Columns

OneHot = Literal["plain", "scaled"]
Missing = Literal["keep", "drop"]
Target = Literal["auto", "class", "number"]
Cells = Mapping[str, np.ndarray]  # by column: float64 (NaN: missing), or texts as objects (None: missing)
MOST_CATEGORIES = 1000
FEW = 50  # different texts that are categories in any case; more of them than half of the rows are free text
DECIMALS = 4  # with which numbers are shown, at most


@dataclass(frozen=True, eq=False)
class Tabular(Dataset):
    """Rows x (N, D) float32, encoded by their columns, with classes y (N,) int64 or numbers y (N,) float32."""

    dtype: ClassVar[torch.dtype] = torch.float32
    dimensions: ClassVar[int] = 2

    further: ClassVar[tuple[str, ...]] = ("columns",)

    columns: Columns

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.x.shape[1] != self.columns.entries:
            yield f"rows must have {self.columns.entries} entries, as the columns say"


def table(
    path: Path,
    label: str,
    test: Part = 0.2,
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
    columns: dict | None = None,  # type: ignore[type-arg]  # as TOML gives it
    classes: Sequence[str] | None = None,
    missing: Missing = "keep",
    one_hot: OneHot = "plain",
    target: Target = "auto",
) -> Tabular:
    """A CSV file in UTF-8 with the columns' names in its first line, or a Parquet file.

    Args:
        label: the column of classes, or of the numbers to predict; every other one is a feature.
        test: the share of the rows that no client trains on, above 0 and below 1.
        categorical: columns of numeric codes of categories; text columns are always categorical.
        drop: columns to leave out, such as names or dates.
        columns: the features in order, each a list of its categories or a table of mean and std and, if wanted, low, high and
            optional (its cells may be missing). Default: all, with what is computed from the training rows. Parties with files of
            their own, as deployed clients, need the same declaration.
        classes: the names of all classes in order; default: those that occur, in alphabetical order.
        missing: keep missing cells as such, or drop rows that have any.
        one_hot: plain entries of 0 and 1, or scaled to mean 0 and variance 1.
        target: whether the label is a class or a number; auto: a number where it has too many different ones for classes.

    Raises:
        ValueError: a row has no label, or all labels are equal.
    """
    texts = [*categorical, label]
    found = read_table(path, texts, needed=[label, *drop, *categorical, *(columns or ())])
    chosen = [name for name in columns or found.column_names if name not in (label, *drop)]
    features = {name: _cells(name, found[name], name in categorical, path) for name in chosen}
    labels = _cells(label, found[label], True, path)
    if _absent(labels).any():
        raise ValueError(f"{path}: some rows have no label in column {label!r}: leave such rows out")
    if missing == "drop":
        whole = _whole(features)
        features, labels = {name: column[whole] for name, column in features.items()}, labels[whole]
    tested = held_out(len(labels), test, path)
    agreed = _declared(columns) if columns is not None else _fitted(features, ~tested.numpy(), path, one_hot)
    fitted: tuple[str, ...] = () if columns is not None else ("columns",)
    if target == "number" or (target == "auto" and classes is None and _are_numbers(labels)):
        with reading(f"{path}: column {label!r}", "a column of numbers"):
            y = torch.from_numpy(labels.astype(np.float64)).float()
        return replace(_parted(path, features, agreed, y, tested, ()), classes=1, fitted=fitted)
    names = _categories(labels, label, path) if classes is None else tuple(classes)
    y = torch.tensor(numbers(labels.tolist(), names, f"{path}: column {label!r}"), dtype=torch.int64)
    fitted += () if classes is not None else ("classes",)
    return replace(_parted(path, features, agreed, y, tested, names), fitted=fitted)


@cache  # each federation of a process reads the same people
def census(one_hot: OneHot = "plain") -> Tabular:
    """A made-up census of 4,000 people: ten features, income above or below the median; no file needed.

    Args:
        one_hot: as for table.
    """
    rows, labels = made_up.people()
    features = {
        name: np.array([row[name] for row in rows], np.float64 if name in made_up.NUMERIC else object)
        for name in made_up.NAMES
    }
    tested = np.arange(len(rows)) >= len(rows) * 4 // 5
    return _published("census", features, np.array(labels), tested, made_up.CLASSES, one_hot)


ADULT = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)


def adult(one_hot: OneHot = "scaled", missing: Missing = "drop", path: Path | None = None) -> Tabular:
    """Adult (Becker and Kohavi, 1996), whether 45,222 people earn more than 50,000 dollars: local adult.data and adult.test.

    Args:
        one_hot: as for table; scaled as in TabLeak.
        missing: as for table; rows with missing cells are dropped as in TabLeak.
        path: the folder of the two files; default: tables/adult in the folder of local data.
    """
    parts = [_read_lines("adult", path, name, ADULT, ",") for name in ("adult.data", "adult.test")]
    cells = {name: np.concatenate([part[name] for part in parts]) for name in ADULT}
    tested = np.arange(len(cells["age"])) >= len(parts[0]["age"])
    labels = np.array([str(text).rstrip(".") == ">50K" for text in cells.pop("income")], dtype=np.int64)
    if missing == "drop":
        whole = _whole(cells)
        cells, labels, tested = {name: column[whole] for name, column in cells.items()}, labels[whole], tested[whole]
    return _published("adult", cells, labels, tested, ("<=50K", ">50K"), one_hot)


GERMAN = (
    *("status", "duration", "history", "purpose", "amount", "savings", "employment", "rate", "personal", "debtors"),
    *("residence", "property", "age", "plans", "housing", "credits", "job", "liable", "telephone", "foreign", "risk"),
)


def german_credit(one_hot: OneHot = "scaled", path: Path | None = None) -> Tabular:
    """German credit (Hofmann, 1994), whether 1,000 people are good or bad risks: local german.data.

    Args:
        one_hot: as for table; scaled as in TabLeak.
        path: the folder of the file; default: tables/german_credit in the folder of local data.
    """
    cells = dict(_read_lines("german_credit", path, "german.data", GERMAN, " "))
    risk = cells.pop("risk")
    tested = np.arange(len(risk)) >= len(risk) * 4 // 5
    return _published("german_credit", cells, (risk == 2).astype(np.int64), tested, ("good", "bad"), one_hot)


def _read_lines(dataset: str, folder: Path | None, file: str, names: Sequence[str], delimiter: str) -> Cells:
    """A published file without a line of names."""
    local = data_folder()
    folder = folder or (local / "tables" / dataset if local else None)
    if folder is None or not folder.is_dir():
        raise FileNotFoundError(
            f"{dataset} is not in the folder of local data: set FEDGAUGE_DATA to a folder with tables/{dataset}, or name the "
            "folder with path; census needs no file"
        )
    found = read_table(folder / file, names=names, delimiter=delimiter)
    return {name: _cells(name, found[name], False, folder) for name in names}


def _cells(name: str, column: Any, categorical: bool, path: Path) -> np.ndarray:
    """A column's cells; ValueError if they are neither numbers nor texts."""
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if number and not categorical:
        values: np.ndarray = column.cast("float64", safe=False).to_numpy().copy()  # NaN where there is none
        if np.isinf(values).any():
            raise ValueError(f"{path}: column {name!r} has an infinite number")
        return values
    if types.is_temporal(kind) and not categorical:
        raise ValueError(f"{path}: column {name!r} has dates or times: leave it out by drop, or name it in categorical")
    if types.is_binary(kind):  # what pyarrow makes of a CSV file's text in another encoding
        raise ValueError(f"{path}: column {name!r} holds no text in UTF-8")
    texts = [None if cell is None else str(cell).strip() for cell in column.to_pylist()]
    return np.array([None if text in EMPTY else text for text in texts], object)


def _categories(column: np.ndarray, name: str, path: Path) -> tuple[str, ...]:
    """The different texts of a column, in alphabetical order; ValueError if they are too many for categories."""
    found = tuple(sorted(set(column[~_absent(column)].tolist())))
    if len(found) > min(MOST_CATEGORIES, max(FEW, len(column) / 2)):
        raise ValueError(
            f"{path}: column {name!r} has {len(found)} different texts, expected numbers or categories: leave it out by drop"
        )
    return found


def _are_numbers(labels: np.ndarray) -> bool:
    """Return whether a column of labels holds numbers, and too many different ones for classes."""
    try:
        labels.astype(np.float64)
    except ValueError:
        return False
    return len(set(labels.tolist())) > min(MOST_CATEGORIES, max(FEW, len(labels) / 2))


def _whole(columns: Cells) -> np.ndarray:
    whole: np.ndarray = ~np.any([_absent(column) for column in columns.values()], axis=0)
    return whole


def _absent(column: np.ndarray) -> np.ndarray:
    return np.isnan(column) if column.dtype == np.float64 else np.array([cell is None for cell in column])


def _published(
    name: str, features: Cells, labels: np.ndarray, tested: np.ndarray, classes: Sequence[str], one_hot: OneHot
) -> Tabular:
    """Build a public table: figures computed from it reveal no secret."""
    columns, path = _fitted(features, ~tested, Path(name), one_hot), Path(name)
    return _parted(path, features, columns, torch.from_numpy(labels).long(), torch.from_numpy(tested), tuple(classes))


def _parted(
    path: Path, features: Cells, columns: Columns, y: Tensor, tested: Tensor, classes: tuple[str, ...]
) -> Tabular:
    """The rows of a table, divided into those for training and for test."""
    x = columns.rows(_numbered(features, columns, path))
    parts = (x[~tested], y[~tested], x[tested], y[tested])
    return Tabular(path.stem, *parts, len(classes), (), (), columns, names=classes)


def _fitted(features: Cells, trained: np.ndarray, path: Path, one_hot: OneHot) -> Columns:
    """The columns as the data show them: categories of all rows, statistics of the training rows."""
    if not features:
        raise ValueError(f"{path} has no column other than the label")
    return Columns(tuple(_column(name, column, trained, path, one_hot) for name, column in features.items()))


def _column(name: str, column: np.ndarray, trained: np.ndarray, path: Path, one_hot: OneHot) -> Column:
    absent = _absent(column)
    if absent[trained].all():
        raise ValueError(f'{path}: column {name!r} is empty in the training rows: drop = ["{name}"] leaves it out')
    if column.dtype == np.float64:
        every, own = column[~absent], column[trained & ~absent]
        low, high = float(every.min()), float(every.max())
        least, most = (low, high) if low < high else (None, None)
        decimals = next((d for d in range(DECIMALS) if np.array_equal(np.round(every, d), every)), DECIMALS)
        spread, optional = float(own.std()) or 1.0, bool(absent.any())
        return Column(name, (), float(own.mean()), spread, least, most, decimals, optional)
    texts = [MISSING if cell is None else cell for cell in column.tolist()]
    found = [k for k in _categories(column, name, path) if k != MISSING] + [MISSING] * (MISSING in texts)
    if one_hot == "plain":
        return Column(name, tuple(found))
    counts = np.bincount(
        [found.index(text) for text, own in zip(texts, trained, strict=True) if own], minlength=len(found)
    )
    return Column(name, tuple(found), shares=tuple((counts / counts.sum()).tolist()))


def _declared(columns: Mapping[str, Any]) -> Columns:
    """The columns of a declaration; ValueError says what is wrong in it."""
    found = []
    for name, given in columns.items():
        where = f"columns: {name!r}"
        if isinstance(given, list | tuple) and given:
            found.append(Column(name, coerce(given, Sequence[str], where)))
        elif isinstance(given, Mapping):
            found.append(settings_of(Column, {"decimals": DECIMALS // 2, **given, "name": name}, where))
        else:
            raise ValueError(f"{where} must be a list of its categories, or a table of mean and std, got {given!r}")
    return Columns(tuple(found))


def _numbered(features: Cells, columns: Columns, path: Path) -> Tensor:
    """The cells (N, F) of a table; ValueError where one is not of its column."""
    found = []
    for column in columns:
        cells, where = features[column.name], f"{path}: column {column.name!r}"
        if column.numeric != (cells.dtype == np.float64):
            raise ValueError(
                f"{where} is declared as {'numbers and holds text' if column.numeric else 'categories and holds numbers'}"
            )
        if column.numeric:
            if _absent(cells).any() and not column.optional:
                raise ValueError(f"{where} is declared not optional, and has missing cells")
            found.append(torch.from_numpy(cells))
        else:
            texts = [MISSING if cell is None else cell for cell in cells]
            found.append(torch.tensor(numbers(texts, column.categories, where), dtype=torch.float64))
    return torch.stack(found, -1)
