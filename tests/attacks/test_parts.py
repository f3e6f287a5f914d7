"""The parts of the matching engine: distances, the prior, the batched optimiser; each against a known answer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from attacks.distances import Distance, cosine, squared
from attacks.optimizers import Adam, cut_rate
from attacks.priors import total_variation
from client.update import Update


def an_update(seed: int) -> Update:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 4), "b": (4,), "c": (2, 1, 3, 3)}
    return {k: torch.randn(s, generator=rng, dtype=torch.float64) for k, s in shapes.items()}


def flat(update: Update) -> Tensor:
    return torch.cat([t.flatten() for t in update.values()])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_distances_are_those_of_the_flat_vectors(one: int, other: int) -> None:
    seen, expected = an_update(one), an_update(other)
    a, b = flat(seen), flat(expected)
    assert float(cosine(seen, expected)) == pytest.approx(1 - float(F.cosine_similarity(a, b, dim=0)), abs=1e-14)
    numpy = float(np.sum((a.numpy() - b.numpy()) ** 2) / np.sum(a.numpy() ** 2))
    assert float(squared(seen, expected)) == pytest.approx(numpy, rel=1e-12)


@pytest.mark.parametrize("distance", [cosine, squared])
def test_an_update_is_at_distance_zero_of_itself(distance: Distance) -> None:
    assert abs(float(distance(an_update(0), an_update(0)))) < 1e-15
    assert float(distance(an_update(0), an_update(1))) > 0.1


def test_distances_by_hand() -> None:
    x, y = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}
    assert (float(cosine(x, y)), float(squared(x, y))) == (1.0, 5.0)
    opposite = {"w": torch.tensor([-3.0, 0.0])}
    assert (float(cosine(x, opposite)), float(squared(x, opposite))) == (2.0, 16.0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_what_scaling_does(scale: float) -> None:
    seen, expected = an_update(0), an_update(1)
    larger = {k: scale * t for k, t in expected.items()}
    assert float(cosine(seen, larger)) == pytest.approx(float(cosine(seen, expected)), rel=1e-12)
    both = {k: scale * t for k, t in seen.items()}
    assert float(squared(both, larger)) == pytest.approx(float(squared(seen, expected)), rel=1e-12)


@pytest.mark.parametrize("distance", [cosine, squared])
@pytest.mark.parametrize("which", ["seen", "expected", "both"])
def test_a_zero_update_has_a_finite_distance_and_derivative(distance: Distance, which: str) -> None:
    zero = {k: torch.zeros_like(t) for k, t in an_update(0).items()}
    seen = zero if which in {"seen", "both"} else an_update(0)
    expected = zero if which in {"expected", "both"} else an_update(1)
    leaves = {k: t.clone().requires_grad_() for k, t in expected.items()}
    value = distance(seen, leaves)
    value.backward()
    assert torch.isfinite(value)
    assert all(t.grad is not None and torch.isfinite(t.grad).all() for t in leaves.values())


# ---------------------------------------------------------------------------------------------------------- the prior


def test_total_variation_by_hand() -> None:
    x = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 2.0]])
    # |dx|: 1, 2, 0, 0; |dy|: 2, 1, 1
    assert float(total_variation(x)) == pytest.approx(3 / 4 + 4 / 3)
    assert float(total_variation(torch.full((2, 3, 5, 5), 0.7))) == 0.0


def test_total_variation_averages_over_images_and_channels() -> None:
    x = torch.rand(2, 3, 6, 7, dtype=torch.float64)
    each = [float(total_variation(x[b, c])) for b in range(2) for c in range(3)]
    assert float(total_variation(x)) == pytest.approx(float(np.mean(each)), rel=1e-12)
    a = x.numpy()
    numpy = np.abs(np.diff(a, axis=3)).mean() + np.abs(np.diff(a, axis=2)).mean()
    assert float(total_variation(x)) == pytest.approx(numpy, rel=1e-12)


# ------------------------------------------------------------------------------------------------------ the optimiser


def bowl(x: Tensor) -> Tensor:
    """Curved, not separable, with another minimum for each problem."""
    weights = torch.arange(1, x[0].numel() + 1, dtype=x.dtype).view(x[0].shape)
    return torch.stack([(weights * (p - k).square()).sum() + (p.sum() - k).pow(4) for k, p in enumerate(x)]).sum()


@pytest.mark.parametrize("signed", [False, True])
def test_adam_is_torchs_adam(signed: bool) -> None:
    start = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, adam = {"x": start.clone()}, Adam(signed=signed)
    theirs = start.clone().requires_grad_()
    oracle = torch.optim.Adam([theirs], lr=1.0, foreach=False)
    for i in range(60):
        rate = cut_rate(0.3, i, 60, (3 / 8, 5 / 8, 7 / 8))
        leaf = ours["x"].clone().requires_grad_()
        (g,) = torch.autograd.grad(bowl(leaf), leaf)
        adam.step(ours, {"x": g}, rate)
        oracle.zero_grad()
        bowl(theirs).backward()
        assert theirs.grad is not None
        if signed:
            theirs.grad.sign_()
        oracle.param_groups[0]["lr"] = rate
        oracle.step()
        assert float((ours["x"] - theirs.detach()).abs().max()) < 1e-13, f"step {i}"
    assert float((ours["x"] - start).abs().max()) > 0.5


def test_problems_do_not_feel_each_other() -> None:
    g = torch.randn(20, 3, 5, generator=torch.Generator().manual_seed(0))
    together, adam = {"x": torch.zeros(3, 5)}, Adam()
    for step in g:
        adam.step(together, {"x": step}, 0.1)
    for k in range(3):
        alone, own = {"x": torch.zeros(1, 5)}, Adam()
        for step in g:
            own.step(alone, {"x": step[k : k + 1]}, 0.1)
        assert torch.equal(alone["x"][0], together["x"][k])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("signed", [False, True])
def test_a_gradient_that_is_not_finite_moves_nothing(bad: float, signed: bool) -> None:
    x, adam = {"x": torch.zeros(2)}, Adam(signed=signed)
    adam.step(x, {"x": torch.tensor([bad, 1.0])}, 0.1)
    assert x["x"].tolist() == pytest.approx([0.0, -0.1], abs=1e-6)


def test_the_rate_is_cut_at_each_part_of_the_way() -> None:
    cuts = (3 / 8, 5 / 8, 7 / 8)
    rates = [cut_rate(0.1, i, 500, cuts) for i in range(500)]
    changes = [i for i in range(1, 500) if rates[i] != rates[i - 1]]
    assert changes == [188, 313, 438]  # the first whole iterations past 187.5, 312.5 and 437.5
    assert [rates[0], rates[188], rates[313], rates[438]] == pytest.approx([0.1, 0.01, 0.001, 0.0001])
    assert cut_rate(0.1, 99, 100, ()) == 0.1
