"""Stacking: the logistic regression on paper, and members that several weak scores detect together."""

import math

import pytest
import torch

from fedgauge.attacks.membership.stacking import logistic_regression


def test_the_regression_has_the_log_odds_of_a_table_of_two_by_two() -> None:
    """Of 4,000 with the feature at 3 three quarters are members, of 4,000 with it at 1 one quarter: log-odds log 3 and -log 3."""
    x = torch.tensor([1.0, 3.0]).repeat_interleave(4000)[:, None].double()
    y = torch.tensor([True, False, False, False] * 1000 + [True, True, True, False] * 1000)
    slope, constant = logistic_regression(x, y).tolist()
    assert slope == pytest.approx(math.log(3), rel=1e-2)  # by the weight's prior
    assert 2 * slope + constant == pytest.approx(0, abs=1e-9)


def test_a_feature_that_never_varies_has_no_weight() -> None:
    x = torch.stack([torch.zeros(8), torch.arange(8.0)], 1).double()
    weights = logistic_regression(x, torch.arange(8) > 5)
    assert float(weights[0]) == 0 and float(weights[1]) > 0 and bool(weights.isfinite().all())
