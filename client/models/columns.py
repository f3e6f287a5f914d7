"""The columns of a table, and how their cells become the numbers that a network takes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fedgauge.client.components import Checked, Positive

MISSING = "missing"  # how an empty cell is written
SPAN = 4.0  # standard deviations from the mean within which a column without declared bounds is taken to lie


@dataclass(frozen=True)
class Column(Checked):
    """One feature: numbers if it has no categories.

    Args:
        categories: in order; their number is a cell's value.
        mean, std: by which numbers are scaled, std above 0.
        low, high: the least and the greatest number; default: SPAN standard deviations from the mean.
        decimals: with which its numbers are written, at least 0.
        optional: its numbers may be missing: an entry says so. Of categories, one is called MISSING.
        shares: of the categories; if given, one-hot entries are also scaled to mean 0 and variance 1.
        spread: the standard deviation of its numbers, by which guesses are graded; default: std.
    """

    name: str
    categories: tuple[str, ...] = ()
    mean: float = 0.0
    std: Positive = 1.0
    low: float | None = None
    high: float | None = None
    decimals: int = 0
    optional: bool = False
    shares: tuple[float, ...] = ()
    spread: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"column {self.name!r}: low {self.low} must be below high {self.high}")
        if len(set(self.categories)) < len(self.categories):
            raise ValueError(f"column {self.name!r} has a category twice")

    @property
    def numeric(self) -> bool:
        return not self.categories

    @property
    def entries(self) -> int:
        """Count the numbers that encode a cell."""
        return len(self.categories) or 1 + self.optional

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest number, as agreed or else assumed."""
        low = self.mean - SPAN * self.std if self.low is None else self.low
        return low, self.mean + SPAN * self.std if self.high is None else self.high

    @property
    def scaling(self) -> list[tuple[float, float]]:
        """The offset and the scale of each entry: the offset is subtracted, then the scale divides."""
        if self.numeric:
            return [(self.mean, self.std), *[(0.0, 1.0)] * self.optional]
        # the entry of a category that nobody has would be divided by 0
        return [(p, math.sqrt(p * (1 - p)) or 1.0) for p in self.shares] or [(0.0, 1.0)] * self.entries

    def written(self, cell: float) -> str:
        """A cell's value as people write it."""
        if math.isnan(cell):
            return MISSING
        return f"{cell:.{self.decimals}f}" if self.numeric else self.categories[int(cell)]


@dataclass(frozen=True)
class Columns:
    """All features of a row, in order.

    A row is D numbers: of a numeric column its scaled value (and, if it may be missing, 1 where it is), of a categorical one an
    entry for each category. A cell is a float64: the value in its own unit (NaN: missing), or the category's number.
    """

    every: tuple[Column, ...]

    def __iter__(self) -> Iterator[Column]:
        return iter(self.every)

    def __len__(self) -> int:
        return len(self.every)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        ends = list(accumulate((c.entries for c in self), initial=0))
        return tuple(slice(a, b) for a, b in pairwise(ends))

    @property
    def entries(self) -> int:
        """Number of values in a row (D)."""
        return sum(c.entries for c in self)

    @cached_property
    def centre(self) -> Tensor:
        """(D,) float64, what is subtracted from entries in their own units."""
        # on the CPU also where a network is built without values: they are kept for the one that gets values
        return torch.tensor([centre for c in self for centre, _ in c.scaling], dtype=torch.float64, device="cpu")

    @cached_property
    def scale(self) -> Tensor:
        """(D,) float64, by what they are divided then."""
        return torch.tensor([scale for c in self for _, scale in c.scaling], dtype=torch.float64, device="cpu")

    @cached_property
    def tolerance(self) -> Tensor:
        """(F,) float64, up to which a number counts as right: .319 standard deviations (Vero et al., 2023); 0 of categories."""
        return torch.tensor([0.319 * (c.spread or c.std) if c.numeric else 0.0 for c in self], dtype=torch.float64)

    def natural(self, rows: Tensor) -> Tensor:
        """Rows (..., D) in their own units: numbers unscaled, categories between 0 and 1."""
        return rows * self.scale.to(rows) + self.centre.to(rows)

    def scaled(self, natural: Tensor) -> Tensor:
        """The inverse of `natural`."""
        return (natural - self.centre.to(natural)) / self.scale.to(natural)

    def cells(self, rows: Tensor) -> Tensor:
        """The cells (..., F) of rows (..., D): the likeliest category, numbers within their bounds."""
        natural = self.natural(rows.double())
        found = []
        for column, part in zip(self, self.slices, strict=True):
            own = natural[..., part]
            if not column.numeric:
                found.append(own.argmax(-1).double())
                continue
            value = own[..., 0] if column.low is None and column.high is None else own[..., 0].clamp(*column.bounds)
            found.append(torch.where(own[..., 1] >= 0.5, torch.nan, value) if column.optional else value)
        return torch.stack(found, -1)

    def rows(self, cells: Tensor) -> Tensor:
        """Rows (..., D) float32 of cells (..., F)."""
        parts = []
        for column, cell in zip(self, cells.unbind(-1), strict=True):
            if not column.numeric:
                parts.append(torch.nn.functional.one_hot(cell.long(), column.entries).double())
                continue
            missing = cell.isnan()
            value = torch.where(missing, column.mean, cell)
            parts.append(torch.stack([value, missing.double()][: column.entries], -1))
        return self.scaled(torch.cat(parts, -1)).float()

    def right(self, truth: Tensor, guess: Tensor) -> Tensor:
        """Mark the correct cells (..., F) of a guess: the same category, or a number within the tolerance."""
        near = (truth - guess).abs() <= self.tolerance.to(truth)
        return near | (truth.isnan() & guess.isnan())

    def written(self, cells: Sequence[float]) -> list[str]:
        return [column.written(cell) for column, cell in zip(self, cells, strict=True)]
