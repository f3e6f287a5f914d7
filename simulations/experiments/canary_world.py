"""Canaries in mechanisms whose epsilon is known: whether a single run's estimate comes out at it.

`n` releases are each audited by themselves, with canaries of their own, so that the spread of one estimate is seen.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from fedgauge.attacks.grading.canary import canary, combine_iterates, cosines, empirical_epsilon, gaussian_epsilon
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.update import Update
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from fedgauge.simulations.experiments.gaussian_world import NORMAL_95, WorldFigure

DELTA = 1e-5
DIMENSION = 2**16
SIGMAS = (0.5, 1.0, 3.0)  # of the noise, over the norm of one client's part
ROUNDS = 4


@dataclass(frozen=True, eq=False)
class MechanismCase:
    """A mechanism that sums clients' clipped parts and adds noise.

    Args:
        honest: for each round what clients that are no canaries add to the sum, as one vector (d,).
    """

    name: str
    sigma: float
    honest: tuple[Tensor, ...]

    @property
    def dimension(self) -> int:
        return len(self.honest[0])

    @property
    def epsilon(self) -> float:
        """The true one."""
        return gaussian_epsilon(math.sqrt(len(self.honest)) / self.sigma, DELTA)

    def estimates(self, count: int, rng: Generator) -> dict[tuple[str, str], float]:
        """What one run with so many canaries says of epsilon, by what is looked at and how the variance comes in."""
        planted = [clip(1.0).apply(canary({"": self.honest[0]}, rng, size=2.0), None) for _ in range(count)]
        together = torch.stack([one[""] for one in planted]).sum(0)
        released = [gaussian(self.sigma).apply({"": part + together}, rng) for part in self.honest]
        final = cosines({"": torch.stack([r[""] for r in released]).sum(0)}, planted)
        looks = {"final model": final}
        if len(released) > 1:
            looks["all iterates"] = combine_iterates([cosines(one, planted) for one in released])
        return {
            (look, metric): empirical_epsilon(found, self.dimension, DELTA, equal)
            for look, found in looks.items()
            for metric, equal in (("epsilon", True), ("epsilon_measured_variance", False))
        }


def cases(seed: int) -> Iterator[MechanismCase]:
    """Noise alone at several levels, several rounds of it, and rounds of a real federation under it."""
    nobody = torch.zeros(DIMENSION)
    for sigma in SIGMAS:
        yield MechanismCase(f"sigma {sigma:g}", sigma, (nobody,))
    yield MechanismCase(f"sigma 3, {ROUNDS} rounds", 3.0, (nobody,) * ROUNDS)
    yield MechanismCase(f"sigma 3, {ROUNDS} rounds of 8 clients, mlp on MNIST", 3.0, tuple(training(seed)))


def training(seed: int) -> Iterator[Tensor]:
    """What the clients of a federation with clipped updates add to each round's sum, flat."""
    data = {"use": "mnist5k", "batch_size": 16}
    chain = (
        {"use": "local_sgd", "rate": 1.0},
        {"use": "clip", "max_norm": 1.0},
    )
    fed = Federation(Protocol(seed, ROUNDS, 8, data, {"use": "mlp", "hidden": [64]}, chain))
    params, buffers = fed.initial()
    for round in range(1, ROUNDS + 1):
        updates = [fed.own_update(params, buffers, c, round) for c in range(fed.protocol.clients)]
        total: Update = {k: torch.stack([u[k] for u in updates]).sum(0) for k in params}
        yield torch.cat([t.flatten() for t in total.values()])
        params = {k: t + total[k] / len(updates) for k, t in params.items()}


def canary_world(n: int = 100, seed: int = 0, iterations: int = 128) -> list[WorldFigure]:
    """For each mechanism the true epsilon and the mean of n runs' estimates.

    Args:
        iterations: canaries in each run.
    """
    rows = []
    for case in cases(seed):
        runs = [case.estimates(iterations, generator(seed, "canaries", case.name, run)) for run in range(n)]
        for look, metric in runs[0]:
            found = torch.tensor([run[look, metric] for run in runs], dtype=torch.float64)
            mean, half = float(found.mean()), float(NORMAL_95 * found.std() / math.sqrt(n))
            rows.append(WorldFigure(case.name, look, metric, case.epsilon, mean, mean - half, mean + half, n))
    return rows
