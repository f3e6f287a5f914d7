"""Noise: hide an update by independent noise in every entry."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Generator

from fedgauge.client.transforms import Link, UpdateDistribution, UpdateTransform
from fedgauge.client.update import Update, UpdateFn


@dataclass(frozen=True)
class _Noise(UpdateTransform):
    """Additive noise has mean zero, so its noise-free form changes nothing."""

    @property
    def mean(self) -> Link:
        return identity()

    @property
    @abstractmethod
    def alone(self) -> UpdateDistribution:
        """The noise by itself."""

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """None on top of signs or unknown dropped entries, which give a mixture; the sum of two noises is nearly normal."""
        if before.signed or before.shrink != 1:
            return None
        if not before.noisy:
            return replace(self.alone, hidden=before.hidden)
        variance = sum(c.sigma**2 + 2 * c.scale**2 for c in (before, self.alone))
        return UpdateDistribution(sigma=math.sqrt(variance), hidden=before.hidden)


@dataclass(frozen=True)
class identity(UpdateTransform):
    """No defense: the update as it is."""

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        return compute  # the very function, so that `is_identity` recognises it

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return dict(update)

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        return before


@dataclass(frozen=True)
class gaussian(_Noise):
    """Add normal noise of standard deviation sigma (>= 0), in the units of its place in the chain."""

    sigma: float

    def __post_init__(self) -> None:
        if not self.sigma >= 0:
            raise ValueError(f"sigma must not be negative, got {self.sigma}")

    @property
    def alone(self) -> UpdateDistribution:
        return UpdateDistribution(sigma=self.sigma)

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {
            k: t + self.sigma * torch.randn(t.shape, generator=rng, dtype=t.dtype, device=t.device)
            for k, t in update.items()
        }


@dataclass(frozen=True)
class laplace(_Noise):
    """Add Laplace noise of scale b (>= 0; standard deviation b * sqrt(2)), in the units of its place in the chain."""

    scale: float

    def __post_init__(self) -> None:
        if not self.scale >= 0:
            raise ValueError(f"scale must not be negative, got {self.scale}")

    @property
    def alone(self) -> UpdateDistribution:
        return UpdateDistribution(scale=self.scale)

    def apply(self, update: Update, rng: Generator | None) -> Update:
        noisy = {}
        for k, t in update.items():
            # inverse of the distribution function; the clamp keeps log away from 0 at u = -0.5 exactly
            u = torch.rand(t.shape, generator=rng, dtype=t.dtype, device=t.device) - 0.5
            noisy[k] = t - self.scale * u.sign() * torch.log1p((-2 * u.abs()).clamp_min(-1 + 1e-7))
        return noisy
