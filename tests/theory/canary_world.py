"""Canaries in mechanisms whose epsilon is known: does the estimate from a single run agree with it?

Each of `n` releases is audited by itself, with its own canaries, which shows the spread of one estimate.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from fedgauge.attacks.membership.canary_epsilon import combine_iterates, cosines, empirical_epsilon, gaussian_epsilon
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.update import canary
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from fedgauge.simulations.experiments.measures import ComparedFigure
from fedgauge.simulations.run.honest_rounds import honest_rounds
from tests.theory.gaussian_world import mean_interval

DELTA = 1e-5
DIMENSION = 2**16
SIGMAS = (0.5, 1.0, 3.0)  # noise over the norm of one client's contribution
ROUNDS = 4


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
        planted = [clip(1.0).apply(canary({"": self.honest[0]}, rng, size=2.0), None) for _ in range(count)]
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
    for now in honest_rounds(fed, ROUNDS):
        yield fed.protocol.clients * torch.cat([t.flatten() for t in now.mean.values()])


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
