"""Partial matching with a gradient penalty: the penalty's slope is that of the objective's own slope."""

import torch
from torch import Tensor

from fedgauge.attacks.base import Budget
from fedgauge.attacks.engine.deadline import Variables
from fedgauge.attacks.matching.recipes import inverting_gradients, partial_matching
from fedgauge.attacks.matching.search import AdamSearch
from tests.attacks.matching.tiny_problems import scene, streams


def test_the_penalty_is_the_length_of_the_gradient() -> None:
    """Of x'Ax / 2 the slope is Ax, and that of its length is A Ax / |Ax|: differences of a quadratic are exact."""
    rng = torch.Generator().manual_seed(3)
    half = torch.randn(6, 6, generator=rng, dtype=torch.float64)
    a, x = half @ half.T, torch.randn(4, 1, 1, 2, 3, generator=rng, dtype=torch.float64)

    def step(variables: Variables, rows: Tensor, weight: Tensor | float) -> tuple[Tensor, Variables]:
        z = variables["x"].flatten(1)
        return (z @ a * z).sum(1) / 2, {"x": (z @ a).view_as(x)}

    search, rows = AdamSearch(flat=0.7, reach=1e-3), torch.arange(4)
    _, plain = step({"x": x}, rows, 1.0)
    made = search._with_penalty(step, {"x": x}, rows, 1.0, plain)["x"]
    slope = plain["x"].flatten(1)
    wanted = slope + 0.7 * slope @ a / slope.norm(dim=1, keepdim=True)
    torch.testing.assert_close(made.flatten(1), wanted, atol=1e-8, rtol=1e-8)


def test_with_all_entries_and_no_penalty_it_is_inverting_gradients() -> None:
    wave, known, _ = scene(clients=2)
    plain, same = (
        attack.reconstruct(wave, known, Budget(5), streams(0, 1))
        for attack in (inverting_gradients(), partial_matching(keep=1.0, flat=0.0))
    )
    for one, other in zip(plain, same, strict=True):
        assert one.x is not None and other.x is not None and torch.equal(one.x, other.x)
