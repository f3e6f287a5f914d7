"""What no test of membership can exceed: the trade-off curve of normal noise, and the line of (epsilon, delta).

Noise of standard deviation sigma on the mean of a batch in which a candidate moves the expected update by mu * sigma lets the
best test detect it with power Phi(Phi^-1(alpha) + mu) at false-positive rate alpha, if all else is known (Dong, Roth & Su,
2022). Rounds with fresh noise add up as mu = sqrt(sum of mu_i^2). A test that knows less of the batch does worse.
"""

import math
from collections.abc import Iterable
from statistics import NormalDist

from torch import Tensor

from fedgauge.attacks.membership.gradients import CandidateGradients


def power(alpha: float, mu: float) -> float:
    """The highest true-positive rate at a false-positive rate alpha in [0, 1], where noise is normal; mu >= 0.

    >>> round(power(0.05, mu=1.0), 4)
    0.2595
    """
    _check(alpha)
    if not mu >= 0:
        raise ValueError(f"mu must not be negative, got {mu}")
    if alpha in (0.0, 1.0) or math.isinf(mu):
        return 1.0 if alpha == 1 or math.isinf(mu) else 0.0
    normal = NormalDist()
    return normal.cdf(normal.inv_cdf(alpha) + mu)


def area(mu: float) -> float:
    """The area under the curve of `power`: Phi(mu / sqrt 2)."""
    return NormalDist().cdf(mu / math.sqrt(2))


def mu_of(area: float) -> float:
    """The inverse of `area`; 0 for an area below one half.

    >>> round(mu_of(area(1.3)), 6)
    1.3
    """
    if area <= 0.5:
        return 0.0
    return math.inf if area >= 1 else math.sqrt(2) * NormalDist().inv_cdf(area)


def composed(mus: Iterable[float]) -> float:
    """mu of several rounds with fresh noise: the square root of the sum of their squares."""
    return math.sqrt(sum(mu * mu for mu in mus))


def private_power(alpha: float, epsilon: float, delta: float) -> float:
    """The highest true-positive rate at alpha under (epsilon, delta): e^epsilon alpha + delta, and its mirror image.

    >>> round(private_power(0.01, epsilon=1.0, delta=0.0), 4)
    0.0272
    """
    _check(alpha)
    if not epsilon >= 0 or not 0 <= delta <= 1:
        raise ValueError(f"epsilon must be at least 0 and delta in [0, 1], got {epsilon} and {delta}")
    if math.isinf(epsilon):
        return 1.0
    steep, flat = math.exp(min(epsilon, 700.0)) * alpha + delta, 1 - math.exp(-epsilon) * (1 - delta - alpha)
    return max(0.0, min(1.0, steep, flat))


def detectability(candidates: CandidateGradients) -> Tensor:
    """mu of each candidate in one update, (N,) float64: how far it moves the update, over the noise's standard deviation.

    Raises:
        ValueError: the chain's noise is not normal, so its curve is another.
    """
    known = candidates.known
    density = known.chain.update_distribution
    if density is None or not density.sigma > 0 or density.scale or density.shrink != 1:
        raise ValueError(
            f"the exact curve is of normal noise alone, and this chain's noise is {density or 'of no known density'}"
        )
    return candidates.norms * candidates.kept * known.scale / (known.batch_size * density.sigma)


def _check(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"a false-positive rate is in [0, 1], got {alpha}")
