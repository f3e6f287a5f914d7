"""What is certified: multipliers on paper, the reach measured on a real network, and rates from scipy's normal law."""

import pytest
import scipy.stats
import torch

from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch, norm
from fedgauge.defenses.accounting import Mechanism
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian, laplace
from fedgauge.defenses.prune import prune
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.success import certified, gaussian_mechanism

EACH, SGD = per_example(clip(2.0)), local_sgd(0.1)


@pytest.mark.parametrize("links", [
    chain(SGD),
    chain(EACH, SGD),
    chain(gaussian(0.5), SGD),
    chain(EACH, gaussian(0.0), SGD),
    chain(EACH, laplace(0.5), SGD),
    chain(EACH, local_sgd(0.1, steps=2), gaussian(0.5)),  # the first step moves the second's gradients of all the others
    chain(EACH, prune(0.5), gaussian(0.5), SGD),  # pruning can grow a difference
])  # fmt: skip
def test_other_chains_are_not_certified(links: Chain) -> None:
    assert gaussian_mechanism(links, 8) is None


def test_data_that_was_prepared_by_its_own_examples_is_not_certified() -> None:
    """Clip and noise bound what an example moves by its own gradient, and here it moves the others' too."""
    links = chain(EACH, gaussian(0.5), SGD)
    assert gaussian_mechanism(links, 8, fitted=()) is not None
    assert gaussian_mechanism(links, 8, fitted=("mean", "std")) is None


def test_no_client_moves_its_release_by_more_than_the_certificate_says() -> None:
    """The claim itself, on a real network: with and without one example, and with any other in its place."""
    model = mlp((1, 2, 3), 4, hidden=(5,))
    params, rng = detached_params(model), torch.Generator().manual_seed(0)
    mechanism = gaussian_mechanism(chain(per_example(clip(0.3)), gaussian(1.0), local_sgd(0.5)), 4)
    assert mechanism is not None
    reach = 0.5 / mechanism.record  # in units of the update
    release = chain(per_example(clip(0.3)), local_sgd(0.5))(gradient(model))
    moved = []
    for _ in range(50):
        x, y = 10 * torch.rand(4, 1, 2, 3, generator=rng), torch.randint(4, (4,), generator=rng)
        there = release(params, Batch(x, y), None)
        others = release(params, Batch(x[1:], y[1:]), None)
        absent = {k: 3 / 4 * t for k, t in others.items()}  # the mean's denominator stays
        moved.append(float(norm({k: there[k] - absent[k] for k in there})))
    assert max(moved) <= reach * (1 + 1e-5)
    assert max(moved) > 0.9 * reach, "and it is reached"


def test_certified_rates_start_from_the_best_baseline() -> None:
    floors = [[Rate(1, 10)] * 51, [Rate(0, 10)] * 51]
    found = certified(floors, Mechanism("normal", 2.0, 2.0, 1, 1))
    assert found is not None
    prior = Rate(1, 10).interval[1]
    assert found == pytest.approx([scipy.stats.norm.cdf(scipy.stats.norm.ppf(prior) + 0.5)] * 51)
    four = certified(floors, Mechanism("normal", 2.0, 2.0, 4, 4))
    assert four == pytest.approx([scipy.stats.norm.cdf(scipy.stats.norm.ppf(prior) + 1.0)] * 51)
    assert certified([], Mechanism("normal", 2.0, 2.0, 1, 1)) is None
