"""95 % intervals of means, shares and rates, and probabilities of luck."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NORMAL_95 = 1.959963984540054  # the standard normal's 97.5 % quantile
LUCK = 0.025  # one side of a 95 % interval


def clustered_interval(
    values: Floats, clients: Ints, outside: float = LUCK, whole: float | None = None
) -> tuple[float, float] | None:
    """Return the t interval of a mean over examples, clustered by client; None below two clients.

    The mean is the ratio of the clients' sums to their counts. A share gets Wilson's interval with that error in place of the
    binomial one.

    Args:
        outside: probability on either side of the interval; default: of 95 %.
        whole: largest value of a share; None: no shares.
    """
    from scipy.special import stdtrit  # takes long to load

    sums, counts = np.bincount(clients, values), np.bincount(clients)
    sums, counts = sums[counts > 0], counts[counts > 0]
    k, n = len(counts), counts.sum()
    if k < 2:
        return None
    mean = sums.sum() / n
    error = sqrt(k / (k - 1) * float(((sums - mean * counts) ** 2).sum())) / n
    half = stdtrit(k - 1, 1 - outside) * error
    if whole is not None and 0 < mean < whole:
        extra = half**2 / (mean * (whole - mean))  # z^2 / n of Wilson's interval
        middle, half = mean + extra * whole / 2, sqrt(half**2 + (extra * whole / 2) ** 2)
        low, high = (middle - half) / (1 + extra), (middle + half) / (1 + extra)
        return max(0.0, float(low)), min(whole, float(high))
    return float(mean - half), float(mean + half)


@dataclass(frozen=True)
class Rate:
    """A count out of n with its 95 % Wilson interval (Wilson, 1927)."""

    count: int
    n: int

    def __str__(self) -> str:
        return f"{self.count} of {self.n}"

    @property
    def fraction(self) -> float | None:
        """count / n; None for n = 0."""
        return self.count / self.n if self.n else None

    @property
    def interval(self) -> tuple[float, float]:
        """(low, high) in [0, 1]; all of it for n = 0."""
        if not self.n:
            return 0.0, 1.0
        p, z2 = self.count / self.n, NORMAL_95**2 / self.n
        centre, half = p + z2 / 2, NORMAL_95 * sqrt(p * (1 - p) / self.n + z2 / (4 * self.n))
        return max(0.0, (centre - half) / (1 + z2)), min(1.0, (centre + half) / (1 + z2))


def guessed_labels(shares: Sequence[float], size: int) -> float:
    """Return the mean share of a batch's labels that the best guess without its update gets right, in any order.

    Args:
        shares: share of each class among all examples, in (0, 1]; they sum to 1.
        size: number of examples in the batch.
    """
    from scipy.special import bdtrc  # takes long to load

    repeat = np.arange(size)[:, None]
    right = bdtrc(repeat, size, np.asarray(shares)[None])  # P(a class occurs more than `repeat` times)
    return float(np.sort(right, axis=None)[-size:].sum() / size)


def luck_bound(rate: float, expected: float, n: float) -> float:
    """Bound the probability that n independent trials of mean `expected` reach a rate (Hoeffding, 1963)."""
    if rate <= expected:
        return 1.0
    missed = (1 - rate) * log((1 - rate) / (1 - expected)) if rate < 1 else 0.0
    return exp(-n * (rate * log(rate / expected) + missed))


def luck_of_hits(own: Rate, guess: Rate) -> float:
    """Return the probability of at least as many hits if the attack is no better than the guess (Fisher's exact test)."""
    from scipy.stats import hypergeom  # half a second to import

    return float(hypergeom.sf(own.count - 1, own.n + guess.n, own.count + guess.count, own.n))
