"""Canaries: willing clients that send a fixed random direction in place of what they would train."""

from dataclasses import dataclass

import torch
from torch import Generator

from fedgauge.client.update import Update, norm

FAR = 2.0**20  # the norm with which a direction meets the bound: far beyond it


@dataclass(frozen=True)
class CanaryOptions:
    """Clients whose updates measure what the noise protects (Andrew et al., ICLR 2024).

    Args:
        clients: how many of the clients are canaries, the last ones: at least 2, and fewer than all. Their data are not used.
    """

    clients: int

    def __post_init__(self) -> None:
        if self.clients < 2:
            raise ValueError(f"clients must be at least 2, as one canary has no spread, got {self.clients}")


def canary(like: Update, rng: Generator, size: float = 1.0) -> Update:
    """A random update shaped like another, uniform over directions; size: its norm, which is that of the clipping."""
    drawn = {k: torch.randn(t.shape, generator=rng, dtype=t.dtype) for k, t in like.items()}
    scale = size / norm(drawn)
    return {k: t * scale for k, t in drawn.items()}
