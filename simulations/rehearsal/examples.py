"""Observed inputs as a scenario's examples: rows of numbers, images, other arrays, sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Form:
    """Conversion of observed inputs."""

    data: Mapping[str, Any]  # lines of [data]
    origin: str  # of these lines
    language: Mapping[str, Any] | None = None  # what `save_language` returned, if inputs are token ids
    next_token: bool = False  # each word is learnt from those before it

    def examples(self, x: np.ndarray) -> np.ndarray:
        """Return examples as the truth has them: rows (N, F), arrays (N, ...), token ids (N, L), images in [0, 1]."""
        if "mean" not in self.data:
            return x.astype(np.int64 if self.language else np.float32)
        mean, std = (np.array(self.data[key]).reshape(1, -1, 1, 1) for key in ("mean", "std"))
        return np.asarray((x.astype(np.float64) * std + mean).clip(0, 1), np.float32)

    def stored(self, x: np.ndarray) -> np.ndarray:
        """Return examples as the archive of public data has them: images in bytes."""
        return np.round(255 * self.examples(x)).astype(np.uint8) if "mean" in self.data else self.examples(x)


def form_of(
    arrays: Sequence[np.ndarray],
    normalised: Sequence[Sequence[float]] | None,
    language: Mapping[str, Any] | None,
    output: Sequence[int],
) -> Form | None:
    """Return the form of observed inputs; None if no attack fits it.

    Images with a mask for each are arrays: the archives of images have no masks.

    Args:
        normalised: mean and std of the app's Normalize.
        language: what `save_language` returned.
        output: shape of the network's output.
    """
    kinds = {(x.ndim, np.issubdtype(x.dtype, np.floating)) for x in arrays}
    if kinds == {(2, False)} and language is not None:
        data = {"use": "token_ids", "tokenizer_folder": language["folder"]}
        next_token = language["next_token"]
        if next_token:
            data["task"] = "next_token"
        return Form(data, "the network takes token ids", language, next_token)
    if len({x.shape[1:] for x in arrays}) != 1:
        return None
    if kinds == {(2, True)}:
        return Form({"use": "rows"}, "inputs are vectors of numbers")
    if kinds == {(4, True)} and arrays[0].shape[1] in (1, 3) and len(output) == 2:
        return _images(arrays, normalised)
    return Form({"use": "arrays"}, "inputs are arrays of numbers") if all(floats for _, floats in kinds) else None


def _images(arrays: Sequence[np.ndarray], normalised: Sequence[Sequence[float]] | None) -> Form:
    """Return the normalisation of images: that of the app's Normalize, else the range of all observed values."""
    low, high = min(float(x.min()) for x in arrays), max(float(x.max()) for x in arrays)
    channels, scale = arrays[0].shape[1], high - low or 1.0
    mean, std, origin = -low / scale, 1 / scale, f"inputs are in [{low:.4g}, {high:.4g}]"
    if low >= 0 and high <= 1:
        mean, std, origin = 0.0, 1.0, "inputs are in [0, 1]"
    if normalised is not None:
        of_app = [list(v) * channels if len(v) == 1 else list(v) for v in normalised]
        if len(of_app[0]) == channels and min(low * s + m for m, s in zip(*of_app, strict=True)) > -0.01:
            data = {"use": "npz", "mean": of_app[0], "std": of_app[1]}
            return Form(data, "torchvision's Normalize, as the app calls it")
    return Form({"use": "npz", "mean": [mean] * channels, "std": [std] * channels}, origin)
