"""Privacy amplification: the tight numerical privacy loss of rounds that each use a secret random part of the records.

Renyi divergences of such rounds (Wang et al., 2019) give bounds several times as large.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

GRID = 2**14  # losses on each side of zero at which a round's privacy is computed
LEAST = 1e-16  # delta at which they end
COARSEST = 512.0  # gap of the grid, near the last whose exponential is a number: noise that needs more hides nothing


@lru_cache(maxsize=4096)  # a tenth of a second each, and the same for all clients of equal shards
def sampled_epsilon(part: float, noise: float, rounds: int, delta: float) -> float:
    """Epsilon of rounds that each draw this part of the records without replacement; one record may be replaced by another.

    A round's delta at each epsilon is that of Balle, Barthe & Gaboardi (2018), theorem 10; a pair of distributions has it, and
    dominates the round, so that products of the pair dominate many rounds (Zhu, Dong & Wang, 2022, theorem 10). The products
    are computed numerically, and from above.

    Args:
        noise: normal noise's standard deviation over what a replaced record can move; inf is the result where it is too little
            for a grid.
    """
    one = _losses(part, noise)
    if one is None:
        return math.inf
    # it cuts where the least of several bounds is; one that overflows is not the least
    with np.errstate(over="ignore"):
        return float(one.self_compose(rounds).get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)  # a megabyte each
def _losses(part: float, noise: float) -> Any:
    """One round's privacy losses on a grid, from above (Doroshenko et al., 2022); None if the grid were too coarse."""
    from dp_accounting.pld import pld_pmf  # type: ignore[import-untyped]

    most = 1.0
    # negated: the delta is NaN where the noise is next to nothing
    while not sampled_delta(np.array([most]), part, noise)[0] <= LEAST:
        most *= 2
        if most > GRID * COARSEST:
            return None
    deltas = sampled_delta(np.linspace(-most, most, 2 * GRID + 1), part, noise)
    falling = np.minimum.accumulate(deltas)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(most / GRID, -GRID, GRID, falling)


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
