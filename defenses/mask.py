"""Masking: upload a random part of the entries (Balunovic et al., 2022, section 4; FLRSP, Sawada et al., 2026, 2605.01204)."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Generator, Tensor

from fedgauge.client.components import Share
from fedgauge.client.rng import seed_of
from fedgauge.client.transforms import Link, UpdateDistribution, UpdateTransform
from fedgauge.client.update import Update


@dataclass(frozen=True)
class mask(UpdateTransform):
    """Keep each entry with probability keep (0 < keep <= 1), else 0.

    seed: draws one public mask for all rounds and clients; default: a fresh mask each time, the client's secret.

    Example:
        >>> mask(0.5, seed=1).apply({"w": torch.ones(8)}, None)
        {'w': tensor([0., 0., 0., 0., 0., 1., 1., 0.])}
    """

    keep: Share
    seed: int | None = None

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: torch.where(self._draw(k, t, rng) < self.keep, t, torch.zeros_like(t)) for k, t in update.items()}

    def _draw(self, name: str, like: Tensor, rng: Generator | None) -> Tensor:
        if self.seed is None:
            return torch.rand(like.shape, generator=rng).to(like.device)
        # NumPy: inside vmap torch refuses to draw, or draws another mask for each example
        draws = np.random.default_rng(seed_of(self.seed, "mask", name)).random(tuple(like.shape), dtype=np.float32)
        return torch.from_numpy(draws).to(like.device)

    @property
    def mean(self) -> Link:
        return self if self.seed is not None else _expected_mask(self.keep)

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """Exact zeros show where the mask dropped; with a known mask the noise-free form has the same zeros."""
        if before.signed:
            return None
        if self.seed is not None:
            # without noise before it, the zeros hide nothing, and noise may follow
            return replace(before, sparse=True) if before.noisy else before
        return replace(before, sparse=True, shrink=self.keep * before.shrink)


@dataclass(frozen=True)
class _expected_mask(UpdateTransform):
    """The average over unknown masks."""

    keep: float

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: self.keep * t for k, t in update.items()}
