"""The bound of one run: on paper, as the paper's own program computes it, and seldom above an epsilon that holds."""

import math

import pytest
import torch
from scipy.stats import binom
from torch import Generator

from fedgauge.attacks.membership.one_run import ERROR, PARTS, chance, guess_bound, least_epsilon
from fedgauge.client.rng import generator


@pytest.mark.parametrize("guesses", [5, 32, 1000])
def test_all_right_on_paper(guesses: int) -> None:
    """q^r = 5 %, and epsilon = log(q / (1 - q))."""
    q = ERROR ** (1 / guesses)
    assert least_epsilon(guesses, guesses, guesses, 0.0) == pytest.approx(math.log(q / (1 - q)), rel=1e-9)


def test_one_wrong_on_paper() -> None:
    """q^r + r q^(r - 1) (1 - q) = 5 % of ten guesses at q = .6058, which is an epsilon of .4299."""
    assert abs(0.6058**10 + 10 * 0.6058**9 * (1 - 0.6058) - 0.05) < 5e-5
    assert least_epsilon(10, 9, 10, 0.0) == pytest.approx(math.log(0.6058 / 0.3942), abs=3e-4)


def test_what_chance_explains_shows_nothing() -> None:
    assert least_epsilon(4, 4, 4, 0.0) == 0, "1 / 16 is above 5 %"
    assert least_epsilon(1000, 500, 1000, 1e-5) == least_epsilon(1000, 0, 1000, 1e-5) == 0
    assert chance(7, 0, 7, 3.0, 1e-5) == 1


@pytest.mark.parametrize(
    ("right", "epsilon", "delta"), [(40, 0.0, 1e-5), (37, 1.5, 1e-3), (30, 0.4, 1e-2), (40, 9.0, 1e-4)]
)
def test_the_chance_is_that_of_the_papers_program(right: int, epsilon: float, delta: float) -> None:
    """Appendix D: the tail, and 2 m delta times the largest mean probability of the i outcomes below."""
    q = 1 / (1 + math.exp(-epsilon))
    below = [sum(binom.pmf(right - j, 40, q) for j in range(1, i + 1)) / i for i in range(1, right + 1)]
    expected = min(1.0, binom.sf(right - 1, 40, q) + 2 * 160 * delta * max(below))
    assert chance(40, right, 160, epsilon, delta) == pytest.approx(expected, rel=1e-9)


def test_delta_costs_by_the_coins_tossed() -> None:
    without, few, many = (least_epsilon(40, 40, m, d) for m, d in ((40, 0.0), (40, 1e-3), (400, 1e-3)))
    assert without > few > many > 0


def responses(epsilon: float, count: int, rng: Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Coins, and evidence from randomized response; how sure it seems says nothing."""
    coins = torch.rand(count, generator=rng) < 0.5
    honest = torch.rand(count, generator=rng) < 1 / (1 + math.exp(-epsilon))
    return (coins == honest).double().mul(2).sub(1) * (0.1 + torch.rand(count, generator=rng).double()), coins


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_randomized_response_is_exceeded_in_one_of_twenty_runs_at_most(epsilon: float) -> None:
    """Randomized response is the mechanism for which the bound is tight."""
    rng = generator("randomized response", epsilon)
    found = [guess_bound(*responses(epsilon, 400, rng), 0.0).epsilon for _ in range(600)]
    assert sum(bound > epsilon for bound in found) <= 30
    assert sum(found) / 600 > 0.5 * epsilon, "a bound of nothing would never be wrong"


def test_the_surest_guesses_count() -> None:
    """Of 64 canaries the eight surest are right, and all others are wrong."""
    coins = torch.arange(64) % 2 == 0
    evidence = torch.where(coins, 1.0, -1.0).double()
    evidence[8:] *= -0.5
    bound = guess_bound(evidence, coins, 1e-5)
    assert (bound.guesses, bound.right) == (8, 8)
    assert bound.epsilon == least_epsilon(8, 8, 64, 1e-5, ERROR / len(PARTS)) > 0
    assert guess_bound(-evidence, coins, 1e-5).right == 56, "of all 64"
    assert guess_bound(evidence[:1], coins[:1], 1e-5, canaries=64).epsilon == 0
