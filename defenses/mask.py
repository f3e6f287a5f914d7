"""Masking: upload a random part of the entries (pruning + noise in Balunovic et al., 2022, section 4)."""

from dataclasses import dataclass

import torch
from torch import Generator

from client.rng import generator
from client.update import Link, OnUpdate, Update


@dataclass(frozen=True)
class mask(OnUpdate):
    """Keep each entry with probability keep (0 < keep <= 1), else 0.

    seed: draws one mask for all rounds and clients, which everybody knows; default: fresh, the client's own secret.
    """

    keep: float
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be above 0 and at most 1, got {self.keep}")

    def apply(self, update: Update, rng: Generator | None) -> Update:
        masked = {}
        for k, t in update.items():
            draws = rng if self.seed is None else generator(self.seed, "mask", k)
            kept = torch.rand(t.shape, generator=draws, device=t.device) < self.keep
            masked[k] = torch.where(kept, t, torch.zeros_like(t))
        return masked

    @property
    def mean(self) -> Link:
        return self if self.seed is not None else _expected_mask(self.keep)


@dataclass(frozen=True)
class _expected_mask(OnUpdate):
    """The average over masks that are not known."""

    keep: float

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: self.keep * t for k, t in update.items()}
