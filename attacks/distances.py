"""Distances between updates: -log p(seen | expected) up to a constant and a scale, for one observation each."""

from collections.abc import Callable

import torch
from torch import Tensor

from client.update import Update, norm

Distance = Callable[[Update, Update], Tensor]


def cosine(seen: Update, expected: Update) -> Tensor:
    """1 - cos(seen, expected) over all entries, in [0, 2] (Inverting Gradients, eq. 4)."""
    inner = torch.stack([(seen[k] * t).sum() for k, t in expected.items()]).sum()
    return 1 - inner / (norm(seen) * norm(expected)).clamp_min(1e-20)


def squared(seen: Update, expected: Update) -> Tensor:
    """|seen - expected|^2 / |seen|^2 (DLG, eq. 4, made free of the update's scale)."""
    difference = torch.stack([(seen[k] - t).square().sum() for k, t in expected.items()]).sum()
    return difference / norm(seen).square().clamp_min(1e-20)
