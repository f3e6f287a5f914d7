"""A user's own arrays: floats of any shape, rows of numbers, and sentences as token ids. Nothing is unpickled.

Archives have `x` and `y`, and `x_test` and `y_test` if there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.components import Count, Part
from fedgauge.client.data.corpora import Text, parted, targets
from fedgauge.client.data.dataset import Dataset, Parts
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

    def in_units_of(self, rows: Tensor) -> "Arrays":
        public = self.x[rows].transpose(0, 1).flatten(1)
        low, span = public.amin(1), public.amax(1) - public.amin(1)
        span = torch.where(span > 0, span, 1.0)
        by_channel = (len(low), *[1] * (len(self.shape) - 1))
        x, x_test = ((t - low.view(by_channel)) / span.view(by_channel) for t in (self.x, self.x_test))
        return replace(self, x=x, x_test=x_test, mean=tuple((-low / span).tolist()), std=tuple((1 / span).tolist()))


def arrays(path: Path, classes: Count | None = None, test: Part = 0.2) -> Arrays:
    """Arrays of floats as a network takes them: x (N, ...) of any shape, such as windows of sensors. Nothing is scaled.

    Labels y are classes (N,), multi-label (N, K) of 0 and 1, numbers (floats), or a mask with a class for each pixel. Without y,
    the loss reads no labels.

    Args:
        path: a NumPy archive.
        classes: their number; default: largest label + 1, or the labels or numbers of an example.
        test: without x_test: the share of the examples that no client trains on.

    Raises:
        ValueError: x is not of floats, or labels are missing or too few.
    """
    x, y, x_test, y_test = read_parts(path, test, needed=("x",))
    every = classes or count_classes(y, y_test)
    return Arrays(path.stem, _single(x), y, _single(x_test), y_test, every, (), ())


def rows(path: Path, classes: Count | None = None, test: Part = 0.2) -> Tabular:
    """Rows of numbers as a network takes them: x (N, F), y labels. Nothing is scaled.

    Neighbouring entries become one categorical column if each row has one 1 there and otherwise 0.

    Args:
        path: a NumPy archive.
        classes: their number; default: largest label + 1.
        test: without x_test: the share of the rows that no client trains on.
    """
    x, y, x_test, y_test = read_parts(path, test)
    columns = Columns(tuple(_columns(torch.cat([x, x_test]).flatten(1).numpy())))
    every = classes or count_classes(y, y_test)
    return Tabular(path.stem, _single(x), y, _single(x_test), y_test, every, (), (), columns)


def token_ids(
    path: Path, tokenizer_folder: Path, task: Task = "classification", classes: Count | None = None, test: Part = 0.2
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
    x, y, x_test, y_test = (t if t.is_floating_point() else t.long() for t in read_parts(path, test))
    if task == "next_token":
        y, y_test, classes = targets(x, words.pad), targets(x_test, words.pad), words.size
    return Text(path.stem, x, y, x_test, y_test, classes or count_classes(y, y_test), (), (), words, task)


def read_parts(path: Path, test: float, needed: Sequence[str] = ("x", "y")) -> Parts:
    """Return x, y, x_test and y_test of an archive; without y all labels are 0. Other arrays are not read.

    Args:
        test: without x_test: the share of the examples that becomes the test part.
        needed: arrays that must be there.

    Raises:
        ValueError: arrays are missing, or do not hold numbers.
    """
    stored = {
        name: array.astype(array.dtype.newbyteorder("="), copy=False)
        for name, array in read_npz(path).items()
        if name in ("x", "y", "x_test", "y_test")
    }
    whole = stored.keys() >= set(needed) and ("x_test" in stored) == ("y" in stored and "y_test" in stored)
    numbers = all(array.dtype.kind in "biuf" and array.dtype.itemsize <= 8 for array in stored.values())
    examples = {array.shape[1:] for name, array in stored.items() if name in ("x", "x_test")}
    if not whole or not numbers or examples & {()} or len(examples) > 1 or not all(a.ndim for a in stored.values()):
        found = ", ".join(f"{name} of {array.dtype} {array.shape}" for name, array in stored.items()) or "none of them"
        raise ValueError(
            f"{path} needs arrays of numbers of at most 64 bits ({', '.join(needed)}; both or none of x_test and y_test), with an "
            f"entry for each example, which all have one shape, and has {found}"
        )
    x = torch.from_numpy(stored["x"])
    labels = [stored[name] for name in ("y", "y_test") if name in stored]
    columns = all(part.dtype.kind in "iu" and part.shape[1:] == (1,) for part in labels)
    if columns and max((part.max(initial=0) for part in labels), default=0) > 1:  # Keras' classes
        stored |= {name: stored[name][:, 0] for name in ("y", "y_test") if name in stored}
    y = _labels(stored["y"], x) if "y" in stored else torch.zeros(len(x), dtype=torch.int64)
    if len(x) != len(y):
        raise ValueError(f"{path} has {len(x)} examples and {len(y)} labels")
    if "x_test" not in stored:
        return parted(x, y, test, path)
    return x, y, torch.from_numpy(stored["x_test"]), _labels(stored["y_test"], x)


def count_classes(y: Tensor, y_test: Tensor) -> int:
    """Count the classes of labels, or the findings or numbers of an example."""
    if y.is_floating_point():
        return y.shape[1] if y.dim() > 1 else 1
    return int(torch.cat([y, y_test]).max()) + 1


def _labels(array: np.ndarray, x: Tensor) -> Tensor:
    """Classes (N,), or masks with a class for each place of x (N, C, ...) as int64; all others as float32."""
    classes = array.dtype.kind != "f" and array.ndim == 1
    classes |= array.dtype.kind in "iu" and array.ndim == x.dim() - 1
    return torch.from_numpy(array.astype(np.int64 if classes else np.float32))


def _single(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x


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
