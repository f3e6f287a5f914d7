"""Priors: numbers by hand, and what every one of them promises."""

import inspect
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.matching import priors
from fedgauge.attacks.matching.priors import (
    PairedEnergy,
    Prior,
    batch_statistics,
    gaussian,
    generator_prior,
    laplacian,
    magnitude,
    mahalanobis,
    total_variation,
)
from fedgauge.client.chain import chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from tests.attacks.refusals import check_named
from tests.theory.gaussian_world import gaussian_of

PRIORS: dict[str, Prior] = {
    "total_variation": total_variation(1.0),
    "magnitude": magnitude(1.0),
    "batch_statistics": batch_statistics(1.0),
    "gaussian": gaussian(),
    "laplacian": laplacian(1.0, mean=0.5, scale=0.2),
    "generator_prior": generator_prior(latent=3, width=2, training=5),
}


def tv(x: Tensor) -> Tensor:
    return total_variation(1.0)._energy(x[(None,) * (4 - x.dim())])


def test_total_variation_by_hand() -> None:
    x = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 2.0]])
    # |dx|: 1, 2, 0, 0; |dy|: 2, 1, 1
    assert float(tv(x)) == pytest.approx(3 / 4 + 4 / 3)
    assert float(tv(torch.full((2, 3, 5, 5), 0.7))) == 0.0


def test_total_variation_of_one_row_of_pixels_is_that_row_s() -> None:
    x = torch.tensor([[0.0, 1.0, 3.0]])
    assert float(tv(x)) == pytest.approx(3 / 2)


def test_total_variation_averages_over_images_and_channels() -> None:
    x = torch.rand(2, 3, 6, 7, dtype=torch.float64)
    each = [float(tv(x[b, c])) for b in range(2) for c in range(3)]
    assert float(tv(x)) == pytest.approx(float(np.mean(each)), rel=1e-12)
    a = x.numpy()
    numpy = np.abs(np.diff(a, axis=3)).mean() + np.abs(np.diff(a, axis=2)).mean()
    assert float(tv(x)) == pytest.approx(numpy, rel=1e-12)


def knowledge() -> Knowledge:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3)).eval()
    images = torch.rand(40, 1, 6, 6)
    auxiliary = Batch(images, torch.zeros(40, dtype=torch.int64))
    return Knowledge(model, chain(local_sgd(0.1)), (1, 6, 6), 3, 2, (0.4,), (0.3,), auxiliary=auxiliary)


@pytest.mark.parametrize("name", PRIORS)
def test_a_prior_is_a_finite_scalar_with_a_derivative_and_the_same_under_vmap(name: str) -> None:
    known = knowledge()
    bound = PRIORS[name].bind(known, detached_params(known.model))
    z = torch.randn(2, bound.numbers) if isinstance(bound, PairedEnergy) else None
    energy = partial(bound.energy, z=z) if isinstance(bound, PairedEnergy) else bound
    x = torch.randn(3, 2, 1, 6, 6, generator=generator(0)).requires_grad_()
    values = torch.stack([energy(one) for one in x])
    (slopes,) = torch.autograd.grad(values.sum(), x)
    assert values.shape == (3,)
    assert torch.isfinite(values).all()
    assert torch.isfinite(slopes).all()
    assert float(slopes.abs().max()) > 0
    torch.testing.assert_close(vmap(energy)(x), values)


def test_the_gaussian_prior_is_a_density() -> None:
    known, mean = knowledge(), torch.rand(36, dtype=torch.float64)
    root = torch.randn(36, 36, dtype=torch.float64, generator=generator(0))
    covariance = root @ root.T + torch.eye(36, dtype=torch.float64)
    fitted = gaussian_of(mean, covariance)
    energy = partial(mahalanobis, known, fitted.mean, fitted)
    oracle = torch.distributions.MultivariateNormal(mean, covariance)
    pixels = torch.rand(2, 1, 6, 6, dtype=torch.float64)
    expected = (oracle.log_prob(mean) - oracle.log_prob(pixels.flatten(1))).sum()
    assert float(energy(known.normalise(pixels))) == pytest.approx(float(expected), rel=1e-6)
    check_named("auxiliary", lambda: gaussian().bind(replace(known, auxiliary=None), {}))


def test_batch_statistics_vanish_where_the_running_ones_are_the_batchs() -> None:
    known = knowledge()
    x = torch.randn(2, 1, 6, 6, generator=generator(0))
    conv, norm = known.model[0], known.model[1]  # type: ignore[index]  # a Sequential
    features = conv(x).transpose(0, 1).flatten(1)
    norm.running_mean.copy_(features.mean(1).detach())
    norm.running_var.copy_(features.var(1, correction=0).detach())
    energy = batch_statistics(1.0).bind(known, detached_params(known.model))
    assert float(energy(x)) < 1e-4
    assert float(energy(x + 1)) > 0.1


def test_squared_total_variation_by_hand() -> None:
    x = torch.tensor([[0.0, 3.0], [4.0, 0.0]])[None, None]
    # dx: 3, -4; dy: 4, -3
    assert float(total_variation(1.0, power=2).bind(knowledge(), {})(x)) == 9 + 16 + 16 + 9


def test_every_prior_of_the_package_is_held_to_the_contract() -> None:
    defined = {n: c for n, c in vars(priors).items() if inspect.isclass(c) and c.__module__ == priors.__name__}
    assert set(PRIORS) == {n for n, c in defined.items() if issubclass(c, Prior) and not inspect.isabstract(c)}
