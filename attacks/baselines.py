"""Baselines: what an attacker gets without reading the update; leakage is what exceeds them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable


@dataclass(frozen=True)
class mean_image(Attack):
    """Answer every update with the mean auxiliary image: the prior's mean."""

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if known.auxiliary is None:
            return not_applicable(wave, "the mean image needs auxiliary data")
        mean = known.auxiliary.x.mean(0).expand(known.batch_size, *known.shape)
        return [_guess(mean) for _ in wave.clients]


@dataclass(frozen=True)
class random_image(Attack):
    """Answer every update with auxiliary images drawn at random."""

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if known.auxiliary is None:
            return not_applicable(wave, "a random image needs auxiliary data")
        x = known.auxiliary.x
        return [_guess(x[torch.randint(len(x), (known.batch_size,), generator=s("image"))]) for s in streams]


def _guess(x: Tensor) -> Reconstruction:
    return Reconstruction(x.clone(), None, 0.0, 0, 0.0, "converged")
