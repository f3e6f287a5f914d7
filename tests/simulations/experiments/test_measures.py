"""Measures are ratios and means that can be computed by hand, with honest intervals."""

import numpy as np
import pytest
import torch

from fedgauge.server.views.intervals import clustered_interval
from fedgauge.simulations.experiments import measures
from tests.simulations.experiments.small_tables import outcome


def test_gains_are_ratios_that_can_be_done_on_paper() -> None:
    """Ours recovers 3 of 4 in 10, 20 and 30 iterations, theirs 2 of 4 in 40 and 60: 50 % more, in 60 % less."""
    ours = outcome([1e-4, 1e-4, 1e-4, 1.0], [10, 20, 30, 99])
    theirs = outcome([1e-4, 1.0, 1e-4, 1.0], [40, 99, 60, 99])
    by_name = measures.MEASURES
    value, low, high = by_name["success_gain"](ours, theirs)
    assert value == pytest.approx(50)
    assert low is not None and high is not None and low <= 50 <= high
    assert by_name["iterations_saved"](ours, theirs)[0] == pytest.approx(60)
    assert by_name["iterations"](ours, None)[0] == pytest.approx(20)
    assert by_name["success"](ours, None)[0] == 0.75
    nothing = outcome([1.0, 1.0], [5, 5])
    assert by_name["iterations"](nothing, None) == (None, None, None)
    assert by_name["success_gain"](nothing, nothing) == (None, None, None)


def test_intervals_resample_updates_and_one_update_gives_none() -> None:
    """Images of one update are alike here, so its interval is that of three numbers, not of twelve."""
    values = torch.tensor([[10.0] * 4, [20.0] * 4, [30.0] * 4], dtype=torch.float64)
    value, low, high = measures._mean(values)
    assert value == 20
    assert (low, high) == clustered_interval(np.array([10.0, 20.0, 30.0]), np.arange(3))
    one_by_one = clustered_interval(values.flatten().numpy(), np.arange(12))
    assert low is not None and one_by_one is not None and low < one_by_one[0]
    assert measures._mean(values[:1]) == (10.0, None, None)
