"""Candidates judged together: as every combination says on paper, and better than each by itself where they hide each other."""

import itertools

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.membership.canaries import marginal_ratios
from fedgauge.client.rng import generator


def counted(linear: Tensor, square: Tensor, share: Tensor) -> Tensor:
    """The marginal ratios over all 2^N combinations."""
    every = torch.tensor(list(itertools.product([0.0, 1.0], repeat=len(linear))), dtype=torch.float64)
    weights = every @ linear - ((every @ square) * every).sum(1) / 2
    weights = weights + (every * share.log() + (1 - every) * (1 - share).log()).sum(1)
    here = every.bool()
    both = [[weights[here[:, i] == there].logsumexp(0) for there in (True, False)] for i in range(len(linear))]
    return torch.stack([one - other for one, other in both]) - share.log() + (1 - share).log()


def world(count: int, size: float, draw: int, shared: float = 0.6) -> tuple[Tensor, Tensor, Tensor]:
    """Linear and square terms of `count` signals in normal noise that have a part in common, and which of them are there."""
    rng = generator("joint", draw, count)
    common = torch.randn(1, 40, generator=rng, dtype=torch.float64)
    signals = torch.randn(count, 40, generator=rng, dtype=torch.float64) * (1 - shared**2) ** 0.5 + shared * common
    signals *= size / signals.norm(dim=1, keepdim=True)
    there = torch.rand(count, generator=rng) < 0.5
    seen = signals[there].sum(0) + torch.randn(40, generator=rng, dtype=torch.float64)
    return signals @ seen, signals @ signals.T, there


@pytest.mark.parametrize("size", [0.5, 2.0])
def test_the_ratios_are_those_of_all_combinations(size: float) -> None:
    share = torch.tensor([0.5, 0.3, 0.5, 0.1, 0.5, 0.5, 0.2, 0.5], dtype=torch.float64)
    linear, square, _ = world(8, size, draw=0)
    found, exact = marginal_ratios(linear, square, share, seed=1), counted(linear, square, share)
    assert (torch.sigmoid(found) - torch.sigmoid(exact)).abs().max() < 0.05
    assert torch.equal(found, marginal_ratios(linear, square, share, seed=1))


def test_joint_ratios_detect_more_members() -> None:
    """By itself each takes the others' common part for its own, though their mean is taken off."""
    right = torch.zeros(2, dtype=torch.float64)
    for draw in range(10):
        linear, square, there = world(20, 3.0, draw)
        share = torch.full((20,), 0.5, dtype=torch.float64)
        expected = (square @ share) - square.diagonal() / 2
        for i, ratios in enumerate(
            (linear - expected - square.diagonal() / 2, marginal_ratios(linear, square, share, 0))
        ):
            right[i] += float(((ratios > 0) == there).double().mean()) / 10
    assert right[1] > 0.8 and right[1] > right[0] + 0.1, right


def test_nan_gives_nan() -> None:
    linear, square, _ = world(3, 1.0, draw=0)
    assert marginal_ratios(linear * torch.inf, square, torch.full((3,), 0.5), 0).isnan().all()
