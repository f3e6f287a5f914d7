"""Clipping: bound the norm of an update so that no example or client can dominate it (Abadi et al., 2016)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from fedgauge.client.components import Positive
from fedgauge.client.transforms import UpdateTransform
from fedgauge.client.update import Update, at_least_single, norm


@dataclass(frozen=True)
class clip(UpdateTransform):
    """Scale an update down to Euclidean norm max_norm (> 0) over all its tensors.

    An update without a finite norm becomes zeros, so that an overflow is not seen behind noise. One of half
    precision becomes float32, as rounding could enlarge it beyond the bound; it is rounded where it leaves the client.

    >>> import torch
    >>> clip(max_norm=1.0).apply({"w": torch.tensor([3.0, 4.0])}, None)
    {'w': tensor([0.6000, 0.8000])}
    """

    max_norm: Positive

    bounds: ClassVar[bool] = True

    def apply(self, update: Update, rng: Generator | None) -> Update:
        size = norm(update)
        factor = (self.max_norm / size.clamp_min(1e-12)).clamp(max=1.0)
        return {k: torch.where(torch.isfinite(size), t * factor, 0.0) for k, t in at_least_single(update).items()}
