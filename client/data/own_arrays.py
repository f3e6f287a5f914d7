"""A user's own arrays that hold no images: rows of numbers, and sentences as token ids. Nothing is unpickled.

Archives have `x` and `y`, and `x_test` and `y_test` if there are.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.data.corpora import Text, held_out, targets
from fedgauge.client.data.tables import Tabular
from fedgauge.client.local_data import read_npz
from fedgauge.client.models.columns import Column, Columns
from fedgauge.client.models.tokenizer import Task, load_tokenizer


def rows(path: Path, classes: int | None = None, test: float = 0.2) -> Tabular:
    """Rows of numbers as a network takes them: x (N, F), y labels. Nothing is scaled.

    Neighbouring entries become one categorical column if each row has one 1 there and otherwise 0.

    Args:
        path: a NumPy archive.
        classes: their number; default: the largest label and 1.
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
        classes: their number; default: the largest label and 1.
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
