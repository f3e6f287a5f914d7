"""Mixup: train on blends of two examples, pixels and labels alike (Zhang et al., ICLR 2018)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgauge.client.components import Positive
from fedgauge.client.transforms import BatchTransform, Link, UpdateDistribution
from fedgauge.client.update import Batch
from fedgauge.defenses.noise import identity


@dataclass(frozen=True)
class mixup(BatchTransform):
    """Blend each example with another one of its batch, with a weight drawn from Beta(alpha, alpha).

    Each example draws its own weight, and is the other one exactly once. Labels become probabilities (B, classes).

    Args:
        alpha: above 0; small: mostly one of the two examples; 1: uniform weights.
        classes, batch_size: the federation offers them.

    Raises:
        ValueError: on a batch of text.

    Example:
        >>> batch = Batch(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))
        >>> mixup(alpha=1.0, classes=2, batch_size=2).transform(batch, None).y.shape
        torch.Size([2, 2])
    """

    alpha: Positive
    classes: int
    batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.batch_size)

    @property
    def mean(self) -> Link:
        """Nothing: the attacker reconstructs the blends that were trained on."""
        return identity()

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """The distribution around the noise-free update does not depend on the examples."""
        return before

    def transform(self, batch: Batch, rng: Generator | None) -> Batch:
        _check(len(batch.x))
        if not batch.x.is_floating_point():
            raise ValueError("mixup blends images, and words cannot be blended: remove it from a federation of text")
        order = torch.randperm(len(batch.x), generator=rng)
        other = torch.empty_like(order)
        other[order] = order.roll(1)  # one cycle through all: no example is its own other one
        # NumPy: torch's Beta takes no generator, and its gamma draws underflow at a small alpha
        numbers = np.random.default_rng(int(torch.randint(2**62, (), generator=rng)))
        weight = torch.from_numpy(numbers.beta(self.alpha, self.alpha, len(other))).to(batch.x)
        other = other.to(batch.x.device)
        y = batch.y if batch.y.is_floating_point() else F.one_hot(batch.y, self.classes).movedim(-1, 1).to(batch.x)
        return Batch(_blend(batch.x, other, weight), _blend(y, other, weight))


def _check(examples: int) -> None:
    if examples < 2:
        raise ValueError("mixup needs at least two examples in a batch: raise batch_size")


def _blend(t: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    weight = weight.view(-1, *[1] * (t.dim() - 1))
    return weight * t + (1 - weight) * t[other]
