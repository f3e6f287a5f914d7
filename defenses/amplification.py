"""Privacy amplification: what rounds lose that each use a secret random part of the records, computed numerically, and tightly.

Renyi divergences of such rounds (Wang et al., 2019) give bounds several times as large.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

GRID = 2**14  # losses on each side of zero at which a round's privacy is computed
LEAST = 1e-16  # delta at which they end
COARSEST = 512.0  # gap of the grid, near the last whose exponential is a number: noise that needs more hides nothing
TAIL = 1e-15  # of the losses of many rounds, which counts as a loss without end
ADDED = (
    16  # of so many rounds all are composed anew, the rest is added one by one: no more error than so many times TAIL
)


@lru_cache(maxsize=4096)  # milliseconds each, and the same for all clients of equal shards
def sampled_epsilon(part: float, noise: float, rounds: int, delta: float) -> float:
    """Of rounds that each draw this part of the records without replacement, one of which may be replaced by another.

    A round's delta at each epsilon is that of Balle, Barthe & Gaboardi (2018), theorem 10; a pair of distributions has it, and
    dominates the round, so that products of the pair dominate many rounds (Zhu, Dong & Wang, 2022, theorem 10). The products
    are computed numerically, and from above. A round more than was asked for last costs a tenth of any other number.

    Args:
        noise: normal noise's standard deviation over what a replaced record can move; inf is the result where it is too little
            for a grid.
    """
    found = _rounds_of(part, noise)
    return math.inf if found is None else found.after(rounds).epsilon(delta)


@dataclass(frozen=True)
class _Losses:
    """The privacy loss of a pair of distributions, on a grid.

    Args:
        gap: between two points of the grid; lowest: the first point, in gaps.
        probs: (points,) of each point's loss.
        infinite: the probability of a loss without end.
    """

    gap: float
    lowest: int
    probs: NDArray[np.float64]
    infinite: float

    def times(self, rounds: int) -> "_Losses":
        """Of so many rounds."""
        from dp_accounting.pld import common  # type: ignore[import-untyped]

        if rounds == 1:
            return self
        # it cuts where the least of several bounds is, and one that overflows is not the least
        with np.errstate(over="ignore"):
            start, probs = common.self_convolve(self.probs, rounds, TAIL)
        infinite = TAIL - math.expm1(rounds * math.log1p(-self.infinite))
        return _Losses(self.gap, rounds * self.lowest + start, np.asarray(probs), infinite)

    def and_then(self, other: "_Losses") -> "_Losses":
        """Of both, one after the other."""
        from scipy.signal import fftconvolve

        probs = fftconvolve(self.probs, other.probs)
        low, high = (int(np.searchsorted(np.cumsum(side), TAIL / 2)) for side in (probs, probs[::-1]))
        kept = probs[low : len(probs) - high]
        infinite = TAIL + self.infinite + other.infinite - self.infinite * other.infinite
        return _Losses(self.gap, self.lowest + other.lowest + low, kept, infinite)

    def epsilon(self, delta: float) -> float:
        """The least that holds with this delta, 0 or more."""
        if self.infinite > delta:
            return math.inf
        losses = self.gap * np.arange(self.lowest + len(self.probs) - 1, self.lowest - 1, -1)
        upper = self.infinite + np.cumsum(self.probs[::-1])
        with np.errstate(divide="ignore", invalid="ignore"):
            lower = np.logaddexp.accumulate(np.log(np.maximum(self.probs[::-1], 0)) - losses)
            # where the loss of delta from the points so far, linear in exp(epsilon), reaches delta: it holds above the next one
            crossing = np.where(upper > delta, np.log(upper - delta) - lower, -np.inf)
        found = np.flatnonzero(crossing[:-1] >= losses[1:])
        return max(0.0, float(crossing[found[0]] if len(found) else crossing[-1]))


class _Rounds:
    """One round's losses, and those of the number of rounds that was asked for last."""

    def __init__(self, one: _Losses) -> None:
        self._one = one
        self._last = (1, one)  # rounds and their losses: replaced as a whole, as several threads may ask

    def after(self, rounds: int) -> _Losses:
        """Of so many rounds, 1 or more: the same, whatever was asked for before."""
        done, losses = self._last
        whole = rounds - rounds % ADDED
        if not max(whole, 1) <= done <= rounds:
            done, losses = (whole, self._one.times(whole)) if whole else (1, self._one)
        for _ in range(rounds - done):
            losses = losses.and_then(self._one)
        self._last = (rounds, losses)
        return losses


@lru_cache(maxsize=64)  # a megabyte each
def _rounds_of(part: float, noise: float) -> _Rounds | None:
    """With a round's losses on a grid, from above (Doroshenko et al., 2022, algorithm 1); None if the grid were too coarse."""
    most = 1.0
    while (
        not sampled_delta(np.array([most]), part, noise)[0] <= LEAST
    ):  # it is no number where the noise is next to nothing
        most *= 2
        if most > GRID * COARSEST:
            return None
    losses, gap = np.linspace(-most, most, 2 * GRID + 1), most / GRID
    deltas = np.minimum.accumulate(sampled_delta(losses, part, noise))
    falls = -np.diff(deltas)
    probs = np.zeros_like(deltas)
    probs[0] = 1 - deltas[0]
    probs[1:] += falls / -math.expm1(-gap)
    probs[:-1] -= falls / math.expm1(gap)
    return _Rounds(_Losses(gap, -GRID, np.maximum(probs, 0), float(deltas[-1])))


def sampled_delta(epsilons: NDArray[np.float64], part: float, noise: float) -> NDArray[np.float64]:
    """One round's delta at each epsilon, which may be negative: replacement has no direction."""
    from scipy.special import log_ndtr, ndtr

    size = np.abs(epsilons)
    # log(1 + (e^size - 1) / part), without e^size
    whole = size - math.log(part) + np.log1p((part - 1) * np.exp(-size))
    half, shift = 1 / (2 * noise), whole * noise
    deltas = part * np.maximum(ndtr(half - shift) - np.exp(np.minimum(whole + log_ndtr(-half - shift), 0)), 0)
    found: NDArray[np.float64] = np.where(epsilons >= 0, deltas, -np.expm1(-size) + np.exp(-size) * deltas)
    return found
