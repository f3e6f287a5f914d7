"""Datasets: training and test examples with their labels. The test examples are seen by no client."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedgauge.client.label_kinds import label_faults
from fedgauge.client.models.losses import IGNORED
from fedgauge.client.update import Batch

Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # x, y, x_test, y_test


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images x (N, C, H, W) uint8 and labels y, for training and for test, with per-channel mean and std.

    Labels are classes (N,) int64, multi-label (N, K) of 0 and 1 as floats, or numbers (N,) or (N, K); classes is then K, or 1.
    A mask is a class for each pixel, (N, H, W) int64, or 0 and 1 as floats (N, K, H, W).

    Data of other kinds derive from it, with other x and y, and no mean and std. names: of the classes, if they have names.
    fitted: the arguments that were not given but computed from these examples: one example may then change how all others
    look, which no epsilon covers. A published dataset's constants are given.

    Example:
        >>> x, y = torch.zeros(10, 1, 2, 2, dtype=torch.uint8), torch.arange(10)
        >>> Dataset("ten", x, y, x, y, classes=10, mean=(0.5,), std=(0.25,)).normalise(torch.ones(1, 1, 1, 1)).item()
        2.0
    """

    dtype: ClassVar[torch.dtype] = torch.uint8  # of x
    dimensions: ClassVar[int] = 4  # of x; 0: any
    further: ClassVar[tuple[str, ...]] = ()  # fields of data of other kinds that a network may ask for

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    names: tuple[str, ...] = field(default=(), kw_only=True)
    fitted: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of one image; for other kinds of data, the shape of one example."""
        return tuple(self.x.shape[1:])

    @property
    def offered(self) -> Mapping[str, object]:
        """Facts about the data that a network may take as arguments, by name."""
        return {name: getattr(self, name) for name in ("shape", "classes", *self.further)}

    @property
    def labelled(self) -> bool:
        """Check that each example has one label; otherwise its words are its labels."""
        return Batch(self.x, self.y).labelled

    @property
    def labels(self) -> Tensor:
        """(N,) int64, the class of each training example, used to partition by label; zeros where it has none."""
        return self.y if self.one_class else torch.zeros(len(self.y), dtype=torch.int64)

    @property
    def one_class(self) -> bool:
        """Check that the label of an example is one class."""
        return self.y.dim() == 1 and not self.y.is_floating_point()

    def in_units_of(self, rows: Tensor) -> "Dataset":
        """The same data in units of these public training examples; pixels, words and cells have units already."""
        return self

    def check(self) -> None:
        """Check a user's data; ValueError names the first fault."""
        for fault in self.faults():
            raise ValueError(fault)

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the data; what follows a fault may fail."""
        for name, x, y in (("x", self.x, self.y), ("x_test", self.x_test, self.y_test)):
            given: tuple[tuple[str, Any], ...] = ((name, x), (f"y of {name}", y))
            for what, t in given:
                if not isinstance(t, Tensor):
                    found = type(t).__name__
                    yield f"{what} is a {found}, expected one tensor: put several inputs side by side in it"
            dimensions = self.dimensions or self.x.dim()
            if x.dtype != self.dtype or x.dim() != dimensions or not len(x) or x.shape[1:] != self.shape:
                yield f"{name} is {x.dtype} of shape {tuple(x.shape)}, expected {self.dtype}, (N, *{self.shape})"
            if x.is_floating_point() and (bad := int((~x.flatten(1).isfinite().all(1)).sum())):
                yield f"NaN or infinity in {bad} of {len(x)} examples of {name}: leave them out"
            if y.is_floating_point() and len(y) == len(x):
                yield from label_faults(y, self.classes)
                continue
            words = self.dtype == torch.int64 and y.shape == x.shape
            mask = self.dtype != torch.int64 and 1 < y.dim() == x.dim() - 1 and len(y) == len(x)
            if y.dtype != torch.int64 or not (words or mask or y.shape == x.shape[:1]):
                yield (
                    f"the labels of {name} are {y.dtype} of shape {tuple(y.shape)}, expected int64 classes (N,), a mask with a "
                    "class for each pixel, or floats"
                )
            known = y[y != IGNORED] if y.dim() > 1 else y  # of words, padding has no label
            if len(known) and not 0 <= int(known.min()) <= int(known.max()) < self.classes:
                yield f"the labels of {name} are in {int(known.min())}..{int(known.max())}, expected 0..{self.classes - 1}"
        if "classes" in self.fitted and len(self.y.unique()) < 2:
            yield "the training labels are of one class: there is nothing to learn, and every label is known"
        channels = self.shape[0] if self.dtype == torch.uint8 or self.mean else 0
        if len(self.mean) != channels or len(self.std) != channels or not all(s > 0 for s in self.std):
            flat = ": all training pixels of a colour are equal: set std" if "std" in self.fitted else ""
            yield f"mean {self.mean} and std {self.std} should be {channels} numbers each, those of std above 0{flat}"

    def normalise(self, x: Tensor) -> Tensor:
        """x (..., C, H, W) in [0, 1] to zero mean and unit variance per channel; x itself if there is no mean."""
        if not self.mean:
            return x
        mean, std = (by_channel(v, len(self.shape), x) for v in (self.mean, self.std))
        return (x - mean) / std

    def in_units(self, inputs: Tensor) -> Tensor:
        """The inverse of `normalise`."""
        if not self.mean:
            return inputs
        mean, std = (by_channel(v, len(self.shape), inputs) for v in (self.mean, self.std))
        return inputs * std + mean


def by_channel(values: Sequence[float], dimensions: int, like: Tensor) -> Tensor:
    """One number for each channel, to be computed with examples of so many dimensions (C, ...)."""
    filled = [torch.full((), v, dtype=like.dtype, device=like.device) for v in values]  # copies nothing from the host
    return torch.stack(filled).view(-1, *[1] * (dimensions - 1))
