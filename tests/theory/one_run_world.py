"""Bounds on epsilon from canaries in one run, where the best attack's evidence and the true epsilon are known."""

import torch
from dp_accounting import get_epsilon_gaussian

from fedgauge.attacks.membership.one_run import guess_bound
from fedgauge.client.rng import generator
from fedgauge.server.views.intervals import Rate
from fedgauge.simulations.reproduction.measures import ComparedFigure
from tests.theory.gaussian_world import mean_interval

DELTA = 1e-6
MUS = (1.0, 2.0, 4.0)  # sensitivity over noise
BOUNDS = {"epsilon": "no assumption", "gaussian": "Gaussian curve", "normal": "normal evidence"}


def one_run_world(n: int = 1000, seed: int = 0, iterations: int = 2000) -> list[ComparedFigure]:
    """For each Gaussian mechanism the mean bounds of n runs next to the truth, and the share of runs above it (%).

    Args:
        iterations: canaries in each run.
    """
    rows = []
    for mu in MUS:
        true, rng = get_epsilon_gaussian(1 / mu, DELTA), generator(seed, "one run", mu)
        found = []
        for _ in range(n):
            coins = torch.rand(iterations, generator=rng) < 0.5
            evidence = mu * (torch.randn(iterations, generator=rng, dtype=torch.float64) + mu * coins) - mu**2 / 2
            bound = guess_bound(evidence, coins, DELTA)
            found.append([getattr(bound, name) for name in BOUNDS])
        for name, values in zip(BOUNDS.values(), torch.tensor(found, dtype=torch.float64).T, strict=True):
            above = Rate(int((values > true).sum()), n)
            low, high = (100 * end for end in above.interval)
            rows.append(ComparedFigure(f"mu {mu:g}", name, "epsilon", true, *mean_interval(values), n))
            rows.append(
                ComparedFigure(f"mu {mu:g}", name, "runs above it (%)", None, 100 * above.count / n, low, high, n)
            )
    return rows
