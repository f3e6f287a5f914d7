"""What a search for rows of a table varies: numbers within their bounds, and categories as a softmax of free numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge
from fedgauge.client.models.columns import Columns


@dataclass(frozen=True)
class relaxed_rows:
    """Rows (..., D) as the network takes them, from free numbers (..., D) (TabLeak: Vero et al., ICML 2023, section 4.1).

    Args:
        softmax: the entries of a category are positive and sum to 1; otherwise they are free.
        bounded: numbers lie within their columns' bounds by a sigmoid; otherwise they are free.
    """

    softmax: bool = True
    bounded: bool = True

    def bind(self, known: Knowledge) -> Callable[[Tensor], Tensor]:
        """The rows of free numbers; ValueError if the examples are no rows."""
        return _Rows(self, columns_of(known))

    def starts(self, normal: Tensor) -> Tensor:
        """The paper's starts, uniform in [-1, 1], from standard normal numbers."""
        return torch.erf(normal / math.sqrt(2))


def columns_of(known: Knowledge) -> Columns:
    """The agreed columns; ValueError if the examples are no rows of a table."""
    if known.columns is None:
        raise ValueError("it reconstructs rows of a table, and the examples here have no columns")
    return known.columns


class _Rows:
    def __init__(self, how: relaxed_rows, columns: Columns) -> None:
        numbers, groups = [], []
        for column, part in zip(columns, columns.slices, strict=True):
            if column.numeric:
                numbers.append((part.start, *column.bounds))
            else:
                groups.append(list(range(part.start, part.stop)))
            if column.numeric and column.optional:
                groups.append([part.start + 1])
        self.how, self.columns = how, columns
        self.places = torch.tensor([at for at, _, _ in numbers], dtype=torch.int64)
        self.low, self.high = (torch.tensor([n[i] for n in numbers], dtype=torch.float64) for i in (1, 2))
        widest = max(map(len, groups), default=0)
        # one softmax over all columns: each group in a row of its own, filled up with a category that cannot be
        self.groups = torch.tensor([g + [columns.entries] * (widest - len(g)) for g in groups], dtype=torch.int64)
        flat = self.groups.flatten()
        self.order = torch.empty(columns.entries, dtype=torch.int64)
        taken = flat < columns.entries
        self.order[flat[taken]] = torch.arange(len(flat))[taken]
        self.order[self.places] = len(flat) + torch.arange(len(self.places))
        self.alone = torch.tensor([len(g) == 1 for g in groups])

    def __call__(self, z: Tensor) -> Tensor:
        natural = self.columns.natural(z)
        low, high = self.low.to(z), self.high.to(z)
        numbers = low + (high - low) * z[..., self.places].sigmoid() if self.how.bounded else natural[..., self.places]
        never = torch.full_like(natural[..., :1], -torch.inf if self.how.softmax else 0.0)
        logits = torch.cat([natural, never], -1)[..., self.groups]
        if self.how.softmax:
            alone = self.alone.to(z.device)[:, None]
            logits = torch.where(alone, logits.nan_to_num(neginf=0.0).sigmoid(), logits.softmax(-1))
        every = torch.cat([logits.flatten(-2), numbers], -1)
        return self.columns.scaled(every[..., self.order])
