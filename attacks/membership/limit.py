"""The limit of a membership test on one noisy update: the trade-off curve of normal noise, and the line of (epsilon, delta).

Let a candidate move the expected update by mu * sigma, where sigma is the noise's standard deviation. If all else is known, the
best test detects it with power Phi(Phi^-1(alpha) + mu) at false-positive rate alpha (Dong, Roth & Su, 2022). Rounds with fresh
noise add up as mu = sqrt(sum of mu_i^2). A test that knows less of the batch does worse. The weights may reveal more of an
example that was trained on before: the curve covers only the update.
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.client.gradient import StochasticLayer
from fedgauge.client.transforms import (
    BatchTransform,
    GroupMean,
    Link,
    UpdateDistribution,
    is_identity,
    is_per_example,
    noise_free,
)


def power(alpha: float, mu: float) -> float:
    """The highest true-positive rate at a false-positive rate alpha in [0, 1], where noise is normal; mu >= 0.

    >>> round(power(0.05, mu=1.0), 4)
    0.2595
    """
    if alpha in (0.0, 1.0) or math.isinf(mu):
        return 1.0 if alpha == 1 or math.isinf(mu) else 0.0
    normal = NormalDist()
    return normal.cdf(normal.inv_cdf(alpha) + mu)


def mu_of(detected: float, alpha: float) -> float:
    """The inverse of `power` at a false-positive rate in (0, 1); 0 for less than chance.

    >>> round(mu_of(power(0.01, mu=1.3), 0.01), 6)
    1.3
    """
    if detected <= alpha:
        return 0.0
    return math.inf if detected >= 1 else NormalDist().inv_cdf(detected) - NormalDist().inv_cdf(alpha)


def detectability(candidates: CandidateGradients) -> Tensor:
    """mu of each candidate in one update, (N,) float64: how far it moves the update, over the noise's standard deviation.

    Raises:
        ValueError: the chain's noise is not normal, or an example does more than to add its gradient.
    """
    return candidates.norms * candidates.kept * _scale(candidates.known)


def pair_area(candidates: CandidateGradients, strangers: CandidateGradients) -> Tensor:
    """The share of pairs in which the best test scores a candidate above a stranger, (N,) float64.

    If the rest of the batch is known, the server picks the right one of two with probability Phi(distance / 2). The distance is
    that of their gradients over the noise; no score does better on average over both cases.
    """
    found, scale = [], _scale(candidates.known)
    for rows, kept in zip(candidates.rows(), candidates.kept.split(candidates.chunk), strict=True):
        own = rows.double() * kept[:, None]
        inner = strangers.products(own.to(rows)) * strangers.kept
        sizes = (strangers.norms * strangers.kept).square()
        distances = (own.square().sum(1, keepdim=True) + sizes - 2 * inner).clamp_min(0).sqrt() * scale
        found.append(torch.special.ndtr(distances / 2).mean(1))
    return torch.cat(found)


def _scale(known: Knowledge) -> float:
    """Standard deviations of the noise by which a gradient of norm 1 moves the update."""
    density, chain = known.chain.update_distribution, known.chain
    others = [link for link in chain.links if link is not chain.local and not isinstance(link, GroupMean)]
    together = [link for link in others if isinstance(link, Link) and not is_per_example(link)]
    drawn = any(isinstance(m, StochasticLayer) for m in known.model.modules())
    changed = any(isinstance(link, BatchTransform) for link in others)
    one = chain.local.one_gradient and all(map(is_identity, map(noise_free, together))) and not (drawn or changed)
    if not one or density is None or density.sigma <= 0 or density != UpdateDistribution(sigma=density.sigma):
        raise ValueError("the exact curve is only of one gradient, clipped by itself, under normal noise")
    return known.scale / (known.batch_size * density.sigma)
