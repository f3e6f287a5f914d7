"""The canary sheet's world: mechanisms of known epsilon, one of them round a real federation."""

import math

import dp_accounting
import pytest
import torch

from fedgauge.client.rng import generator
from tests.theory import canary_world as module
from tests.theory.canary_world import DELTA, MechanismCase, canary_world, training


def test_rows_are_next_to_the_epsilon_of_an_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = torch.zeros(4000)
    cases = [MechanismCase("one", 1.0, (nobody,)), MechanismCase("four", 3.0, (nobody,) * 4)]
    monkeypatch.setattr(module, "cases", lambda seed: iter(cases))
    rows = canary_world(n=20, iterations=40)
    assert [(r.cell, r.attack) for r in rows if r.metric == "epsilon"] == [
        ("one", "final model"),
        ("four", "final model"),
        ("four", "all iterates"),
    ]
    for row in rows:
        sigma = 1.0 if row.cell == "one" else 3.0 / 2  # four releases are as one with half the noise
        assert row.reference == pytest.approx(dp_accounting.get_epsilon_gaussian(sigma, DELTA), rel=1e-6)
        assert row.low is not None and row.high is not None and row.low < row.here < row.high
        if row.metric == "epsilon":
            assert abs(row.here - row.reference) < 3 * (row.high - row.here) / 1.96
    assert all(row.n == 20 for row in rows)


def test_equal_seeds_give_equal_estimates() -> None:
    case = MechanismCase("one", 1.0, (torch.zeros(2000),))
    assert case.estimates(10, generator(1)) == case.estimates(10, generator(1)) != case.estimates(10, generator(2))


def test_the_federations_part_is_clipped_clients_sums() -> None:
    parts = list(training(0))
    assert len(parts) == module.ROUNDS
    assert {t.shape for t in parts} == {torch.Size([784 * 64 + 64 + 64 * 10 + 10])}
    sizes = [float(t.norm()) for t in parts]
    assert all(1 < size <= 8 for size in sizes), "eight updates of norm at most 1, alike"
    assert math.isfinite(sum(sizes))
