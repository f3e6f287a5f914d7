"""The update's policy: what does not pass stays at the client."""

import math

import pytest
import torch

from fedgauge.client.deployment.deployed_client import UpdatePolicy

UPDATE = {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(1), "steps": torch.tensor(10**6)}


@pytest.mark.parametrize(("max_norm", "stays"), [(None, False), (5.001, False), (4.999, True)])
def test_the_norm_decides_and_integers_have_none(max_norm: float | None, stays: bool) -> None:
    assert bool(UpdatePolicy(max_norm).objection(UPDATE)) == stays


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_never_sent(value: float) -> None:
    assert "b" in UpdatePolicy().objection({**UPDATE, "b": torch.tensor([value])})


def test_a_norm_beyond_single_precision_is_large() -> None:
    assert UpdatePolicy(max_norm=1.0).objection({"w": torch.tensor([3e38, 3e38])})


def test_complex_numbers_do_not_pass_by_the_limits() -> None:
    assert "b" in UpdatePolicy(max_norm=1.0).objection({**UPDATE, "b": torch.tensor([1e9 + 0j])})


@pytest.mark.parametrize(
    ("higher_leaks", "leak", "stays"),
    [
        (True, 19.9, False),
        (True, 20.0, True),
        (True, -math.inf, False),
        (True, math.nan, True),
        (False, 20.0, True),
        (False, 20.1, False),
        (False, math.nan, True),
    ],
)
def test_its_own_audit_holds_back_from_the_threshold_on(higher_leaks: bool, leak: float, stays: bool) -> None:
    policy = UpdatePolicy(threshold=20.0, higher_leaks=higher_leaks)
    assert bool(policy.objection(UPDATE, lambda: leak)) == stays


def test_an_audit_that_does_not_apply_lets_nothing_out_and_comes_last() -> None:
    def audit() -> float:
        raise ValueError("does not apply to two examples")

    assert "two examples" in UpdatePolicy().objection(UPDATE, audit)
    assert "norm" in UpdatePolicy(max_norm=1.0).objection(UPDATE, audit)
