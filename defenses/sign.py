"""Sign: upload one bit an entry (signSGD, Bernstein et al., 2018)."""

from dataclasses import dataclass, replace

from torch import Generator

from fedgauge.client.components import Positive
from fedgauge.client.transforms import Link, UpdateDistribution, UpdateTransform
from fedgauge.client.update import Update


@dataclass(frozen=True)
class sign(UpdateTransform):
    """Every entry becomes -scale, 0 or scale; scale > 0.

    Example:
        >>> import torch
        >>> sign(0.5).apply({"w": torch.tensor([-3.0, 0.0, 2.0])}, None)
        {'w': tensor([-0.5000,  0.0000,  0.5000])}
    """

    scale: Positive = 1.0

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: self.scale * t.sign() for k, t in update.items()}

    @property
    def mean(self) -> Link:
        return _soft_sign(self.scale)

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        return replace(before, signed=True)


@dataclass(frozen=True)
class _soft_sign(UpdateTransform):
    """The sign has no useful derivative: an attacker uses u / (|u| + mean |u|) of each tensor instead."""

    scale: float

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: self.scale * t / (t.abs() + t.abs().mean() + 1e-12) for k, t in update.items()}
