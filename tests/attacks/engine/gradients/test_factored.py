"""Factored gradients: they are the matrix up to rounding, and what is no product is left as it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgauge.attacks.engine.gradients.factored import EXACT, FactoredGradient, factored, flattened, formed
from fedgauge.attacks.engine.gradients.per_problem import gradients
from fedgauge.client.models.vision import detached_params

SHAPE, CLASSES = (3, 12, 12), 7
pytestmark = pytest.mark.usefixtures("double")


def products(problems: int, rank: int, seed: int = 0, out: int = 30, wide: int = 50) -> tuple[Tensor, Tensor]:
    """Signals (P, rank, out) and inputs (P, rank, wide)."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(problems, rank, out, generator=rng), torch.randn(problems, rank, wide, generator=rng)


@settings(max_examples=80)
@given(
    rank=st.integers(1, 5),
    others=st.integers(1, 5),
    problems=st.integers(1, 3),
    scales=st.lists(st.floats(-8, 8), min_size=5, max_size=5),
    dead=st.floats(0, 1),
    alike=st.booleans(),
    seed=st.integers(0, 999),
)
def test_factors_of_a_product_are_the_product(
    rank: int, others: int, problems: int, scales: list[float], dead: float, alike: bool, seed: int
) -> None:
    """Also where examples differ by sixteen orders of magnitude, are alike, or leave neurons dead: all of them at 1."""
    signal, input = products(problems, rank, seed)
    living = torch.rand(problems, 1, 30, generator=torch.Generator().manual_seed(seed)) >= dead
    signal *= 10 ** torch.tensor(scales[:rank])[:, None] * living
    input = input[:, :1].expand_as(input) if alike else input
    matrices = FactoredGradient(signal, input).form()
    found = factored(matrices, rank)
    assert found is not None
    size = float(matrices.norm())
    assert float((found.form() - matrices).norm()) <= 2e-12 * size
    other = FactoredGradient(*products(problems, others, seed + 1))
    length = float(other.form().norm())
    leaves = [t.requires_grad_() for t in other]
    (by_factors, square), by_entries = other.products(found), (other.form() * matrices).flatten(1).sum(1)
    torch.testing.assert_close(square, other.form().square().flatten(1).sum(1))
    assert float((by_factors - by_entries).detach().abs().max()) <= 1e-10 * size * length
    for ours, theirs in zip(*(torch.autograd.grad(v.sum(), leaves) for v in (by_factors, by_entries)), strict=True):
        assert float((ours - theirs).norm()) <= 1e-9 * float(theirs.norm()) + 1e-12 * size * length


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("rank", [1, 4])
def test_rounding_is_let_pass_and_nothing_more(dtype: torch.dtype, rank: int) -> None:
    matrices = torch.stack([(s.T @ i).to(dtype) for s, i in zip(*products(40, rank), strict=True)])
    assert factored(matrices, rank) is not None
    assert factored(1e-30 * matrices, rank) is not None, "also where squares would be zero"
    unlike = torch.randn(matrices.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    for noise in (1.0, 100 * EXACT[dtype]):
        assert factored(matrices + noise * unlike, rank) is None
        assert factored(1e-25 * (matrices + noise * unlike), rank) is None
        assert factored(noise * unlike, rank) is None
    spoilt = matrices.clone()
    spoilt[-1, 3, 5] += 0.01
    assert factored(spoilt, rank) is None, "one problem's one entry"
    assert (factored(matrices.sign(), rank) is None) == (rank > 1), "the signs of one product are another"
    assert factored(torch.where(unlike > 0, matrices, 0.0), rank) is None, "pruned"


def test_flattening_keeps_every_entry() -> None:
    seen = {"kernel": torch.randn(4, 2, 3, 5, 5), "weight": torch.randn(4, 2, 3), "bias": torch.randn(4, 2)}
    (flat,) = flattened(seen)
    assert flat.shape == (4, 150 + 6 + 2)
    assert sorted(flat[1].tolist()) == sorted(x for t in seen.values() for x in t[1].flatten().tolist())


@pytest.mark.parametrize("batch", [1, 2])
def test_a_seen_kernel_of_few_positions_is_a_product(batch: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, 4), nn.Sigmoid(), nn.Conv2d(8, 32, 3, 1, 1), nn.Tanh(), nn.Flatten(), nn.Linear(128, CLASSES)
    )
    params, rng = detached_params(model), torch.Generator().manual_seed(1)
    x = torch.randn(3, batch, *SHAPE, generator=rng).requires_grad_()
    found = gradients(model, params, x, torch.randint(CLASSES, (3, batch), generator=rng), 1.0, False)
    kernel = found["2.weight"]
    assert isinstance(kernel, Tensor)
    kernel = kernel.detach()
    rows = factored(kernel, 4 * batch)
    assert rows is not None
    torch.testing.assert_close(formed(rows, kernel.shape[1:]), kernel)
    other = FactoredGradient(*products(3, 4, out=32, wide=72))
    torch.testing.assert_close(other.products(rows), other.products(kernel))
