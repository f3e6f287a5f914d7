"""Batches behind a fully connected first layer: exact where ReLU leaves zeros, near where images are independent, else a reason."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgauge.attacks.base import Attack, Budget, Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.exact.unmixing import _distinct, cocktail_party, spear, spear_plus_plus
from fedgauge.attacks.modality.image_metrics import match, psnr
from fedgauge.client.chain import Chain, chain
from fedgauge.client.data.images import mnist5k
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd, local_training
from fedgauge.client.models.vision import Activation, detached_params, lenet, mlp
from fedgauge.client.rng import generator
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch, Transform
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune

SHAPE, CLASSES = (1, 6, 6), 5
MEAN, STD = (0.13,), (0.31,)


def attack(
    how: Attack, model: nn.Module, batch: Batch, links: Chain | None = None, budget: Budget | None = None
) -> Reconstruction:
    links, shape = links or chain(local_sgd(0.1)), batch.x.shape[1:]
    params = detached_params(model)
    update = links(gradient(model, normalise=lambda x: (x - MEAN[0]) / STD[0]))(params, batch, generator("noise"))
    known = Knowledge(model, links, tuple(shape), CLASSES, len(batch.x), MEAN, STD)
    wave = Wave.stack([Observation(1, 0, params, update)])
    return how.reconstruct(wave, known, budget or Budget(200), [partial(generator, "unmixing")])[0]


def examples(seed: int, n: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(n, *SHAPE, generator=rng), torch.randint(CLASSES, (n,), generator=rng))


def network(seed: int = 0, hidden: tuple[int, ...] = (100, 40), activation: Activation = "relu") -> nn.Module:
    torch.manual_seed(seed)
    return mlp(SHAPE, CLASSES, hidden=list(hidden), activation=activation)


def paired(found: Reconstruction, batch: Batch) -> tuple[Tensor, Tensor]:
    """PSNR of each image, and whether its label is right."""
    assert found.x is not None and found.y is not None, found.reason
    order = match(batch.x, found.x)
    return psnr(batch.x, found.x[order]), found.y[order] == batch.y


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 6), deep=st.booleans())
def test_batches_behind_a_relu_are_read_off_with_their_labels(seed: int, size: int, deep: bool) -> None:
    # behind a single hidden layer, error signals of more examples than classes are mixtures but for the silent neurons
    batch = examples(seed, size if deep else min(size, CLASSES - 1))
    found = attack(spear(), network(seed, (200, 40) if deep else (200,)), batch)
    assert found.status == "converged", found.reason
    value, right = paired(found, batch)
    assert float(value.min()) > 60
    assert bool(right.all())
    assert found.objective < 1e-4


def test_an_example_that_is_off_nearly_wherever_another_is_counts_as_no_mixture() -> None:
    rng = torch.Generator().manual_seed(0)
    signals = torch.randn(60, 4, generator=rng, dtype=torch.float64) * (torch.rand(60, 4, generator=rng) < 0.5)
    off = signals[:, 0] == 0
    signals[off, 1] = 0  # the second is off wherever the first is
    signals[torch.nonzero(off)[:3, 0], 1] = 1.0  # but for three neurons
    factors = torch.linalg.svd(signals, full_matrices=False)
    columns = torch.nn.functional.normalize(factors[1][:, None] * factors[2], dim=0)
    mixture = torch.nn.functional.normalize(columns[:, 2] + columns[:, 3], dim=0)
    kept = _distinct(factors[0], torch.cat([mixture[:, None], columns], 1))
    near = (kept.T @ torch.cat([columns, mixture[:, None]], 1)).abs().amax(0) > 1 - 1e-9
    assert near.tolist() == [True, True, True, True, False]


def test_more_examples_take_more_tries_and_too_few_are_reported() -> None:
    batch = examples(1, 8)
    starved = attack(spear(), network(1, (400, 40)), batch, budget=Budget(1))
    assert starved.status == "out_of_budget" and starved.reason.startswith(("nothing was found", "not proven"))
    found = attack(spear(), network(1, (400, 40)), batch, budget=Budget(100))
    assert found.status == "converged"
    assert float(paired(found, batch)[0].min()) > 60
    assert found.iterations > 1000


def test_clipping_each_example_leaves_the_images_where_they_are() -> None:
    """It only changes how long the error signals are, which are not known anyway."""
    links = chain(per_example(clip(0.1)), local_sgd(0.1))
    batch = examples(2, 4)
    found = attack(spear(), network(2), batch, links)
    assert found.status == "converged", found.reason
    assert float(paired(found, batch)[0].min()) > 60


def test_dictionary_learning_reads_larger_batches_in_a_few_rounds() -> None:
    batch, model = examples(1, 16), network(1, (800, 40))
    assert attack(spear(), model, batch, budget=Budget(1)).status == "out_of_budget"
    found = attack(spear_plus_plus(), model, batch, budget=Budget(20))
    assert found.status == "converged" and not found.reason, found.reason
    value, right = paired(found, batch)
    assert float(value.min()) > 60
    assert bool(right.all())
    assert found.objective < 1e-4


def test_without_enough_neurons_nothing_is_proven() -> None:
    # a direction among 12 is silent in 11 neurons whatever they show, and half of 30 are off
    starved = attack(spear_plus_plus(), network(1, (30, 40)), examples(1, 12), budget=Budget(2))
    assert starved.status == "out_of_budget" and starved.reason.startswith("not proven"), starved.reason


@pytest.mark.parametrize(
    ("local", "unproven"),
    [
        (local_sgd(0.01, steps=3), ""),
        (local_training(0.01, 6, epochs=3, momentum=0.9), ""),
        (local_sgd(0.01, steps=6, batch_size=2), "which examples each local step takes is unknown"),
    ],
    ids=["whole batches", "momentum", "two epochs of slices"],
)
def test_local_steps_leave_the_images_where_they_are(local: Transform, unproven: str) -> None:
    """Every step's gradient is a mixture of the same images, and a neuron that is off in all steps stays silent."""
    batch = examples(2, 6)
    found = attack(spear_plus_plus(), network(2, (800, 40)), batch, chain(local))
    assert found.status == "converged", found.reason
    assert unproven in found.reason and bool(found.reason) == bool(unproven)
    value, right = paired(found, batch)
    assert float(value.min()) > 60
    assert bool(right.all())


def test_under_noise_images_are_near_the_least_squares_of_known_error_signals() -> None:
    batch, model, sigma = examples(3, 6), network(3, (800, 40)), 1e-4
    params, normalised = detached_params(model), (examples(3, 6).x - MEAN[0]) / STD[0]
    weight = gradient(model)(params, Batch(normalised, batch.y), None)["1.weight"].double()
    signals = torch.linalg.lstsq(normalised.flatten(1).double().T, weight.T).solution  # (B, m)
    # with known signals D the images' covariance is sigma^2 (D D^T)^-1 in each pixel
    variance = (STD[0] * sigma) ** 2 * torch.linalg.inv(signals @ signals.T).diagonal()
    found = attack(spear_plus_plus(), model, batch, chain(gaussian(sigma), local_sgd(0.1)))
    assert found.status == "converged" and "not proven" in found.reason and "holds noise" in found.reason
    assert found.x is not None
    error = (found.x[match(batch.x, found.x)] - batch.x).square().flatten(1).mean(1)
    # besides, each image's length is read from the bias's gradient, whose noise moves all pixels together
    assert 0.5 < float((error / variance).mean()) < 6


NO_BIAS = nn.Sequential(nn.Flatten(), nn.Linear(36, 20, bias=False), nn.ReLU(), nn.Linear(20, 5))
SGD = local_sgd(0.1)
UNREAD = {"example itself": lenet(SHAPE, CLASSES), "no ReLU": network(activation="tanh"), "no bias": NO_BIAS}
REFUSED: dict[str, tuple[type[Attack], nn.Module, Chain, str]] = {
    **{
        f"{how.__name__}: {why}": (how, model, chain(SGD), why)
        for how in (spear, spear_plus_plus)
        for why, model in UNREAD.items()
    },
    "noise": (spear, network(), chain(SGD, gaussian(0.01)), "rank 36"),
    "pruned": (spear, network(), chain(SGD, prune(0.3)), "rank"),
    "steps": (spear, network(), chain(local_sgd(0.1, steps=2)), "single gradient"),
    "loud noise": (spear_plus_plus, network(), chain(SGD, gaussian(0.01)), "noise 1e-02"),
    "Adam": (spear_plus_plus, network(), chain(local_training(0.01, 3, optimizer="adam")), "Adam"),
}


@pytest.mark.parametrize(("how", "model", "links", "named"), REFUSED.values(), ids=REFUSED)
def test_unreadable_input_is_named(how: type[Attack], model: nn.Module, links: Chain, named: str) -> None:
    found = attack(how(), model, examples(3, 3), links)
    assert found.status == "not_applicable" and named in found.reason


@pytest.mark.parametrize("how", [spear, spear_plus_plus, cocktail_party])
def test_an_image_seen_twice_is_a_smaller_rank(how: Callable[[], Attack]) -> None:
    one = examples(4, 1)
    twice = Batch(one.x.repeat(2, 1, 1, 1), one.y.repeat(2))
    found = attack(how(), network(4), twice)
    assert found.status == "not_applicable" and "rank 1" in found.reason


def test_independence_unmixes_digits_where_no_relu_helps() -> None:
    digits = mnist5k()
    model = mlp((1, 28, 28), 10, hidden=[100], activation="tanh")
    values = []
    for first in range(0, 8, 4):
        batch = Batch(digits.x[first : first + 4].float() / 255, digits.y[first : first + 4])
        params = detached_params(model)
        links = chain(local_sgd(0.1))
        update = links(gradient(model))(params, batch, None)
        known = Knowledge(model, links, (1, 28, 28), 10, 4, (0.0,), (1.0,))
        wave = Wave.stack([Observation(1, 0, params, update)])
        (found,) = cocktail_party().reconstruct(wave, known, Budget(300), [partial(generator, "unmixing", first)])
        assert found.status == "converged"
        values.append(paired(found, batch)[0])
    every = torch.cat(values)
    assert int((every > 40).sum()) >= 4, "half of the digits are there to a few grey values"
