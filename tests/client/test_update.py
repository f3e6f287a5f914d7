"""An update's norm."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgauge.client.update import norm


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_norm_is_that_of_all_entries_together(entries: list[list[float]]) -> None:
    update = {str(i): torch.tensor(row, dtype=torch.float64) for i, row in enumerate(entries)}
    flat = torch.cat(list(update.values()))
    assert float(norm(update)) == pytest.approx(float(torch.linalg.vector_norm(flat)), rel=1e-12, abs=1e-150)


def test_the_norm_has_a_derivative_at_zero() -> None:
    x = torch.zeros(3, requires_grad=True)
    norm({"w": x}).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0, 0.0]
    assert norm({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}).item() == 5.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_norm_of_entries_that_are_not_finite_is_not_finite(value: float) -> None:
    """Of NaN it was 0, so that a clip let it pass."""
    assert not math.isfinite(float(norm({"a": torch.tensor([1.0, value]), "b": torch.zeros(2)})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_precisions_are_added_up_as_ever(dtype: torch.dtype) -> None:
    """Seeded runs repeat to the bit."""
    rng = torch.Generator().manual_seed(0)
    update = {k: torch.randn(1000, generator=rng, dtype=dtype) for k in "abc"}
    plain = torch.stack([t.square().sum() for t in update.values()]).sum().sqrt()
    assert norm(update).dtype == dtype
    assert torch.equal(norm(update), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_entries_of_half_precision_count(dtype: torch.dtype) -> None:
    """Squares of entries below 2e-4 vanish in float16, so that a clip let any number of them pass."""
    update = {"w": torch.full((1_000_000,), 1e-4, dtype=dtype), "b": torch.zeros(3)}
    size = float(update["w"].double().norm())
    assert float(norm(update)) == pytest.approx(size, rel=1e-5)
