"""A user's own arrays: floats of any shape, rows of numbers, and sentences as token ids. Nothing is unpickled.

Archives have `x` and `y`, and `x_test` and `y_test` if there are.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.data.corpora import Text, held_out, targets
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data.tables import Tabular
from fedgauge.client.data_folder import read_npz
from fedgauge.client.models.columns import Column, Columns
from fedgauge.client.models.tokenizer import Task, load_tokenizer


@dataclass(frozen=True, eq=False)
class Arrays(Dataset):
    """Arrays x (N, C, ...) float32 as a network takes them: windows (C, L), images (C, H, W), volumes (C, D, H, W), vectors.

    `in_units_of` scales the range of public examples to 0 to 1, by channel; mean and std undo it.
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    dimensions: ClassVar[int] = 0

    def check(self) -> None:
        super().check()
        for name, x in (("x", self.x), ("x_test", self.x_test)):
            if bad := (~x.flatten(1).isfinite().all(1)).nonzero().flatten().tolist():
                raise ValueError(
                    f"{len(bad)} examples of {name} hold NaN or infinity, the first is {bad[0]}: leave them out"
                )

    def in_units_of(self, rows: Tensor) -> "Arrays":
        public = self.x[rows].transpose(0, 1).flatten(1)
        low, span = public.amin(1), public.amax(1) - public.amin(1)
        span = torch.where(span > 0, span, 1.0)
        by_channel = (len(low), *[1] * (len(self.shape) - 1))
        x, x_test = ((t - low.view(by_channel)) / span.view(by_channel) for t in (self.x, self.x_test))
        return replace(self, x=x, x_test=x_test, mean=tuple((-low / span).tolist()), std=tuple((1 / span).tolist()))


def arrays(path: Path, classes: int | None = None, test: float = 0.2) -> Arrays:
    """Arrays of floats as a network takes them: x (N, ...) of any shape, such as windows of sensors. Nothing is scaled.

    Labels y are classes (N,), multi-label (N, K) of 0 and 1, numbers (floats), or a mask with a class for each pixel. Without y,
    the loss reads no labels.

    Args:
        path: a NumPy archive.
        classes: their number; default: largest label + 1, or the labels or numbers of an example.
        test: without x_test: the share of the examples that no client trains on.
    """
    stored = read_npz(path)
    if "x" not in stored or ("x_test" in stored) != ("y" in stored and "y_test" in stored):
        raise ValueError(f"{path} needs x, and both or none of x_test and y_test; it has {', '.join(stored)}")
    if stored["x"].ndim < 2 or not np.issubdtype(stored["x"].dtype, np.floating):
        raise ValueError(f"{path}: x is {stored['x'].dtype} of shape {stored['x'].shape}, expected floats (N, ...)")
    x = torch.from_numpy(stored["x"]).float()
    y = _labels(stored["y"], x, path) if "y" in stored else torch.zeros(len(x), dtype=torch.int64)
    if len(x) != len(y):
        raise ValueError(f"{path} has {len(x)} examples and {len(y)} labels")
    if "x_test" in stored:
        x_test = torch.from_numpy(stored["x_test"]).float()
        parts = (x, y, x_test, _labels(stored["y_test"], x_test, path))
    else:
        tested = held_out(len(x), test, path)
        parts = (x[~tested], y[~tested], x[tested], y[tested])
    if y.is_floating_point():
        classes = y.shape[1] if y.dim() > 1 else 1
    every = classes or int(torch.cat([parts[1], parts[3]]).max()) + 1
    return Arrays(path.stem, *parts, every, (), ())


def _labels(array: np.ndarray, x: Tensor, path: Path) -> Tensor:
    """Classes (N,) or masks with a class for each place of x (N, C, ...) as int64; all others as float32."""
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise ValueError(f"{path}: y has dtype {array.dtype}, expected numbers")
    classes = array.dtype.kind in "iu" and (array.ndim == 1 or array.ndim == x.dim() - 1 > 1)
    y = torch.from_numpy(array.astype(np.int64 if classes else np.float32))
    return y


def rows(path: Path, classes: int | None = None, test: float = 0.2) -> Tabular:
    """Rows of numbers as a network takes them: x (N, F), y labels. Nothing is scaled.

    Neighbouring entries become one categorical column if each row has one 1 there and otherwise 0.

    Args:
        path: a NumPy archive.
        classes: their number; default: largest label + 1.
        test: without x_test: the share of the rows that no client trains on.
    """
    parts = _read(path, np.floating, test)
    columns = Columns(tuple(_columns(torch.cat([parts[0], parts[2]]).numpy())))
    labels = torch.cat([parts[1], parts[3]])
    x, y, x_test, y_test = parts
    if labels.is_floating_point():
        classes = labels.shape[1] if labels.dim() == 2 else 1
    return Tabular(path.stem, x.float(), y, x_test.float(), y_test, classes or int(labels.max()) + 1, (), (), columns)


def token_ids(
    path: Path, tokenizer_folder: Path, task: Task = "classification", classes: int | None = None, test: float = 0.2
) -> Text:
    """Sentences as a network takes them: x (N, L) token ids, padded on the right, y integers (N,).

    Args:
        path: a NumPy archive.
        tokenizer_folder: the folder of the tokenizer that made the ids.
        task: what is learnt: the class of a sentence, or each word from those before it (y is then not read).
        classes: their number; default: largest label + 1.
        test: without x_test: the share of the sentences that no client trains on.
    """
    words = load_tokenizer(tokenizer_folder)
    x, y, x_test, y_test = _read(path, np.integer, test)
    if task == "next_token":
        y, y_test, classes = targets(x, words.pad), targets(x_test, words.pad), words.size
    most = classes or int(torch.cat([y, y_test]).max()) + 1
    return Text(path.stem, x, y, x_test, y_test, most, (), (), words, task)


def _read(path: Path, kind: type, test: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, y, x_test and y_test; ValueError if x has another form or kind of numbers."""
    arrays = read_npz(path)
    if not {"x", "y"} <= arrays.keys() or ("x_test" in arrays) != ("y_test" in arrays):
        raise ValueError(f"{path} needs x and y, and both or none of x_test and y_test; it has {', '.join(arrays)}")
    if arrays["x"].ndim != 2 or not np.issubdtype(arrays["x"].dtype, kind):
        raise ValueError(
            f"{path}: x is {arrays['x'].dtype} of shape {arrays['x'].shape}, expected {kind.__name__} (N, F)"
        )
    found = {name: torch.from_numpy(array) for name, array in arrays.items() if name in ("x", "y", "x_test", "y_test")}
    labels = {name: t.float() if t.is_floating_point() else t.long() for name, t in found.items()}
    x, y = found["x"], labels["y"]
    if x.dtype != torch.float32 and not x.is_floating_point():
        x = x.long()
    if "x_test" in found:
        return x, y, found["x_test"].to(x.dtype), labels["y_test"]
    tested = held_out(len(x), test, path)
    return x[~tested], y[~tested], x[tested], y[tested]


def _columns(x: np.ndarray) -> list[Column]:
    """Columns of rows (N, F), named by their first entry."""
    binary = ((x == 0) | (x == 1)).all(0)
    found, k = list[Column](), 0
    while k < x.shape[1]:
        end = k + int(np.argmin([*binary[k:], False]))  # of the entries that are 0 or 1
        ones = x[:, k:end].cumsum(1)
        whole = np.flatnonzero((ones == 1).all(0))
        if len(whole) and (width := int(whole[0]) + 1) > 1:
            found.append(Column(f"x{k}", tuple(f"x{k + i}" for i in range(width))))
            k += width
            continue
        low, high, spread = float(x[:, k].min()), float(x[:, k].max()), float(x[:, k].std())
        least, most = (low, high) if low < high else (None, None)
        found.append(Column(f"x{k}", low=least, high=most, decimals=3, spread=spread or None))
        k += 1
    return found
