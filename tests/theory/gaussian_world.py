"""Gaussian worlds: inputs from a known prior, where theory says exactly what a correct attack must reach.

In the first, the maximum-a-posteriori attack must reach the van Trees bound at any noise, and no attack goes below it. In the
second, figure 4 of the Bayesian framework (Balunovic et al., ICLR 2022), the true prior with the true conditional must come
closer than any other pair. Labels are drawn, or follow from x, and are given to the attack; clients' code computes updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedgauge.attacks.base import Budget, Knowledge, Wave
from fedgauge.attacks.engine.gradient_distances import Distance, gaussian_likelihood, laplace_likelihood
from fedgauge.attacks.gaussian_prior import GaussianPrior
from fedgauge.attacks.limits import Precision, _moves, known_noise, precision
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import Energy, Prior, laplacian, mahalanobis
from fedgauge.attacks.matching.search import LBFGSSearch
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Params, UpdateFn
from fedgauge.defenses import noise
from fedgauge.server.views.intervals import NORMAL_95
from fedgauge.simulations.reproduction.measures import ComparedFigure

RATIOS = (1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)  # sigma / |g|
VARIANCE = 0.051  # of the first world's inputs
NOISE = 0.1  # of the second's gradients: Laplace noise of this scale
STD = 0.05  # pixels to a unit of x; inputs lie well inside [0, 1], so that the box has no effect


def gaussian_of(mean: Tensor, covariance: Tensor) -> GaussianPrior:
    """A prior with this mean (d,) and positive definite covariance (d, d)."""
    variances, axes = torch.linalg.eigh(covariance.double())
    return GaussianPrior(mean.double(), axes.T, variances)


def covariance_of(prior: GaussianPrior) -> Tensor:
    """(d, d)."""
    spread: Tensor = prior.axes.T @ ((prior.variances - prior.rest)[:, None] * prior.axes)
    return prior.rest * torch.eye(len(prior.mean), dtype=torch.float64) + spread


def information_of(prior: GaussianPrior) -> Tensor:
    """The inverse covariance (d, d)."""
    return covariance_of(replace(prior, variances=1 / prior.variances, rest=1 / prior.rest))


def fisher(forward: UpdateFn, params: Params, batch: Batch, weigh: Precision) -> Tensor:
    """F(x) = J' S^-1 J, (n, n) float64, of all n entries of batch.x, by n forward-mode derivatives."""
    units = torch.eye(batch.x.numel(), dtype=batch.x.dtype).view(-1, *batch.x.shape)
    rows = _moves(forward, params, batch, weigh, units).double()
    return rows @ rows.T


@dataclass(frozen=True, eq=False)
class known_gaussian(Prior):
    """The normal distribution that the inputs were drawn from."""

    fitted: GaussianPrior
    weight: float = 1.0

    def bind(self, known: Knowledge, params: Params) -> Energy:
        return partial(mahalanobis, known, self.fitted.mean, self.fitted)


def van_trees(information: Tensor, prior: GaussianPrior) -> float:
    """(1/n) tr[(F + covariance^-1)^-1]: with F (n, n) the mean over the prior, a bound on the mean squared error of pixels."""
    total = information + torch.block_diag(*[information_of(prior)] * (len(information) // len(prior.mean)))
    return float(torch.linalg.inv(total).trace()) / len(information)


@dataclass(frozen=True, eq=False)
class GaussianWorld:
    """Inputs and a network.

    Args:
        model: tanh, float64.
        x: (N, d), the model's inputs; y: (N,).
        shift: the x of a mid-grey pixel.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    shift: float = 0.0

    @property
    def params(self) -> Params:
        """The network's weights."""
        return detached_params(self.model)

    def known(self, links: Chain) -> Knowledge:
        """What the attacker knows: everything but x."""
        shape = (1, 1, self.x.shape[1])
        mean = 0.5 - STD * self.shift
        classes = int(self.y.max()) + 1
        return Knowledge(self.model, links, shape, classes, 1, (mean,), (STD,), labels=self.y[:, None])

    def pixels(self) -> Tensor:
        """The inputs as images (N, 1, 1, 1, d) of one example each."""
        return (0.5 + STD * (self.x - self.shift))[:, None, None, None]

    def updates(self, links: Chain, seed: int) -> Wave:
        """What the server observes of N clients."""
        known = self.known(links)
        compute = links(gradient(self.model, normalise=known.normalise))
        rng = generator(seed, "gaussian world", "noise")

        def one(x: Tensor, y: Tensor) -> Params:
            return compute(self.params, Batch(x, y[None]), rng)

        seen = vmap(one, randomness="different")(self.pixels(), self.y)
        return Wave(1, tuple(range(len(self.x))), self.params, seen)


def squared_errors(attack: GradientMatching, world: GaussianWorld, links: Chain, seed: int, iterations: int) -> Tensor:
    """(N,) mean squared errors in units of x; every attack starts from the prior's mean."""
    known = world.known(links)
    start = torch.full((len(world.x), 1, *known.shape), 0.5)
    streams = [partial(generator, seed, "gaussian world", "attack", k) for k in range(len(world.x))]
    results = attack.continued(world.updates(links, seed), known, Budget(iterations), streams, start)
    guesses = []
    for one in results:
        if one.x is None or one.status != "converged":
            raise RuntimeError(f"an attack ended as {one.status}: {one.reason}")
        guesses.append(known.normalise(one.x.double()).flatten())
    return (torch.stack(guesses) - world.x).square().mean(1)


# ------------------------------------------------------------------------------------------------- on the line


def tanh_world(n: int, seed: int = 0) -> tuple[GaussianWorld, GaussianPrior]:
    """36 inputs of variance .051 around 1/2, five classes independent of them, a network of 1,013 parameters."""
    size = 36
    rng = generator(seed, "gaussian world", "inputs")
    x = 0.5 + VARIANCE**0.5 * torch.randn(n, size, generator=rng, dtype=torch.float64)
    y = torch.randint(5, (n,), generator=rng)
    world = GaussianWorld(_network(size, 24, 5, seed), x, y, shift=0.5)
    prior = gaussian_of(torch.full((size,), 0.5), torch.eye(size) * VARIANCE * STD**2)  # of pixels
    return world, prior


def mean_information(world: GaussianWorld) -> Tensor:
    """E F (d, d) over the world's inputs, of pixels, under noise of deviation 1."""
    links = chain(noise.gaussian(1.0), local_sgd(1.0))
    results = known_noise(links)
    assert results is not None
    forward = links.mean(gradient(world.model, normalise=world.known(links).normalise))
    weigh = precision(results)
    total = torch.zeros(world.x.shape[1], world.x.shape[1], dtype=torch.float64)
    for x, y in zip(world.pixels(), world.y, strict=True):
        total += fisher(forward, world.params, Batch(x, y[None]), weigh)
    return total / len(world.x)


def gaussian_world(
    n: int = 512, seed: int = 0, iterations: int = 400, ratios: Sequence[float] = RATIOS
) -> list[ComparedFigure]:
    """For each noise level, the van Trees bound and the mean squared error of the maximum-a-posteriori attack, in units of x.

    Args:
        iterations: gradient evaluations, at most.
        ratios: standard deviation of the noise over the mean norm of the gradient.
    """
    world, prior = tanh_world(n, seed)
    clean = world.updates(chain(local_sgd(1.0)), seed).update
    size = float(torch.stack([t.flatten(1).square().sum(1) for t in clean.values()]).sum(0).sqrt().mean())
    information = mean_information(world)
    objective = Objective(priors=(known_gaussian(prior),))
    attack = GradientMatching(objective, LBFGSSearch(double=True))
    rows = []
    for ratio in ratios:
        sigma = ratio * size
        bound = van_trees(information / sigma**2, prior) / STD**2
        errors = squared_errors(attack, world, chain(noise.gaussian(sigma), local_sgd(1.0)), seed, iterations)
        rows.append(_row(f"sigma / |g| = {ratio:g}", "map", "mse", bound, errors))
    return rows


# ------------------------------------------------------------------------------------------------- the true pair wins


def fig4_world(n: int, seed: int = 0) -> GaussianWorld:
    """20 unit Gaussian inputs, y = argmax(W x) over ten classes, a two-layer network with 20 hidden units."""
    size, classes = 20, 10
    rng = generator(seed, "gaussian world", "inputs")
    w = torch.randn(classes, size, generator=rng, dtype=torch.float64)
    x = torch.randn(n, size, generator=rng, dtype=torch.float64)
    return GaussianWorld(_network(size, 20, classes, seed), x, (x @ w.T).argmax(1))


def fig4_attacks() -> dict[tuple[str, str], GradientMatching]:
    """The attacks by prior and conditional; each wrong one has the variance of the true one."""
    size, centre = 20, torch.full((20,), 0.5)
    priors: dict[str, Prior] = {
        "gaussian": known_gaussian(gaussian_of(centre, torch.eye(size) * STD**2)),
        "laplacian": laplacian(1.0, 0.5, STD / 2**0.5),
    }
    conditionals: dict[str, Distance] = {
        "gaussian": gaussian_likelihood(NOISE * 2**0.5),
        "laplacian": laplace_likelihood(NOISE),
    }
    return {
        (p, c): GradientMatching(Objective(likelihood, (prior,)), LBFGSSearch(double=True))
        for p, prior in priors.items()
        for c, likelihood in conditionals.items()
    }


def fig4_errors(n: int, seed: int = 0, iterations: int = 400) -> dict[tuple[str, str], Tensor]:
    """Euclidean distances (N,) to the true inputs, by prior and conditional; the same inputs and noise for all."""
    world, links = fig4_world(n, seed), chain(noise.laplace(NOISE), local_sgd(1.0))
    return {
        pair: (squared_errors(attack, world, links, seed, iterations) * world.x.shape[1]).sqrt()
        for pair, attack in fig4_attacks().items()
    }


def bayes_fig4(n: int = 512, seed: int = 0, iterations: int = 400) -> list[ComparedFigure]:
    """For each prior and conditional, the mean Euclidean distance of reconstructions from the true inputs."""
    results = fig4_errors(n, seed, iterations)
    return [_row(f"{p} prior", f"{c} conditional", "distance", None, errors) for (p, c), errors in results.items()]


def _network(size: int, hidden: int, classes: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mlp((1, 1, size), classes, hidden=(hidden,), activation="tanh").double()


def _row(cell: str, attack: str, metric: str, reference: float | None, errors: Tensor) -> ComparedFigure:
    return ComparedFigure(cell, attack, metric, reference, *mean_interval(errors), len(errors))


def mean_interval(values: Tensor) -> tuple[float, float | None, float | None]:
    """Mean of values (N,) with its normal 95 % interval, which one value does not have."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, None, None
    half = NORMAL_95 * float(values.std()) / len(values) ** 0.5
    return mean, mean - half, mean + half
