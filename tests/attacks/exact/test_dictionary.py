"""Sparse sources behind a random basis are found: worlds whose basis is known on paper."""

from itertools import islice

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.exact.dictionary import SparseMixture


def world(seed: int, m: int, size: int, likeness: float = 0.0) -> tuple[Tensor, Tensor]:
    """Rows L (m, B) of orthonormal columns, and the unit directions (B, B) of sources that are half zero."""
    rng = torch.Generator().manual_seed(seed)
    sources = torch.randn(m, size, generator=rng).double()
    sources[:, 1] = likeness * sources[:, 0] + (1 - likeness**2) ** 0.5 * sources[:, 1]
    sources *= torch.rand(m, size, generator=rng) < 0.5
    rows = torch.linalg.qr(sources @ torch.randn(size, size, generator=rng).double()).Q
    directions: Tensor = torch.linalg.lstsq(rows, sources).solution.T
    return rows, directions / directions.norm(dim=1, keepdim=True)


def cosines(mixture: SparseMixture, directions: Tensor, rounds: int) -> Tensor:
    """(B,) of each known direction with the nearest found one."""
    *_, basis = islice(mixture.bases(torch.Generator().manual_seed(0)), rounds)
    return (directions @ basis.T).abs().amax(1)


@pytest.mark.parametrize(("m", "size", "likeness"), [(100, 4, 0.0), (300, 16, 0.0), (300, 8, 0.9), (100, 1, 0.0)])
def test_sources_that_are_half_zero_are_found_behind_a_random_basis(m: int, size: int, likeness: float) -> None:
    rows, directions = (
        world(1, m, size, likeness) if size > 1 else (torch.ones(m, 1).double(), torch.ones(1, 1).double())
    )
    found = cosines(SparseMixture(rows, torch.zeros(size).double()), directions, rounds=6)
    assert float(found.min()) > 1 - 1e-9


def test_noise_moves_the_directions_by_no_more_than_least_squares_allows() -> None:
    # a direction is fitted to m / 2 silent rows, in which its noise is its only signal
    rows, directions = world(2, 400, 8)
    noise = 0.05 * len(rows) ** -0.5
    noisy = rows + noise * torch.randn(rows.shape, generator=torch.Generator().manual_seed(3)).double()
    blur = torch.full((8,), noise).double()
    found = cosines(SparseMixture(noisy, blur), directions, rounds=6)
    sine = (1 - found.square()).clamp(min=0).sqrt()
    others = 7  # directions into which one may turn
    assert float(sine.square().mean().sqrt()) < 4 * 0.05 * (others / 200) ** 0.5
