"""DP-SGD: clip every example's gradient, average, and add normal noise (Abadi et al., 2016, algorithm 1)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Generator

from fedgauge.client.chain import Chain
from fedgauge.client.components import Count, NotNegative, Positive
from fedgauge.client.transforms import Link, UpdateDistribution, per_example
from fedgauge.client.update import Batch, Params, Transform, Update, UpdateFn
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian


@dataclass(frozen=True)
class dp_sgd(Link):
    """Clip each example's gradient to max_norm (> 0), average, add noise; place it before `local_sgd`.

    `fedgauge.defenses.accounting` computes its (epsilon, delta).

    Args:
        noise_multiplier: the noise's standard deviation is noise_multiplier * max_norm / batch_size (>= 0).
        batch_size: examples of a local step; the federation offers it.

    Raises:
        ValueError: on a batch of another size.

    Example:
        >>> dp_sgd(max_norm=1.0, noise_multiplier=2.0, batch_size=8).parts.links[1]
        gaussian(sigma=0.25)
    """

    max_norm: Positive
    noise_multiplier: NotNegative
    batch_size: Count

    each: ClassVar[bool] = True

    @property
    def parts(self) -> Chain:
        return Chain((self._clipped, gaussian(self.noise_multiplier * self.max_norm / self.batch_size)))

    @property
    def mean(self) -> Transform:
        return self._clipped

    @property
    def deployed(self) -> Chain:
        return self.parts.deployed

    @property
    def _clipped(self) -> per_example:
        return per_example(clip(self.max_norm))

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        return self.parts.update_distribution if before == UpdateDistribution() else None

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        defended = self.parts(compute)

        def private(params: Params, batch: Batch, rng: Generator | None) -> Update:
            if len(batch.x) != self.batch_size:  # an example would weigh more, or less, than the noise assumes
                raise ValueError(f"dp_sgd's noise is for batches of {self.batch_size}, but this one has {len(batch.x)}")
            return defended(params, batch, rng)

        return private
