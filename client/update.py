"""An update and what it is computed from: the vocabulary that clients, defenses and attacks share.

A client is a function (params, batch, rng) -> update; a transform wraps one and gives another.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

Params = dict[str, Tensor]
Update = dict[str, Tensor]


class Batch(NamedTuple):
    """Examples and labels: x (B, C, H, W) in [0, 1]; y (B,) int64, or of another kind (client/label_kinds.py)."""

    x: Tensor
    y: Tensor

    @property
    def labelled(self) -> bool:
        """Check that each example has one label; otherwise its words are its labels."""
        return self.y.dim() == 1 or self.y.is_floating_point() or self.x.dtype != torch.int64


UpdateFn = Callable[[Params, Batch, Generator | None], Update]
Transform = Callable[[UpdateFn], UpdateFn]
Loss = Callable[[Tensor, Tensor], Tensor]


def average(updates: Sequence[Update], weights: Sequence[float]) -> Update:
    """The weighted mean of several updates (or other tensors) of the same names, in their dtypes."""
    parts = [weight / sum(weights) for weight in weights]
    return {
        k: torch.stack([update[k] * part for update, part in zip(updates, parts, strict=True)]).sum(0).to(t.dtype)
        for k, t in updates[0].items()
    }


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Several batches as one, in their order."""
    return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def at_least_single(update: Update) -> Update:
    """Half precision as float32, in which squares and sums of small entries do not vanish; other dtypes as they are."""
    return {k: t.to(torch.promote_types(t.dtype, torch.float32)) for k, t in update.items()}


def as_rows(updates: Update) -> Tensor:
    """Stacked updates (n, ...) as one matrix (n, entries)."""
    return torch.cat([t.flatten(1) for t in updates.values()], 1)


def norm(update: Update) -> Tensor:
    """Euclidean norm over all entries of an update, a scalar of single precision or better; NaN with a NaN among them.

    It is safe to differentiate at zero.
    """
    squares = torch.stack([t.square().sum() for t in at_least_single(update).values()]).sum()
    return torch.where(squares > 0, torch.where(squares > 0, squares, 1.0).sqrt(), squares.detach())


def relative_error(guess: Update, seen: Update) -> float:
    """|guess - seen| / |seen|, in float64."""
    off = norm({name: guess[name].double() - t.double() for name, t in seen.items()})
    return float(off / norm({name: t.double() for name, t in seen.items()}))


def canary(like: Update, rng: Generator) -> Update:
    """A random update of norm 1 shaped like another, uniform over directions."""
    drawn = {k: torch.randn(t.shape, generator=rng, dtype=t.dtype) for k, t in like.items()}
    scale = 1 / norm(drawn)
    return {k: t * scale for k, t in drawn.items()}
