"""Pruning: upload only the largest entries (gradient compression, Aji & Heafield, 2017)."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from fedgauge.client.components import Share
from fedgauge.client.transforms import UpdateDistribution, UpdateTransform
from fedgauge.client.update import Update


@dataclass(frozen=True)
class prune(UpdateTransform):
    """Keep a fraction keep (0 < keep <= 1) of each tensor's entries, the largest by magnitude.

    Example:
        >>> prune(0.5).apply({"w": torch.tensor([1.0, -4.0, 2.0, 3.0])}, None)
        {'w': tensor([ 0., -4.,  0.,  3.])}
    """

    keep: Share

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: self._prune(t) for k, t in update.items()}

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """Kept entries keep their noise; that larger entries are kept more often is ignored."""
        return None if before.signed else replace(before, sparse=True)

    def _prune(self, t: Tensor) -> Tensor:
        kept = max(1, round(self.keep * t.numel()))
        # topk, as quantile refuses more than 16 M elements; detached, as a threshold has no gradient
        threshold = t.detach().abs().flatten().topk(kept).values[-1]
        return torch.where(t.abs() >= threshold, t, torch.zeros_like(t))
