"""Lower bounds on epsilon from one run, by guesses about canary examples.

A fair coin decides for each canary whether it is among the data. Three bounds, each with 95 % confidence, from the fewest
assumptions to the most:

- any (epsilon, delta)-differentially private mechanism: the surest guesses are right at most as often as a coin that shows the
  truth with probability e^epsilon / (e^epsilon + 1), but for a part that grows with delta (Steinke, Nasr & Jagielski, Privacy
  auditing with one (1) training run, NeurIPS 2023, theorem 5.2 and appendix D);
- a mechanism with a Gaussian trade-off curve, such as Gaussian noise without sampling: the same guesses refute every mu
  under which they would be too many (Mahloujifar, Melis & Chaudhuri, Auditing f-differential privacy in one run, ICML 2025);
- evidence that is normal with one variance, independently for each canary: the distance between the means of canaries in and
  out of the data, in standard deviations, is mu (as in Agrawal et al., Let's ask Gauss, 2606.12733).

How many guesses are made must not depend on the coins. A bound is the highest of a few fixed numbers of guesses, each at its
share of the probability of error.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedgauge.attacks.membership.canary_epsilon import gaussian_epsilon, smallest

EVIDENCE = "canary_evidence"  # the metric: log p(update | the canary is among the data) - log p(update | it is not)
PARTS = (1, 2, 8)  # the guesses are all canaries, or the surest half or eighth of them
ERROR = 0.05  # probability that a bound exceeds an epsilon that holds
NORMAL_ERROR = 1.6449  # standard deviations that a normal variable exceeds with this probability
LARGEST_MU = 32.0
WIDTH, ROUNDS = 65, 3  # of the search for mu


@dataclass(frozen=True)
class GuessBound:
    """Lower bounds on epsilon.

    Args:
        guesses, right: number of the surest guesses that give `epsilon`, and of the right ones among them.
        epsilon: without an assumption.
        gaussian: if the trade-off curve is Gaussian.
        normal: if the evidence is normal.
    """

    guesses: int
    right: int
    epsilon: float
    gaussian: float
    normal: float


def guess_bound(evidence: Tensor, included: Tensor, delta: float, canaries: int | None = None) -> GuessBound:
    """Bound epsilon from below by the surest guesses and by all evidence, with 95 % confidence each.

    Args:
        evidence: (M,) of each canary; above 0 it is guessed to be among the data.
        included: (M,) bool: whether it is.
        canaries: number of coins tossed, at least M; default: M.

    Example:
        >>> included = torch.arange(1000) % 2 == 0
        >>> evidence = included.double() * 2 - 1 + torch.linspace(-2, 2, 1000, dtype=torch.float64)
        >>> bound = guess_bound(evidence, included, delta=1e-5)
        >>> bound.epsilon < min(bound.gaussian, bound.normal)
        True
    """
    order, tossed = evidence.abs().argsort(descending=True, stable=True), canaries or len(evidence)
    right = ((evidence > 0) == included)[order].cumsum(0)
    counts = {max(1, len(evidence) // part) for part in PARTS}
    tries = [(n, int(right[n - 1]), tossed) for n in sorted(counts, reverse=True)]
    epsilons = [least_epsilon(*each, delta, ERROR / len(PARTS)) for each in tries]
    best = max(range(len(tries)), key=epsilons.__getitem__)
    mu = max(least_mu(*each, ERROR / len(PARTS)) for each in tries)
    normal = normal_mu(evidence, included)
    return GuessBound(*tries[best][:2], epsilons[best], gaussian_epsilon(mu, delta), gaussian_epsilon(normal, delta))


@lru_cache(maxsize=4096)  # a page asks for the same rounds again
def least_epsilon(guesses: int, right: int, canaries: int, delta: float, error: float = ERROR) -> float:
    """Return the largest epsilon that so many right guesses refute, except with this probability of error; 0 if none.

    Args:
        canaries: how many coins were tossed, at least `guesses`.

    Example:
        >>> round(least_epsilon(guesses=10, right=10, canaries=10, delta=0.0), 3)  # p^10 = 0.05, epsilon = log(p / (1 - p))
        1.052
    """
    return smallest(lambda epsilon: -chance(guesses, right, canaries, epsilon, delta), -error)


def chance(guesses: int, right: int, canaries: int, epsilon: float, delta: float) -> float:
    """Bound the probability that so many guesses are right where (epsilon, delta)-differential privacy holds."""
    counts, of = torch.arange(guesses + 1, dtype=torch.float64), torch.tensor(float(guesses), dtype=torch.float64)
    ways = torch.lgamma(of + 1) - torch.lgamma(counts + 1) - torch.lgamma(of - counts + 1)
    lie = -torch.nn.functional.softplus(torch.tensor(epsilon, dtype=torch.float64))  # log of 1 / (e^epsilon + 1)
    exactly = (ways + guesses * lie + counts * epsilon).exp()
    # delta may lift outcomes that lack i of the right guesses, at the price of i each
    below = exactly[:right].flip(0).cumsum(0) / torch.arange(1, right + 1)
    lifted = float(below.max()) if right else 0.0
    return min(1.0, float(exactly[right:].sum()) + 2 * canaries * delta * lifted)


@lru_cache(maxsize=4096)
def least_mu(guesses: int, right: int, canaries: int, error: float = ERROR) -> float:
    """Return the largest mu of a Gaussian trade-off curve that so many right guesses refute; 0 if none, at most LARGEST_MU.

    Args:
        canaries: number of coins tossed, at least `guesses`.
    """
    low, high = 0.0, LARGEST_MU
    for _ in range(ROUNDS):
        grid = torch.linspace(low, high, WIDTH, dtype=torch.float64)
        refuted = (~_explained(guesses, right, canaries, grid, error)).nonzero().flatten().tolist()
        if not refuted:
            return low
        if (last := refuted[-1]) == WIDTH - 1:
            return high
        low, high = float(grid[last]), float(grid[last + 1])
    return low


def _explained(guesses: int, right: int, canaries: int, mu: Tensor, error: float) -> Tensor:
    """Tell for each mu (n,) whether so many guesses may be right with this probability: algorithm 3 of the paper.

    `correct` and `wrong` are lower bounds on the mean part of the canaries guessed rightly and wrongly while at least i guesses
    are right. A Gaussian trade-off curve bounds the wrong ones at i - 1 by the right ones at i.
    """
    correct, wrong = (torch.full_like(mu, error * part / canaries) for part in (right, guesses - right))
    for i in range(right - 1, -1, -1):
        more = torch.maximum(wrong, torch.special.ndtr(torch.special.ndtri(correct.clamp(max=1.0)) - mu))
        correct, wrong = correct + i / (guesses - i) * (more - wrong), more
    return correct + wrong < guesses / canaries


def normal_mu(evidence: Tensor, included: Tensor) -> float:
    """Return a lower bound on the distance of two normal distributions of one deviation, in deviations; 0 with few canaries."""
    inside, outside = evidence[included].double(), evidence[~included].double()
    if min(len(inside), len(outside)) < 2:
        return 0.0
    free = len(evidence) - 2
    squares = (inside - inside.mean()).square().sum() + (outside - outside.mean()).square().sum()
    mu = float((inside.mean() - outside.mean()) / (squares / free).sqrt().clamp_min(1e-300))
    mu = max(0.0, min(mu, 1e6))
    # nearly Student's, as the deviation is estimated
    quantile = NORMAL_ERROR * (1 + (NORMAL_ERROR**2 + 1) / (4 * free))
    return max(0.0, mu - quantile * math.sqrt(1 / len(inside) + 1 / len(outside) + mu**2 / (2 * free)))
