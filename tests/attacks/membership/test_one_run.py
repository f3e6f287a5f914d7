"""The bounds of one run: on paper, as the papers' own programs compute them, and seldom above an epsilon that holds."""

import math

import pytest
import torch
from dp_accounting import get_epsilon_gaussian
from scipy.optimize import brentq
from scipy.stats import binom, nct, norm, t, ttest_ind
from torch import Generator

from fedgauge.attacks.membership.one_run import (
    ERROR,
    PARTS,
    chance,
    guess_bound,
    least_epsilon,
    least_mu,
    normal_mu,
)
from fedgauge.client.rng import generator

FULL = pytest.mark.full


@pytest.mark.parametrize("guesses", [5, 32, 1000])
def test_all_right_on_paper(guesses: int) -> None:
    """q^r = 5 %, and epsilon = log(q / (1 - q))."""
    q = ERROR ** (1 / guesses)
    assert least_epsilon(guesses, guesses, guesses, 0.0) == pytest.approx(math.log(q / (1 - q)), rel=1e-9)


def test_one_wrong_on_paper() -> None:
    """q^r + r q^(r - 1) (1 - q) = 5 % of ten guesses at q = .6058, which is an epsilon of .4299."""
    assert abs(0.6058**10 + 10 * 0.6058**9 * (1 - 0.6058) - 0.05) < 5e-5
    assert least_epsilon(10, 9, 10, 0.0) == pytest.approx(math.log(0.6058 / 0.3942), abs=3e-4)


def test_results_within_chance_prove_nothing() -> None:
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


@pytest.mark.parametrize(
    ("epsilon", "runs"), [pytest.param(0.5, 100, marks=FULL), (1.0, 150), pytest.param(3.0, 100, marks=FULL)]
)
def test_randomized_response_is_exceeded_in_one_of_twenty_runs_at_most(epsilon: float, runs: int) -> None:
    """Randomized response is the mechanism for which the bound is tight."""
    rng = generator("randomized response", epsilon)
    found = [guess_bound(*responses(epsilon, 400, rng), 0.0).epsilon for _ in range(runs)]
    assert sum(bound > epsilon for bound in found) <= runs / 20
    assert sum(found) / runs > 0.5 * epsilon, "a bound of nothing would never be wrong"


def test_the_surest_guesses_count() -> None:
    """Of 160 canaries the 20 surest are right, and all others are wrong."""
    coins = torch.arange(160) % 2 == 0
    evidence = torch.where(coins, 1.0, -1.0).double()
    evidence[20:] *= -0.5
    bound = guess_bound(evidence, coins, 1e-5)
    assert (bound.guesses, bound.right) == (20, 20)
    assert bound.epsilon == least_epsilon(20, 20, 160, 1e-5, ERROR / len(PARTS)) > 0
    assert guess_bound(-evidence, coins, 1e-5).right == 140, "of all 160"
    lone = guess_bound(evidence[:1], coins[:1], 1e-5, canaries=64)
    assert lone.epsilon == lone.gaussian == lone.normal == 0


def quantiles(mu: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Evidence of `count` canaries in the data and as many outside, at the quantiles of N(mu, 1) and N(0, 1)."""
    outside = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    return mu * torch.cat([outside + mu, outside]) - mu**2 / 2, torch.arange(2 * count) < count


@pytest.mark.parametrize(
    ("mu", "published"),
    [(1.0, 2.164749), pytest.param(2.0, 4.7218075, marks=FULL), pytest.param(4.0, 9.133752, marks=FULL)],
)
def test_a_gaussian_curve_gives_at_least_the_published_bound_and_less_than_the_truth(
    mu: float, published: float
) -> None:
    """Figures of jax-privacy's tests: 10,000 canaries in and 10,000 out, delta 1e-6, 95 %, any threshold."""
    bound, true = guess_bound(*quantiles(mu, 10_000), 1e-6), get_epsilon_gaussian(1 / mu, 1e-6)
    assert published < bound.gaussian < bound.normal < true and bound.epsilon < bound.gaussian
    few = guess_bound(*quantiles(1.0, 1_000), 1e-6)
    true = get_epsilon_gaussian(1.0, 1e-6)
    assert 0.35 * true < few.epsilon and 0.55 * true < few.gaussian and 0.9 * true < few.normal < true


def test_without_evidence_every_bound_is_zero() -> None:
    scores, included = quantiles(1.0, 500)[0].sort().values, torch.arange(1000) % 2 == 0
    bound = guess_bound(scores, included, 1e-6)
    assert bound.epsilon == bound.gaussian == bound.normal == 0


@pytest.mark.parametrize(
    ("mu", "runs"), [pytest.param(0.5, 100, marks=FULL), (1.0, 200), pytest.param(3.0, 100, marks=FULL)]
)
def test_a_gaussian_mechanism_is_exceeded_in_one_of_twenty_runs_at_most(mu: float, runs: int) -> None:
    """The likelihood ratio of N(mu, 1) and N(0, 1), for 300 coins in each run."""
    rng, above, sums = generator("gaussian mechanism", mu), [0, 0], [0.0, 0.0]
    for _ in range(runs):
        coins = torch.rand(300, generator=rng) < 0.5
        evidence = mu * (torch.randn(300, generator=rng, dtype=torch.float64) + mu * coins) - mu**2 / 2
        bound = guess_bound(evidence, coins, 1e-5)
        true = get_epsilon_gaussian(1 / mu, 1e-5)
        for i, found in enumerate((bound.gaussian, bound.normal)):
            above[i] += found > true
            sums[i] += found / true / runs
    assert above[0] <= runs / 20
    assert above[1] <= runs / 20 + 3 * (0.05 * 0.95 * runs) ** 0.5, "one of twenty, and three standard errors"
    assert sums[0] > 0.2 and sums[1] > 0.5


@pytest.mark.parametrize(("guesses", "right"), [(20, 20), (40, 33), (300, 240), (1000, 999)])
def test_a_refuted_mu_explains_independent_guesses_too_seldom(guesses: int, right: int) -> None:
    """Independent guesses under mu are right with probability Phi(mu / 2); the bound holds for dependent ones too."""
    mu = least_mu(guesses, right, guesses)
    assert mu > 0 and binom.sf(right - 1, guesses, norm.cdf(mu / 2)) <= ERROR


def test_the_distance_of_normal_evidence_has_the_interval_of_students_t() -> None:
    """The smallest noncentrality that is not refuted, of 40 and 60 canaries."""
    rng = generator("student")
    coins = torch.arange(100) < 40
    evidence = torch.randn(100, generator=rng, dtype=torch.float64) + 1.5 * coins
    seen = float(ttest_ind(evidence[coins], evidence[~coins]).statistic)
    exact = brentq(lambda delta: nct.sf(seen, 98, delta) - ERROR, 0.0, seen) * math.sqrt(1 / 40 + 1 / 60)
    assert normal_mu(evidence, coins) == pytest.approx(exact, rel=0.02)


def test_few_canaries_refute_no_more_than_students_t_does() -> None:
    """Six canaries in and six out, whose statistic chance exceeds in 5.5 % of runs: between the quantiles of t and normal."""
    coins = torch.arange(12) < 6
    noise = torch.tensor([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], dtype=torch.float64).repeat(2)
    apart = t.isf(0.055, 10) * math.sqrt(float(noise.square().sum()) / 10 * (1 / 6 + 1 / 6))
    assert norm.isf(ERROR) < t.isf(0.055, 10) and normal_mu(noise + apart * coins, coins) == 0
    assert normal_mu(noise + 1.2 * apart * coins, coins) > 0
