"""One run's lower bound on epsilon, from the number of correct guesses about canary examples.

Steinke, Nasr & Jagielski, Privacy auditing with one (1) training run (NeurIPS 2023, theorem 5.2 and appendix D). A fair coin
decides for each canary whether it is among the data. If what the guesses are made from is (epsilon, delta)-differentially private,
they are right at most as often as a coin that shows the truth with probability e^epsilon / (e^epsilon + 1), but for a part that
grows with delta. How many guesses are made must not depend on the coins: the bound is the highest of a few fixed numbers of
guesses, each at its share of the probability of error.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedgauge.attacks.membership.canary_epsilon import smallest

EVIDENCE = "canary_evidence"  # the metric: log p(update | the canary is among the data) - log p(update | it is not)
PARTS = (1, 2, 4, 8)  # the guesses are all canaries, or the surest half, quarter or eighth of them
ERROR = 0.05  # probability that the bound exceeds an epsilon that holds


@dataclass(frozen=True)
class GuessBound:
    """So many guesses, so many of them right, and the epsilon that this shows at least."""

    guesses: int
    right: int
    epsilon: float


def guess_bound(evidence: Tensor, included: Tensor, delta: float, canaries: int | None = None) -> GuessBound:
    """The highest lower bound on epsilon that the surest guesses give, at a confidence of 95 %.

    Args:
        evidence: (M,) of each canary; above 0 it is guessed to be among the data.
        included: (M,) bool: whether it is.
        canaries: how many coins were tossed, at least M; default: M.
    """
    order = evidence.abs().argsort(descending=True, stable=True)
    right = ((evidence > 0) == included)[order].cumsum(0)
    bounds = []
    for guesses in sorted({max(1, len(evidence) // part) for part in PARTS}, reverse=True):
        correct = int(right[guesses - 1])
        bounds.append(
            GuessBound(
                guesses, correct, least_epsilon(guesses, correct, canaries or len(evidence), delta, ERROR / len(PARTS))
            )
        )
    return max(bounds, key=lambda bound: bound.epsilon)


@lru_cache(maxsize=4096)  # a page asks for the same rounds again
def least_epsilon(guesses: int, right: int, canaries: int, delta: float, error: float = ERROR) -> float:
    """The largest epsilon that so many right guesses refute, except with this probability of error; 0 if none.

    Args:
        canaries: how many coins were tossed, at least `guesses`.
    """
    return smallest(lambda epsilon: -chance(guesses, right, canaries, epsilon, delta), -error)


def chance(guesses: int, right: int, canaries: int, epsilon: float, delta: float) -> float:
    """At most the probability that so many guesses are right where (epsilon, delta)-differential privacy holds."""
    counts, of = torch.arange(guesses + 1, dtype=torch.float64), torch.tensor(float(guesses), dtype=torch.float64)
    ways = torch.lgamma(of + 1) - torch.lgamma(counts + 1) - torch.lgamma(of - counts + 1)
    lie = -torch.nn.functional.softplus(torch.tensor(epsilon, dtype=torch.float64))  # log of 1 / (e^epsilon + 1)
    exactly = (ways + guesses * lie + counts * epsilon).exp()
    # delta may lift outcomes that lack i of the right guesses, at the price of i each
    below = exactly[:right].flip(0).cumsum(0) / torch.arange(1, right + 1)
    lifted = float(below.max()) if right else 0.0
    return min(1.0, float(exactly[right:].sum()) + 2 * canaries * delta * lifted)
