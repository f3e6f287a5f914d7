"""Noise: hide an update by independent noise in every entry.

Which floats a sum of an entry and noise can be depends on the entry (Mironov, CCS 2012). Deployments therefore use discrete
noise: entries are rounded to whole steps of a grid, which the accounting includes, and whole numbers are added.
"""

import math
from dataclasses import asdict, dataclass, replace

import torch
from torch import Generator, Tensor

from fedgauge.client.components import NotNegative
from fedgauge.client.transforms import Link, UpdateDistribution, UpdateTransform, transformed
from fedgauge.client.update import Update, UpdateFn
from fedgauge.defenses.discrete_draws import STEPS, RandomBits, laplace_draws, normal_draws


@dataclass(frozen=True)
class _Noise(UpdateTransform):
    """Additive noise has mean zero, so its noise-free form changes nothing."""

    @property
    def mean(self) -> Link:
        return identity()

    @property
    def alone(self) -> UpdateDistribution:
        """The noise by itself, as a distribution with this sigma or scale."""
        return UpdateDistribution(**asdict(self))

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """None on top of signs or unknown dropped entries, which give a mixture; the sum of two noises is nearly normal."""
        if before.signed or before.shrink != 1:
            return None
        if not before.noisy:
            return replace(self.alone, hidden=before.hidden)
        return UpdateDistribution(sigma=math.sqrt(before.variance + self.alone.variance), hidden=before.hidden)


@dataclass(frozen=True)
class identity(UpdateTransform):
    """No defense: the unchanged update.

    Example:
        >>> identity().apply({"w": torch.tensor([0.5])}, None)
        {'w': tensor([0.5000])}
    """

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        return compute  # the very function, so that `is_identity` recognises it

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return dict(update)

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        return before


@dataclass(frozen=True)
class gaussian(_Noise):
    """Add normal noise of standard deviation sigma (>= 0), in the units of its place in the chain.

    Example:
        >>> gaussian(0.1).update_distribution(UpdateDistribution()).sigma
        0.1
    """

    sigma: NotNegative

    @property
    def deployed(self) -> Link:
        return discrete(self)

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {
            k: t + self.sigma * torch.randn(t.shape, generator=rng, dtype=t.dtype).to(t.device)
            for k, t in update.items()
        }


@dataclass(frozen=True)
class laplace(_Noise):
    """Add Laplace noise of scale b (>= 0; standard deviation b * sqrt(2)), in the units of its place in the chain.

    Example:
        >>> laplace(0.1).update_distribution(UpdateDistribution()).scale
        0.1
    """

    scale: NotNegative

    @property
    def deployed(self) -> Link:
        return discrete(self)

    def apply(self, update: Update, rng: Generator | None) -> Update:
        noisy = {}
        for k, t in update.items():
            # inverse of the distribution function; the clamp, which half precision would round away, keeps log from 0 at u = -0.5
            wide = torch.promote_types(t.dtype, torch.float32)
            u = torch.rand(t.shape, generator=rng, dtype=wide).to(t.device) - 0.5
            drawn = self.scale * u.sign() * torch.log1p((-2 * u.abs()).clamp_min(-1 + 1e-7))
            noisy[k] = t - drawn.to(t.dtype)
        return noisy


@dataclass(frozen=True)
class discrete(_Noise):
    """Round to multiples of a 2^24th of the noise's deviation or scale, then add discrete noise of the same law.

    Its key is fresh for each update: other links draw from rng, and a server that sees their draws (a mask's zeros) computes
    its state.
    """

    law: gaussian | laplace

    one_at_a_time = True

    @property
    def alone(self) -> UpdateDistribution:
        return self.law.alone

    def apply(self, update: Update, rng: Generator | None) -> Update:
        if transformed():  # vmap would give every example the same noise
            raise RuntimeError("discrete noise is drawn outside of torch.func's transforms, for one example at a time")
        return self.with_bits(update, RandomBits.secret())

    def with_bits(self, update: Update, bits: RandomBits) -> Update:
        step = (self.alone.sigma or self.alone.scale) / STEPS
        draws = normal_draws if isinstance(self.law, gaussian) else laplace_draws

        def noisy(t: Tensor) -> Tensor:
            drawn = torch.from_numpy(draws(bits, t.numel())).reshape(t.shape).to(t.device)
            # in double precision sums of whole numbers are exact; rounding such a sum to t's precision reveals no more than it
            found: Tensor = (((t.double() / step).round() + drawn) * step).to(t.dtype)
            return found

        return {k: noisy(t) for k, t in update.items()} if step else dict(update)
