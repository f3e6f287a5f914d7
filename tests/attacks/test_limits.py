"""The limit: the bound where its answer is known, its trace form, and Fisher information."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Generator, Tensor

from fedgauge.attacks.gaussian_prior import GaussianPrior
from fedgauge.attacks.limits import (
    block_traces,
    known_noise,
    precision,
    reconstruction_robustness,
    trace_bound,
)
from fedgauge.client.chain import chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.transforms import UpdateDistribution, per_example
from fedgauge.client.update import Batch, Params, Update
from fedgauge.defenses.clip import clip
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian, laplace
from tests.attacks.refusals import check_named
from tests.theory.gaussian_world import covariance_of, fisher, gaussian_of, information_of, van_trees


def seeded(*purpose: int | str) -> Generator:
    return generator("limits", *purpose)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def linear(params: Params, batch: Batch, rng: Generator | None) -> Update:
    """A client whose update is A x, in two tensors: its posterior is known on paper."""
    y = batch.x.flatten() @ params["a"].T
    return {"first": y[:3], "rest": y[3:].view(1, -1)}


def pixels(x: Tensor) -> Batch:
    return Batch(x.view(1, 1, 1, -1), torch.zeros(1, dtype=torch.int64))


@pytest.fixture
def world() -> tuple[Tensor, GaussianPrior]:
    """A (7, 5) and a prior over its five inputs with correlations."""
    root = normal(5, 5, seed=1)
    return normal(7, 5), gaussian_of(normal(5, seed=2), root @ root.T / 5 + 0.1 * torch.eye(5))


def of_linear(a: Tensor, sigma: float) -> Tensor:
    return fisher(linear, {"a": a}, pixels(torch.zeros(5).double()), precision(UpdateDistribution(sigma=sigma)))


def test_one_number_on_paper() -> None:
    prior = gaussian_of(torch.zeros(1), torch.full((1, 1), 0.5))
    weigh = precision(UpdateDistribution(sigma=2.0))
    information = fisher(lambda p, b, r: {"w": 3 * b.x.flatten()}, {}, pixels(torch.ones(1).double()), weigh)
    assert information.item() == pytest.approx(9 / 4)
    assert van_trees(information, prior) == pytest.approx(1 / (9 / 4 + 2))


@pytest.mark.parametrize("sigma", [1e-3, 0.1, 1.0, 30.0])
def test_of_a_linear_client_the_bound_is_the_posterior_variance(
    sigma: float, world: tuple[Tensor, GaussianPrior]
) -> None:
    a, prior = world
    information = of_linear(a, sigma)
    torch.testing.assert_close(information, a.T @ a / sigma**2, rtol=1e-9, atol=0)
    spread = a @ covariance_of(prior) @ a.T + sigma**2 * torch.eye(7)  # Kalman's form, in which F does not occur
    posterior = covariance_of(prior) - covariance_of(prior) @ a.T @ torch.linalg.solve(spread, a @ covariance_of(prior))
    exact = float(posterior.trace()) / 5
    assert van_trees(information, prior) == pytest.approx(exact, rel=1e-5)


def test_attackers_land_on_the_bound_or_above_it(world: tuple[Tensor, GaussianPrior]) -> None:
    a, prior = world
    count, sigma = 20_000, 1.5
    x = prior.mean + normal(count, 5, seed=5) @ torch.linalg.cholesky(covariance_of(prior)).T
    y = x @ a.T + sigma * normal(count, 7, seed=3)
    information = of_linear(a, sigma)
    bound = van_trees(information, prior)

    def error(guess: Tensor) -> tuple[float, float]:
        squares = (guess - x).square().mean(1)
        return float(squares.mean()), 3 * float(squares.std()) / count**0.5

    gain = torch.linalg.inv(information + information_of(prior))
    mean, margin = error(prior.mean + (y - prior.mean @ a.T) @ (gain @ a.T / sigma**2).T)
    assert abs(mean - bound) < margin, "the posterior mean is on the line"
    for worse in (y @ torch.linalg.pinv(a).T, prior.mean.expand(count, -1), torch.zeros(count, 5)):
        mean, margin = error(worse)
        assert mean - margin > bound


def exact_traces(information: Tensor, prior: GaussianPrior, count: int) -> Tensor:
    """Of every block, from the whole F: the projector is the mean of z z' over all sign vectors, here over the axes."""
    return torch.stack([((b.axes @ information) * b.axes).sum() for b in prior.blocks(count) if b.axes is not None])


def test_the_trace_form_is_below_the_bound_and_more_blocks_come_nearer(world: tuple[Tensor, GaussianPrior]) -> None:
    a, prior = world
    for sigma in (1e-2, 0.3, 3.0, 100.0):
        information = of_linear(a, sigma)
        forms = [trace_bound(exact_traces(information, prior, n), prior.blocks(n)) for n in (1, 2, 1000)]
        assert forms == sorted(forms)
        assert forms[-1] <= van_trees(information, prior) * (1 + 1e-9)
        on_paper = 5 / float(information.trace() + information_of(prior).trace())
        assert forms[0] == pytest.approx(on_paper)
    # far in the noise, blocks of one direction each lose nothing
    assert forms[-1] == pytest.approx(van_trees(information, prior), rel=1e-3)


@pytest.mark.parametrize("axes", [5, 3])
def test_probes_find_the_traces(axes: int, world: tuple[Tensor, GaussianPrior]) -> None:
    a, prior = world
    prior = replace(prior, axes=prior.axes[-axes:], variances=prior.variances[-axes:], rest=0.05)
    weigh, x = precision(UpdateDistribution(sigma=0.5)), pixels(torch.zeros(5).double())
    blocks = prior.blocks(2)
    found = block_traces(linear, {"a": a}, x, weigh, blocks, seeded("probe"), probes=10_000)
    information = a.T @ a / 0.25
    left = torch.eye(5, dtype=torch.float64) - prior.axes.T @ prior.axes
    projectors = [left if b.axes is None else b.axes.T @ b.axes for b in blocks]
    exact = torch.stack([(p @ information).trace() for p in projectors])
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0)
    assert len(blocks) == 2 + (axes == 3)
    assert sum(b.size for b in blocks) == 5
    assert sum(b.information for b in blocks) == pytest.approx(float(information_of(prior).trace()))


def test_the_trace_is_of_one_example_of_a_batch(world: tuple[Tensor, GaussianPrior]) -> None:
    a, prior = world

    def summed(params: Params, batch: Batch, rng: Generator | None) -> Update:
        return {"w": torch.cat([batch.x[0].flatten() @ params["a"].T, 2 * batch.x[1].flatten() @ params["a"].T])}

    batch = Batch(torch.zeros(2, 1, 1, 5).double(), torch.zeros(2, dtype=torch.int64))
    weigh, blocks = precision(UpdateDistribution(sigma=1.0)), prior.blocks(1)
    for place, factor in ((0, 1), (1, 4)):
        found = block_traces(summed, {"a": a}, batch, weigh, blocks, seeded("batch"), probes=5000, place=place)
        assert found.item() == pytest.approx(factor * float((a.T @ a).trace()), rel=0.05)


def test_forward_mode_agrees_with_autograds_jacobian() -> None:
    model = mlp((1, 3, 4), 3, hidden=(6,), activation="tanh").double()
    params = detached_params(model)
    batch = Batch(torch.rand(2, 1, 3, 4, generator=seeded("image"), dtype=torch.float64), torch.tensor([2, 0]))
    links = chain(per_example(clip(0.5)), gaussian(0.1), local_sgd(0.3, steps=2, batch_size=1), laplace(0.2))
    noise = known_noise(links)
    assert noise is not None
    assert noise.sigma == pytest.approx(math.sqrt(2 * (0.3 * 0.1) ** 2 + 2 * 0.2**2)), "two steps' noise, and Laplace's"
    forward = links.mean(gradient(model))

    def flat(x: Tensor) -> Tensor:
        return torch.cat([t.flatten() for t in forward(params, Batch(x, batch.y), None).values()])

    jacobian = torch.autograd.functional.jacobian(flat, batch.x).view(-1, 24)
    expected = jacobian.T @ jacobian / noise.sigma**2
    torch.testing.assert_close(fisher(forward, params, batch, precision(noise)), expected, rtol=1e-8, atol=0)


def weight(value: float, noise: UpdateDistribution) -> float:
    return float(precision(noise)({"w": torch.tensor([value], dtype=torch.float64)})["w"])


@pytest.mark.parametrize(("noise", "law"), [
    (UpdateDistribution(sigma=0.7), scipy.stats.norm(scale=0.7)),
    (UpdateDistribution(scale=0.7), scipy.stats.laplace(scale=0.7)),
])  # fmt: skip
def test_information_is_the_integral_of_the_squared_score(noise: UpdateDistribution, law: Any) -> None:
    def squared_score(x: float) -> float:
        step = 1e-5
        return float(((law.logpdf(x + step) - law.logpdf(x - step)) / (2 * step)) ** 2 * law.pdf(x))

    integral, _ = scipy.integrate.quad(squared_score, -15, 15, points=[0.0], limit=200)
    assert weight(0.3, noise) == pytest.approx(integral, rel=1e-3)
    assert weight(0.3, noise) == pytest.approx(1 / 0.7**2), "1 / sigma^2 and 1 / b^2"


def test_a_masks_rows_are_deleted_and_unknown_masks_averaged(world: tuple[Tensor, GaussianPrior]) -> None:
    a, _ = world
    keep, sigma = 0.3, 0.5
    noise = UpdateDistribution(sigma=sigma, sparse=True, shrink=keep)
    x = pixels(torch.zeros(5).double())

    def shrunk(params: Params, batch: Batch, rng: Generator | None) -> Update:
        return {k: keep * t for k, t in linear(params, batch, rng).items()}

    average = torch.zeros(5, 5, dtype=torch.float64)
    for rows in product([0.0, 1.0], repeat=7):
        visible = torch.tensor(rows, dtype=torch.float64)
        weights = {
            k: t / (keep * sigma) ** 2 for k, t in {"first": visible[:3], "rest": visible[3:].view(1, -1)}.items()
        }
        found = fisher(shrunk, {"a": a}, x, lambda expected, weights=weights: weights)
        left = a[visible == 1]
        torch.testing.assert_close(found, left.T @ left / sigma**2)
        average += found * keep ** visible.sum() * (1 - keep) ** (7 - visible.sum())
    torch.testing.assert_close(fisher(shrunk, {"a": a}, x, precision(noise)), average)


def test_a_known_mask_needs_no_average() -> None:
    model = mlp((1, 2, 2), 3, hidden=(5,), activation="tanh").double()
    params, batch = detached_params(model), Batch(torch.rand(1, 1, 2, 2).double(), torch.tensor([1]))
    links = chain(gaussian(0.1), local_sgd(1.0), mask(0.5, seed=3))
    found = known_noise(links)
    assert found is not None
    forward = links.mean(gradient(model))
    seen = links(gradient(model))(params, batch, seeded("client"))
    alone = fisher(forward, params, batch, lambda expected: {k: (seen[k] != 0) / 0.1**2 for k in expected})
    torch.testing.assert_close(fisher(forward, params, batch, precision(found)), alone)
    whole = fisher(chain(local_sgd(1.0))(gradient(model)), params, batch, precision(UpdateDistribution(sigma=0.1)))
    assert 0 < float(alone.trace()) < float(whole.trace())


@pytest.mark.parametrize(("count", "size"), [(200, 6), (12, 30), (31, 30), (30, 30)])
def test_the_fit_is_scikit_learns(count: int, size: int) -> None:
    from sklearn.covariance import LedoitWolf

    x = normal(count, size) @ normal(size, size, seed=1) + 0.5
    prior = GaussianPrior.fit(x.view(count, 1, 1, size))
    oracle = LedoitWolf().fit(x.numpy())
    torch.testing.assert_close(covariance_of(prior), torch.from_numpy(oracle.covariance_))
    torch.testing.assert_close(prior.mean, x.mean(0))
    torch.testing.assert_close(
        covariance_of(prior) @ information_of(prior), torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-8
    )
    torch.testing.assert_close(prior.axes @ prior.axes.T, torch.eye(len(prior.axes), dtype=torch.float64))


def test_a_pixel_that_never_changes_and_images_that_repeat_are_no_trouble() -> None:
    x = normal(20, 8)
    x[:, 3] = 0.25
    prior = GaussianPrior.fit(torch.cat([x, x]))
    covariance = covariance_of(prior)
    torch.linalg.cholesky(covariance)
    assert float(covariance.trace()) == pytest.approx(float(x.var(0, correction=0).sum())), "shrinking moves none"
    check_named("differ", lambda: GaussianPrior.fit(torch.ones(3, 1, 2, 2)))


def test_reconstruction_robustness_on_paper() -> None:
    # Phi(Phi^-1(0.1) + 1) = Phi(-1.28155 + 1)
    assert reconstruction_robustness(0.1, 1.0) == pytest.approx(scipy.stats.norm.cdf(-0.2815515655))
    assert reconstruction_robustness(0.5, 2.0) == pytest.approx(0.6914624612740131)  # Phi(1/2), of every table
    assert reconstruction_robustness(0.1, 1e9) == pytest.approx(0.1), "in noise only the prior is left"
    assert reconstruction_robustness(0.1, 1e-3) == pytest.approx(1.0)
    assert (reconstruction_robustness(0.0, 1.0), reconstruction_robustness(1.0, 1.0)) == (0.0, 1.0)


def test_no_test_between_two_gaussians_does_better_than_the_certificate() -> None:
    """A guess of one in ten, and an attacker who sees the update: Neyman and Pearson's best test lands on the bound."""
    draws = normal(200_000)
    sigma, kappa = 0.8, 0.1
    threshold = -scipy.stats.norm.ppf(kappa) * sigma  # accepted without the record: one in ten
    success = float((1.0 + sigma * draws > threshold).double().mean())
    assert success == pytest.approx(reconstruction_robustness(kappa, sigma), abs=0.005)
