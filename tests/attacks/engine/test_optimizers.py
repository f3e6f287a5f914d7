"""L-BFGS never rises, and its problems stay apart."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedgauge.attacks.engine.optimizers import Evaluate, lbfgs, minimise


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


def test_lbfgs_problems_do_not_feel_each_other() -> None:
    start = starts(5, 3)
    together = minimise(evaluation(rosenbrock), start, allowance(5, 60), lbfgs())
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
