"""Observed inputs as a scenario's examples: images, rows of numbers, sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedgauge.client.data.corpora import targets


@dataclass(frozen=True)
class Images:
    """Conversion to pixels in [0, 1]: pixel = input * std + mean."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    origin: str

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray], normalised: Sequence[Sequence[float]] | None) -> "Images":
        """Return the normalisation of images: that of the app's Normalize, else the range of all observed values."""
        low, high = min(float(x.min()) for x in arrays), max(float(x.max()) for x in arrays)
        channels = arrays[0].shape[1]
        if normalised is not None:
            mean, std = (tuple(list(v) * channels if len(v) == 1 else v) for v in normalised)
            if len(mean) == channels and min(low * s + m for m, s in zip(mean, std, strict=True)) > -0.01:
                return cls(mean, std, "torchvision's Normalize, as the app calls it")
        if low >= 0 and high <= 1:
            return cls((0.0,) * channels, (1.0,) * channels, "inputs are in [0, 1]")
        scale = high - low or 1.0
        return cls((-low / scale,) * channels, (1 / scale,) * channels, f"inputs are in [{low:.4g}, {high:.4g}]")

    @property
    def data(self) -> dict[str, Any]:
        """Return the lines of [data]."""
        return {"use": "npz", "mean": list(self.mean), "std": list(self.std)}

    def examples(self, x: np.ndarray) -> np.ndarray:
        """Return pixels in [0, 1] (N, C, H, W)."""
        shape = (1, -1, 1, 1)
        mean, std = np.array(self.mean).reshape(shape), np.array(self.std).reshape(shape)
        return np.asarray((x.astype(np.float64) * std + mean).clip(0, 1), np.float32)

    def stored(self, x: np.ndarray) -> np.ndarray:
        """Return bytes, as the archive has them."""
        return np.round(255 * self.examples(x)).astype(np.uint8)


@dataclass(frozen=True)
class Rows:
    """Rows of numbers, as the network takes them."""

    origin = "inputs are vectors of numbers"
    data = {"use": "rows"}

    def examples(self, x: np.ndarray) -> np.ndarray:
        """Return rows (N, F)."""
        return x.astype(np.float32)

    stored = examples


@dataclass(frozen=True)
class Sentences:
    """Token ids of a language model that was saved with its tokenizer.

    Attributes:
        length: of the longest sentence.
        next_token: each word is learnt from those before it.
    """

    language: Mapping[str, Any]
    length: int
    next_token: bool
    origin = "the network takes token ids"

    @property
    def data(self) -> dict[str, Any]:
        """Return the lines of [data]."""
        task = {"task": "next_token"} if self.next_token else {}
        return {"use": "token_ids", "tokenizer_folder": self.language["folder"], **task}

    def examples(self, x: np.ndarray) -> np.ndarray:
        """Return sentences (N, L), padded to one length."""
        room = ((0, 0), (0, self.length - x.shape[1]))
        return np.pad(x.astype(np.int64), room, constant_values=self.language["pad"])

    stored = examples

    def labels(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the classes of sentences, or their words."""
        return targets(torch.from_numpy(x), self.language["pad"]).numpy() if self.next_token else y


Form = Images | Rows | Sentences


def form_of(
    arrays: Sequence[np.ndarray],
    normalised: Sequence[Sequence[float]] | None,
    language: Mapping[str, Any] | None,
    output: Sequence[int],
) -> Form | None:
    """Return the form of observed inputs; None if no attack fits it."""
    kinds = {(x.ndim, np.issubdtype(x.dtype, np.floating)) for x in arrays}
    if kinds == {(2, False)} and language is not None:
        return Sentences(language, max(x.shape[1] for x in arrays), len(output) == 3)
    if len({x.shape[1:] for x in arrays}) != 1:
        return None
    if kinds == {(2, True)}:
        return Rows()
    return Images.of(arrays, normalised) if kinds == {(4, True)} and arrays[0].shape[1] in (1, 3) else None
