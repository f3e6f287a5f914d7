"""Canaries: volunteer clients send random unit updates, and how well these can be detected gives an empirical epsilon.

Andrew et al., One-shot empirical privacy estimation for federated learning (ICLR 2024). In d dimensions the cosine of a random
unit vector with anything independent of it is nearly N(0, 1/d). The canaries' cosines with a mechanism's release are
N(mean, variance), both measured over all canaries of a single run. The epsilon at which these two normal distributions can be
distinguished at delta is what the release revealed about a client to an observer of cosines. It is an estimate and no upper
bound: a better observer may learn more.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fedgauge.client.update import Update, norm

LARGEST = 1e6  # epsilon above which the result is infinity
HALVINGS = 60
CANARY = "canary"  # the metric: a canary's cosine with an update, in standard deviations of chance


def cosines(released: Update, canaries: Iterable[Update]) -> Tensor:
    """Cosine of each canary with the release, (K,) float64."""
    length = float(norm(released))
    if not length > 0:
        raise ValueError("the release is zero: it has no direction")
    values = []
    for one in canaries:
        inner = sum(float(torch.sum(one[k] * t)) for k, t in released.items())
        values.append(inner / length / float(norm(one)))
    return torch.tensor(values, dtype=torch.float64)


def combine_iterates(rounds: Sequence[Tensor]) -> Tensor:
    """One statistic (K,) per canary from its cosines (K,) of several rounds; without the canary again nearly N(0, 1/d)."""
    return torch.stack(list(rounds)).sum(0) / math.sqrt(len(rounds))


def empirical_epsilon(similarities: Tensor, dimension: int, delta: float, equal: bool = False) -> float:
    """The epsilon at delta that canaries' cosines (K,) with a release in so many dimensions imply.

    Args:
        equal: take their variance to be 1/d, as behind a Gaussian mechanism, and measure only the mean; else measure both, as in
            the paper, which at a small delta biases epsilon upward, the more the smaller it is (with 128 canaries by 16 % at
            epsilon 10, by 74 % at 1.27).

    Raises:
        ValueError: fewer than two canaries, or cosines that are not finite.
    """
    if len(similarities) < 2 or not bool(torch.isfinite(similarities).all()):
        raise ValueError(f"an epsilon needs the finite cosines of at least 2 canaries, got {len(similarities)}")
    scaled = similarities.double() * math.sqrt(dimension)
    return normal_epsilon(float(scaled.mean()), 1.0 if equal else float(scaled.std()), delta)


def gaussian_epsilon(ratio: float, delta: float) -> float:
    """The exact epsilon of the Gaussian mechanism; ratio: sensitivity over sigma, times sqrt(releases) (Balle, Wang, 2018)."""
    return normal_epsilon(ratio, 1.0, delta)


def normal_epsilon(mean: float, deviation: float, delta: float) -> float:
    """The smallest epsilon at which N(0, 1) and N(mean, deviation^2) are indistinguishable up to delta, in both directions."""
    # from the other side, and in its units, the first is again a normal distribution; with equal deviations it is the same
    sides = {(mean, deviation), (mean / deviation, 1 / deviation)}
    return max(smallest(partial(_excess, *side), delta) for side in sides)


def smallest(excess: Callable[[float], float], delta: float) -> float:
    """The epsilon at which a decreasing function falls to delta; 0 where it starts below, infinity where it stays above."""
    if excess(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while excess(high) > delta:
        if high >= LARGEST:
            return math.inf
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > delta else (low, middle)
    return high


def _excess(mean: float, deviation: float, epsilon: float) -> float:
    """max over sets S of P(S) - e^epsilon Q(S), with P = N(mean, deviation^2) and Q = N(0, 1): S is where p > e^epsilon q."""
    total = 0.0
    for low, high in _likelier(mean, deviation, epsilon):
        # by logarithms: e^epsilon may overflow where Q's part underflows
        log_p = _log_between((low - mean) / deviation, (high - mean) / deviation)
        log_q = _log_between(low, high)
        total += math.exp(log_p) - math.exp(min(epsilon + log_q, log_p))
    return total


def _likelier(mean: float, deviation: float, epsilon: float) -> list[tuple[float, float]]:
    """Where log p - log q = a z^2 + b z + c exceeds epsilon: at most two intervals."""
    square = deviation**2
    a, b, c = (1 - 1 / square) / 2, mean / square, -(mean**2) / (2 * square) - math.log(deviation) - epsilon
    if a == 0:
        if b == 0:
            return [(-math.inf, math.inf)] if c > 0 else []
        return [(-c / b, math.inf)] if b > 0 else [(-math.inf, -c / b)]
    inside = b * b - 4 * a * c
    if inside <= 0:
        return [(-math.inf, math.inf)] if a > 0 else []
    # compute the root without cancellation, and the other from their product c / a, since a may be tiny
    far = -(b + math.copysign(math.sqrt(inside), b)) / 2
    low, high = sorted((far / a, c / far if far else 0.0))
    return [(-math.inf, low), (high, math.inf)] if a > 0 else [(low, high)]


def _log_between(low: float, high: float) -> float:
    """The logarithm of the normal probability of an interval, computed from the smaller tail."""
    if low > 0:
        low, high = -high, -low
    outer, inner = torch.special.log_ndtr(torch.tensor([low, high], dtype=torch.float64)).tolist()
    return inner + math.log1p(-math.exp(outer - inner)) if outer < inner else -math.inf
