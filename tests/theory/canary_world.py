"""Canaries in mechanisms whose epsilon is known: does the estimate from a single run agree with it?

Each of `n` releases is audited by itself, with its own canaries, which shows the spread of one estimate.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from fedgauge.attacks.membership.canary_epsilon import cosines, gaussian_epsilon, smallest
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.update import average, canary
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from fedgauge.simulations.reproduction.measures import ComparedFigure
from tests.theory.gaussian_world import mean_interval

DELTA = 1e-5
DIMENSION = 2**16
SIGMAS = (0.5, 1.0, 3.0)  # noise over the norm of one client's contribution
ROUNDS = 4


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


def normal_epsilon(mean: float, deviation: float, delta: float) -> float:
    """The smallest epsilon at which N(0, 1) and N(mean, deviation^2) are indistinguishable up to delta, in both directions."""
    # from the other side, and in its units, the first is again a normal distribution; with equal deviations it is the same
    sides = {(mean, deviation), (mean / deviation, 1 / deviation)}
    return max(smallest(partial(_excess, *side), delta) for side in sides)


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


@dataclass(frozen=True, eq=False)
class MechanismCase:
    """A mechanism that sums clients' clipped contributions and adds noise.

    Args:
        honest: for each round, what the clients that are not canaries add to the sum, as one vector (d,).
    """

    name: str
    sigma: float
    honest: tuple[Tensor, ...]

    @property
    def dimension(self) -> int:
        return len(self.honest[0])

    @property
    def epsilon(self) -> float:
        """The true epsilon."""
        return gaussian_epsilon(math.sqrt(len(self.honest)) / self.sigma, DELTA)

    def estimates(self, count: int, rng: Generator) -> dict[tuple[str, str], float]:
        """Epsilon estimated from one run with `count` canaries, by what is observed and how the variance is treated."""
        drawn = [canary({"": self.honest[0]}, rng)[""] for _ in range(count)]
        planted = [clip(1.0).apply({"": 2 * one}, None) for one in drawn]
        together = torch.stack([one[""] for one in planted]).sum(0)
        released = [gaussian(self.sigma).apply({"": part + together}, rng) for part in self.honest]
        final = cosines({"": torch.stack([r[""] for r in released]).sum(0)}, planted)
        statistics = {"final model": final}
        if len(released) > 1:
            statistics["all iterates"] = combine_iterates([cosines(one, planted) for one in released])
        return {
            (observed, metric): empirical_epsilon(similarities, self.dimension, DELTA, equal)
            for observed, similarities in statistics.items()
            for metric, equal in (("epsilon", True), ("epsilon_measured_variance", False))
        }


def cases(seed: int) -> Iterator[MechanismCase]:
    """Noise alone at several levels, noise over several rounds, and noise on rounds of a real federation."""
    nobody = torch.zeros(DIMENSION)
    for sigma in SIGMAS:
        yield MechanismCase(f"sigma {sigma:g}", sigma, (nobody,))
    yield MechanismCase(f"sigma 3, {ROUNDS} rounds", 3.0, (nobody,) * ROUNDS)
    yield MechanismCase(f"sigma 3, {ROUNDS} rounds of 8 clients, mlp on MNIST", 3.0, tuple(training(seed)))


def training(seed: int) -> Iterator[Tensor]:
    """What the clients of a federation with clipped updates add to each round's sum, as one vector."""
    data = {"use": "mnist5k", "batch_size": 16}
    chain = (
        {"use": "local_sgd", "rate": 1.0},
        {"use": "clip", "max_norm": 1.0},
    )
    fed = Federation(Protocol(seed, ROUNDS, 8, data, {"use": "mlp", "hidden": [64]}, chain))
    params, buffers = fed.initial()
    for round in range(1, ROUNDS + 1):
        mean = average(
            [fed.own_update(params, buffers, c, round) for c in range(fed.protocol.clients)], [1] * fed.protocol.clients
        )
        yield fed.protocol.clients * torch.cat([t.flatten() for t in mean.values()])
        params = {k: t + mean[k] for k, t in params.items()}


def canary_world(n: int = 100, seed: int = 0, iterations: int = 128) -> list[ComparedFigure]:
    """For each mechanism, the true epsilon and the mean of n runs' estimates.

    Args:
        iterations: canaries in each run.
    """
    rows = []
    for case in cases(seed):
        runs = [case.estimates(iterations, generator(seed, "canaries", case.name, run)) for run in range(n)]
        for observed, metric in runs[0]:
            estimates = torch.tensor([run[observed, metric] for run in runs], dtype=torch.float64)
            rows.append(ComparedFigure(case.name, observed, metric, case.epsilon, *mean_interval(estimates), n))
    return rows
