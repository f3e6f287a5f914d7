"""The parts of the matching engine: distances, the prior, the batched optimiser; each against a known answer."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from attacks.distances import Distance, cosine, squared
from attacks.optimizers import Evaluate, adam, lbfgs, minimise
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
    assert float(cosine()(seen, expected)) == pytest.approx(1 - float(F.cosine_similarity(a, b, dim=0)), abs=1e-14)
    numpy = float(np.sum((a.numpy() - b.numpy()) ** 2) / np.sum(a.numpy() ** 2))
    assert float(squared()(seen, expected)) == pytest.approx(numpy, rel=1e-12)


@pytest.mark.parametrize("distance", [cosine(), squared()])
def test_an_update_is_at_distance_zero_of_itself(distance: Distance) -> None:
    assert abs(float(distance(an_update(0), an_update(0)))) < 1e-15
    assert float(distance(an_update(0), an_update(1))) > 0.1


def test_distances_by_hand() -> None:
    x, y = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}
    assert (float(cosine()(x, y)), float(squared()(x, y))) == (1.0, 5.0)
    opposite = {"w": torch.tensor([-3.0, 0.0])}
    assert (float(cosine()(x, opposite)), float(squared()(x, opposite))) == (2.0, 16.0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_what_scaling_does(scale: float) -> None:
    seen, expected = an_update(0), an_update(1)
    larger = {k: scale * t for k, t in expected.items()}
    assert float(cosine()(seen, larger)) == pytest.approx(float(cosine()(seen, expected)), rel=1e-12)
    both = {k: scale * t for k, t in seen.items()}
    assert float(squared()(both, larger)) == pytest.approx(float(squared()(seen, expected)), rel=1e-12)


@pytest.mark.parametrize("distance", [cosine(), squared()])
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


# ---------------------------------------------------------------------------------------------------------- the priors


def tv(x: Tensor) -> Tensor:
    return total_variation(1.0)._anisotropic(x)


def test_total_variation_by_hand() -> None:
    x = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 2.0]])
    # |dx|: 1, 2, 0, 0; |dy|: 2, 1, 1
    assert float(tv(x)) == pytest.approx(3 / 4 + 4 / 3)
    assert float(tv(torch.full((2, 3, 5, 5), 0.7))) == 0.0


def test_total_variation_averages_over_images_and_channels() -> None:
    x = torch.rand(2, 3, 6, 7, dtype=torch.float64)
    each = [float(tv(x[b, c])) for b in range(2) for c in range(3)]
    assert float(tv(x)) == pytest.approx(float(np.mean(each)), rel=1e-12)
    a = x.numpy()
    numpy = np.abs(np.diff(a, axis=3)).mean() + np.abs(np.diff(a, axis=2)).mean()
    assert float(tv(x)) == pytest.approx(numpy, rel=1e-12)


# ------------------------------------------------------------------------------------------------------ the optimiser


def test_rates_are_cut_and_decay() -> None:
    cuts = adam(0.1, cuts=(3 / 8, 5 / 8, 7 / 8))
    assert [cuts.rate_at(i, 8) for i in range(8)] == pytest.approx([0.1] * 3 + [0.01] * 2 + [1e-3] * 2 + [1e-4])
    assert [adam(0.5, decay=0.9).rate_at(i, 3) for i in range(3)] == pytest.approx([0.5, 0.45, 0.405])
    assert adam(0.1).rate_at(99, 100) == 0.1


def test_adamw_is_torchs() -> None:
    assert isinstance(adam(0.1, weight_decay=0.01).start([torch.zeros(2)]), torch.optim.AdamW)


def rosenbrock(p: Tensor) -> Tensor:
    """(N, D) -> (N,): a bent valley, minimum 0 at ones."""
    return (100 * (p[:, 1:] - p[:, :-1].square()).square() + (1 - p[:, :-1]).square()).sum(1)


Function = Callable[[Tensor], Tensor]


def evaluation(function: Function, calls: list[int] | None = None) -> Evaluate:
    def evaluate(points: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        assert len(points) == len(problems)
        if calls is not None:
            for k in problems.tolist():
                calls[k] += 1
        leaf = points.clone().requires_grad_()
        value = function(leaf)
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    return evaluate


def starts(count: int, size: int) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def allowance(count: int, evaluations: int) -> Tensor:
    return torch.full((count,), evaluations)


def test_lbfgs_finds_the_minimum_of_a_bent_valley_and_counts_what_it_spends() -> None:
    calls = [0] * 16
    found = minimise(evaluation(rosenbrock, calls), starts(16, 4), allowance(16, 1000), lbfgs(plateau=0))
    low = found.f < 1e-12
    assert int(low.sum()) >= 12, "in four dimensions there is a second, local minimum near (-1, 1, 1, 1)"
    assert float((found.x[low] - 1).abs().max()) < 1e-5
    assert found.spent.tolist() == calls


def test_lbfgs_needs_as_many_steps_as_scipys_on_a_quadratic() -> None:
    from scipy.optimize import minimize

    a = torch.linspace(1, 100, 12, dtype=torch.float64)
    start = starts(1, 12)
    found = minimise(
        evaluation(lambda p: 0.5 * (a * p.square()).sum(1)), start, allowance(1, 200), lbfgs(history=10, plateau=0)
    )
    oracle = minimize(
        lambda p: (0.5 * (a.numpy() * p**2).sum(), a.numpy() * p), start[0].numpy(), jac=True, method="L-BFGS-B",
        options={"maxcor": 10, "ftol": 0, "gtol": 1e-10},
    )  # fmt: skip
    assert float(found.f) < 1e-18
    reached = minimise(
        evaluation(lambda p: 0.5 * (a * p.square()).sum(1)), start, allowance(1, 2 * oracle.nfev), lbfgs(10, 0)
    )
    assert float(reached.f) < 1e-15


@pytest.mark.parametrize("capacity", [1, 3, None])
def test_lbfgs_problems_do_not_feel_each_other(capacity: int | None) -> None:
    start = starts(5, 3)
    together = minimise(evaluation(rosenbrock), start, allowance(5, 60), lbfgs(), capacity)
    for k in range(5):
        alone = minimise(evaluation(rosenbrock), start[k : k + 1], allowance(1, 60), lbfgs())
        torch.testing.assert_close(together.x[k], alone.x[0], rtol=0, atol=1e-12)
        assert together.spent[k] == alone.spent[0]


def test_lbfgs_never_rises_and_keeps_to_its_budget() -> None:
    wild: Function = lambda p: (p.square().sum(1) + 3 * torch.sin(5 * p).sum(1)).exp()  # noqa: E731
    start = 2 * starts(8, 3)
    before = wild(start)
    for evaluations in (1, 2, 7, 40):
        found = minimise(evaluation(wild), start, allowance(8, evaluations), lbfgs())
        assert bool((found.spent <= evaluations).all())
        assert bool((found.f <= before).all())
        before = found.f


def test_lbfgs_ends_what_is_not_finite_and_goes_on_with_the_rest() -> None:
    start = starts(3, 2)
    start[1] = torch.nan
    found = minimise(evaluation(rosenbrock), start, allowance(3, 300), lbfgs(plateau=0))
    assert found.ended[1]
    assert found.spent[1] == 1
    assert float(found.f[[0, 2]].max()) < 1e-10


def test_lbfgs_steps_back_from_where_the_function_ends() -> None:
    bounded: Function = lambda p: -torch.log(1 - p.square().sum(1)) + p.sum(1)  # noqa: E731  NaN outside the unit disc
    found = minimise(evaluation(bounded), torch.zeros(2, 2, dtype=torch.float64), allowance(2, 100), lbfgs(plateau=0))
    # by hand: p = t (1, 1) with 2t / (1 - 2 t^2) = -1/1, so 2 t^2 - 2 t - 1 = 0
    torch.testing.assert_close(found.x, torch.full((2, 2), (1 - 3**0.5) / 2, dtype=torch.float64), rtol=0, atol=1e-7)
