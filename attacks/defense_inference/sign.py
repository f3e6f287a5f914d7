"""Signs: every entry has the same magnitude, or a whole multiple of a small part of it."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from fedgauge.attacks.defense_inference.evidence import FEW, SAME_SIZE, Inferred, UpdateEvidence
from fedgauge.client.transforms import UpdateDistribution, UpdateTransform
from fedgauge.client.update import Update

LEVELS = 64  # sums of up to this many signs are told apart from other values


def find_sign(read: UpdateEvidence) -> Inferred | None:
    """A sign: one magnitude everywhere, or whole multiples of a fraction of it if several signs were summed."""
    sizes = torch.cat([tally.sizes for tally in read.every]).unique().double()
    largest, count = float(sizes[-1]), sum(tally.seen for tally in read.every)
    summed = [n for n in (1, read.members, read.local.steps, read.examples, read.rows) if n <= min(LEVELS, count / FEW)]
    fitting = (n for n in summed if _are_multiples(sizes, largest / n))
    if (n := next(fitting, None)) is None:
        return None
    margin = (count - 1) * -math.log(n * SAME_SIZE)
    # opposite signs of two steps leave a zero
    if n == 1 and not (read.holes and read.local.steps % 2 == 0):
        evidence = f"all {count:,} entries that are not zero have the magnitude {largest:.4g}"
        return read.verdict("sign", {"scale": largest}, _sign(largest), evidence, margin)
    evidence = f"every entry is a multiple of {largest / n:.4g}, up to {n} times"
    return read.summed("sign", {"scale": largest}, _sign, f"{evidence}: signs were summed", margin)


def _are_multiples(sizes: Tensor, unit: float) -> bool:
    return bool(((sizes / unit).round() * unit - sizes).abs().max() <= SAME_SIZE * sizes[-1])


@dataclass(frozen=True)
class _sign(UpdateTransform):
    """u / (|u| + mean |u|) of each tensor in place of a sign, which has no useful derivative."""

    scale: float

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: self.scale * t / (t.abs() + t.abs().mean() + 1e-12) for k, t in update.items()}

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        return replace(before, signed=True)
