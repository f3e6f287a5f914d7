"""Canaries: volunteer clients send random unit updates, and how well these can be detected gives an empirical epsilon.

Andrew et al., One-shot empirical privacy estimation for federated learning (ICLR 2024). In d dimensions the cosine of a random
unit vector with anything independent of it is nearly N(0, 1/d). The canaries' cosines with a mechanism's release are normal
around a mean, measured over all canaries of a single run. The epsilon at which these two normal distributions can be
distinguished at delta is what the release revealed about a client to an observer of cosines. It is an estimate and no upper
bound: a better observer may learn more.
"""

import math
from collections.abc import Callable, Iterable

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


def gaussian_epsilon(ratio: float, delta: float) -> float:
    """The exact epsilon of the Gaussian mechanism; ratio: sensitivity over sigma, times sqrt(releases) (Balle, Wang, 2018)."""
    import dp_accounting  # type: ignore[import-untyped]

    epsilon = float(dp_accounting.get_epsilon_gaussian(1 / ratio, delta)) if ratio else 0.0
    return epsilon if epsilon <= LARGEST else math.inf


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
