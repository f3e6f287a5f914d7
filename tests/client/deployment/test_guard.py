"""The update's policy: what does not pass stays at the client."""

import math

import pytest
import torch

from fedgauge.client.deployment.deployed_client import objection

UPDATE = {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(1), "steps": torch.tensor(10**6)}


@pytest.mark.parametrize(("max_norm", "stays"), [(None, False), (5.001, False), (4.999, True)])
def test_the_norm_decides_and_integers_have_none(max_norm: float | None, stays: bool) -> None:
    assert bool(objection(UPDATE, max_norm)) == stays


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_never_sent(value: float) -> None:
    assert "b" in objection({**UPDATE, "b": torch.tensor([value])})


def test_a_norm_beyond_single_precision_is_large() -> None:
    assert objection({"w": torch.tensor([3e38, 3e38])}, 1.0)


def test_complex_numbers_do_not_pass_by_the_limits() -> None:
    assert "b" in objection({**UPDATE, "b": torch.tensor([1e9 + 0j])}, 1.0)
