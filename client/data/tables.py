"""Private tables: rows of numeric and categorical cells from CSV or Parquet, two published ones, and a made-up census.

A row is encoded as the network takes it: numbers scaled, categories one-hot. What that needs of the data (categories, means,
deviations, bounds) is declared in [data] columns, or else computed from the training rows, as `fitted` says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.components import coerce, settings_of
from fedgauge.client.data import census as made_up
from fedgauge.client.data.corpora import MOST_CLASSES, held_out, numbers
from fedgauge.client.data.images import Dataset
from fedgauge.client.data.table_files import EMPTY, check_columns, read_csv, read_parquet
from fedgauge.client.files import MOST_ARCHIVE
from fedgauge.client.local_data import data_folder
from fedgauge.client.models.columns import MISSING, Column, Columns

OneHot = Literal["plain", "scaled"]
Missing = Literal["keep", "drop"]
Cells = Mapping[str, np.ndarray]  # by column: float64 (NaN: missing), or texts as objects (None: missing)
MOST_CATEGORIES = 1000
FREE_TEXT = 0.5  # of a column's cells: with more different texts than that it has no categories
FEW = 50  # different texts that are categories in any case
DECIMALS = 4  # with which numbers are shown, at most


@dataclass(frozen=True, eq=False)
class Tabular(Dataset):
    """Rows x (N, D) float32, encoded by their columns, with classes y (N,) int64."""

    columns: Columns

    @property
    def offered(self) -> dict[str, Any]:
        return {**super().offered, "columns": self.columns}

    @property
    def fault(self) -> str:
        for name, x, y in (("x", self.x, self.y), ("x_test", self.x_test, self.y_test)):
            if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.columns.entries or not len(x):
                wanted = f"expected float32 (N, {self.columns.entries}), one row at least"
                return f"{name} is {x.dtype} of shape {tuple(x.shape)}, {wanted}"
            if not bool(x.isfinite().all()):
                return f"{name} has entries that are not finite"
            if fault := self.label_fault(name, y, x.shape[:1]):
                return fault
        return ""


# -------------------------------------------------------------------------------------------------------------- datasets


def table(
    path: Path,
    label: str,
    test: float = 0.2,
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
    columns: dict | None = None,  # type: ignore[type-arg]  # as TOML gives it; `_declared` checks what is in it
    classes: Sequence[str] | None = None,
    missing: Missing = "keep",
    one_hot: OneHot = "plain",
) -> Tabular:
    """A user's own table: a CSV file in UTF-8 whose first line names its columns, or a Parquet file.

    Args:
        label: the column of classes; every other one is a feature.
        test: the share of the rows that no client trains on, above 0 and below 1.
        categorical: columns whose numbers are codes of categories; columns of texts are categorical anyway.
        drop: columns to leave out, such as names or dates.
        columns: the features in order, each a list of its categories or a table of mean and std and, if wanted, low, high and
            optional (its cells may be missing). Default: all, with what is computed from the training rows. Parties with files of
            their own, as deployed clients, need the same declaration.
        classes: the names of all classes in order; default: those that occur, in alphabetical order.
        missing: keep missing cells as such, or drop rows that have any.
        one_hot: plain entries of 0 and 1, or scaled to mean 0 and variance 1.
    """
    texts = [*categorical, label]
    found = read_parquet(path) if path.suffix.lower() in (".parquet", ".pq") else read_csv(path, texts)
    check_columns(found, [label, *drop, *categorical, *(columns or ())], path)
    if not len(found):
        raise ValueError(f"{path} has no rows")
    chosen = [name for name in columns or found.column_names if name not in (label, *drop)]
    labels = _labels(found[label], label, path)
    features = {name: _cells(name, found[name], name in categorical, path) for name in chosen}
    if missing == "drop":
        whole = ~np.any([_absent(column) for column in features.values()], axis=0)
        features, labels = {name: column[whole] for name, column in features.items()}, labels[whole]
    names = tuple(classes) if classes is not None else tuple(sorted(set(labels.tolist())))
    if len(names) < 2:
        raise ValueError(f"{path}: column {label!r} has one class only: there is nothing to learn")
    y = torch.tensor(numbers(labels.tolist(), names, f"{path}: column {label!r}"), dtype=torch.int64)
    tested = held_out(len(y), test, path)
    agreed = _declared(columns) if columns is not None else _fitted(features, ~tested.numpy(), path, one_hot)
    x = agreed.rows(_numbered(features, agreed, path))
    fitted = tuple(key for key, given in (("columns", columns), ("classes", classes)) if given is None)
    parts = (x[~tested], y[~tested], x[tested], y[tested])
    return Tabular(path.stem, *parts, len(names), (), (), agreed, names=names, fitted=fitted)


def census(one_hot: OneHot = "plain", seed: int = 1) -> Tabular:
    """A made-up census: 4,000 people with ten features, their income above or below the median; no file needed.

    Args:
        one_hot: as for table.
        seed: of who these people are.
    """
    rows, labels = made_up.people(seed)
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
    folder = _folder("adult", path)
    parts = [_read_lines(folder / name, ADULT, ",") for name in ("adult.data", "adult.test")]
    cells = {name: np.concatenate([part[name] for part in parts]) for name in ADULT}
    tested = np.arange(len(cells["age"])) >= len(parts[0]["age"])
    labels = np.array([str(text).rstrip(".") == ">50K" for text in cells.pop("income")], dtype=np.int64)
    if missing == "drop":
        whole = ~np.any([_absent(column) for column in cells.values()], axis=0)
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
    cells = dict(_read_lines(_folder("german_credit", path) / "german.data", GERMAN, " "))
    risk = cells.pop("risk")
    tested = np.arange(len(risk)) >= len(risk) * 4 // 5
    return _published("german_credit", cells, (risk == 2).astype(np.int64), tested, ("good", "bad"), one_hot)


# --------------------------------------------------------------------------------------------------------------- reading


def _folder(name: str, path: Path | None) -> Path:
    local = data_folder()
    folder = path or (local / "tables" / name if local else None)
    if folder is None or not folder.is_dir():
        raise FileNotFoundError(
            f"{name} is not in the folder of local data: set FEDGAUGE_DATA to a folder with tables/{name}, or name the folder "
            "with path; census needs no file"
        )
    return folder


def _read_lines(path: Path, names: Sequence[str], delimiter: str) -> Cells:
    """A published file without a line of names."""
    found = read_csv(path, names=names, delimiter=delimiter)
    return {name: _cells(name, found[name], False, path) for name in names}


def _cells(name: str, column: Any, categorical: bool, path: Path) -> np.ndarray:
    """A column's cells; ValueError if they are neither numbers nor texts."""
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_null(kind):
        return np.full(len(column), None, object)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if number and not categorical:
        values: np.ndarray = column.cast("float64").to_numpy().copy()  # NaN where there is none
        if np.isinf(values).any():
            raise ValueError(
                f"{path}: column {name!r} has an infinite number in row {int(np.isinf(values).argmax()) + 1}"
            )
        return values
    if not (number or types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind)):
        raise ValueError(
            f'{path}: column {name!r} holds {kind}, expected numbers or categories: leave it out with drop = ["{name}"], or '
            "write it as one of them"
        )
    encoded = column.unify_dictionaries() if types.is_dictionary(column.type) else column.dictionary_encode()
    encoded = encoded.combine_chunks()
    texts = [None if word is None else str(word).strip() for word in encoded.dictionary.to_pylist()]
    different = np.array([*(None if text in EMPTY else text for text in texts), None], object)
    cells: np.ndarray = different[encoded.indices.fill_null(len(texts)).to_numpy()]  # each different text is kept once
    return cells


def _labels(column: Any, label: str, path: Path) -> np.ndarray:
    """The label column's texts; ValueError if it holds no classes."""
    labels = _cells(label, column, True, path)
    if (absent := _absent(labels)).any():
        raise ValueError(
            f"{path}: row {int(absent.argmax()) + 1} has no label in column {label!r}: leave such rows out"
        )
    different = len(set(labels))
    if different > MOST_CLASSES or different > max(FEW, FREE_TEXT * len(labels)):
        raise ValueError(
            f"{path}: the label {label!r} has {different} different values in {len(labels)} rows, expected classes: name "
            "another column, or put its values into classes first"
        )
    return labels


def _absent(column: np.ndarray) -> np.ndarray:
    return np.isnan(column) if column.dtype == np.float64 else np.array([cell is None for cell in column])


# --------------------------------------------------------------------------------------------------------------- columns


def _published(
    name: str, features: Cells, labels: np.ndarray, tested: np.ndarray, classes: Sequence[str], one_hot: OneHot
) -> Tabular:
    """A table that everybody has: what is computed from it tells nobody anything."""
    columns = _fitted(features, ~tested, Path(name), one_hot)
    x, y = columns.rows(_numbered(features, columns, Path(name))), torch.from_numpy(labels).long()
    held = torch.from_numpy(tested)
    return Tabular(name, x[~held], y[~held], x[held], y[held], len(classes), (), (), columns, names=tuple(classes))


def _fitted(features: Cells, trained: np.ndarray, path: Path, one_hot: OneHot) -> Columns:
    """The columns as the data show them: categories of all rows, statistics of the training rows."""
    if not features:
        raise ValueError(f"{path} has no column beside the label")
    return Columns(tuple(_column(name, column, trained, path, one_hot) for name, column in features.items()))


def _column(name: str, column: np.ndarray, trained: np.ndarray, path: Path, one_hot: OneHot) -> Column:
    absent = _absent(column)
    if absent.all():
        raise ValueError(f'{path}: column {name!r} is empty: leave it out with drop = ["{name}"]')
    if column.dtype == np.float64:
        every, own = column[~absent], column[trained & ~absent]
        if not len(own):
            raise ValueError(f"{path}: column {name!r} has no number in a training row")
        low, high = float(every.min()), float(every.max())
        whole = next((d for d in range(DECIMALS) if np.array_equal(np.round(every, d), every)), DECIMALS)
        spread = float(own.std()) or 1.0
        bounded = low < high
        return Column(
            name,
            mean=float(own.mean()),
            std=spread,
            low=low if bounded else None,
            high=high if bounded else None,
            decimals=whole,
            optional=bool(absent.any()),
        )
    texts = [MISSING if cell is None else cell for cell in column.tolist()]
    found = sorted(set(texts) - {MISSING}) + [MISSING] * bool(absent.any())
    if len(found) > MOST_CATEGORIES or len(found) > max(FEW, FREE_TEXT * len(texts)):
        raise ValueError(
            f"{path}: column {name!r} has {len(found)} different texts in {len(texts)} rows, so it is neither a number nor a "
            f'category: leave it out with drop = ["{name}"]'
        )
    place = {category: i for i, category in enumerate(found)}
    counts = np.bincount([place[text] for text, own in zip(texts, trained, strict=True) if own], minlength=len(found))
    shares = tuple((counts / max(counts.sum(), 1)).tolist()) if one_hot == "scaled" else ()
    return Column(name, tuple(found), shares=shares)


def _declared(columns: Mapping[str, Any]) -> Columns:
    """The columns of a declaration; ValueError says what is wrong in it."""
    if not columns:
        raise ValueError("columns declares no column")
    found = []
    for name, given in columns.items():
        where = f"columns: {name!r}"
        if isinstance(given, list | tuple) and given:
            found.append(Column(name, coerce(given, Sequence[str], where)))
        elif isinstance(given, Mapping):
            found.append(Column(name, decimals=DECIMALS // 2, **vars(settings_of(_Scale, given, where))))
        else:
            raise ValueError(f"{where} must be a list of its categories, or a table of mean and std, got {given!r}")
    return Columns(tuple(found))


@dataclass
class _Scale:
    """The declaration of a column of numbers, as in `Column`."""

    mean: float
    std: float
    low: float | None = None
    high: float | None = None
    optional: bool = False


def _numbered(features: Cells, columns: Columns, path: Path) -> Tensor:
    """The cells (N, F) of a table; ValueError where one is not of its column, or where they are too many once encoded."""
    found = []
    size = 4 * columns.entries * max((len(cells) for cells in features.values()), default=0)
    if size > MOST_ARCHIVE:
        raise ValueError(
            f"{path}: {columns.entries} entries a row make {size} bytes, above {MOST_ARCHIVE}: leave columns or rows out"
        )
    for column in columns:
        cells, where = features[column.name], f"{path}: column {column.name!r}"
        if column.numeric != (cells.dtype == np.float64):
            expected, got = ("numbers", "others") if column.numeric else ("categories", "numbers")
            hint = "" if column.numeric else f": name it in categorical = [{column.name!r}]"
            raise ValueError(f"{where} holds {got}, and {expected} are declared{hint}")
        if column.numeric:
            if (absent := _absent(cells)).any() and not column.optional:
                raise ValueError(f"{where} is declared not optional, and row {int(absent.argmax()) + 1} has none")
            found.append(torch.from_numpy(cells))
        else:
            texts = [MISSING if cell is None else cell for cell in cells]
            found.append(torch.tensor(numbers(texts, column.categories, where), dtype=torch.float64))
    return torch.stack(found, -1)
