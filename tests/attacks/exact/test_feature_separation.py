"""A batch is separated by its last layers, and each image found by what they read of it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.exact.feature_separation import feature_separation
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import convsmall, detached_params, lenet, mlp
from fedgauge.client.psnr import match
from fedgauge.client.update import Batch
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from tests.attacks.exact.test_recursive import BARE, CLASSES, MEAN, STD, normalise, smooth

SHAPE = (1, 16, 16)


def batch(labels: list[int], seed: int = 0) -> Batch:
    return Batch(torch.cat([smooth(seed + i, SHAPE).x for i in range(len(labels))]), torch.tensor(labels))


def attack(model: nn.Module, own: Batch, links: Chain = BARE, given: bool = True) -> Reconstruction:
    params = detached_params(model)
    update = links(gradient(model, normalise=normalise))(params, own, torch.Generator().manual_seed(1))
    public = batch(list(range(CLASSES)) * 4, seed=100)
    labels = own.y[None] if given else None
    known = Knowledge(model, links, SHAPE, CLASSES, len(own.y), (MEAN,), (STD,), labels=labels, auxiliary=public)
    wave = Wave.stack([Observation(1, 0, params, update)])
    streams = [lambda *purpose: torch.Generator().manual_seed(2)]
    return feature_separation().reconstruct(wave, known, Budget(150), streams)[0]


def worst(own: Batch, result: Reconstruction) -> float:
    assert result.status == "converged" and result.x is not None, result.reason
    return float(psnr(own.x, result.x[match(own.x, result.x)]).min())


@pytest.mark.product
@pytest.mark.parametrize("labels", [[3], [1, 4, 7, 8], [2, 5, 5, 0]], ids=["one", "distinct", "equal"])
@pytest.mark.parametrize("make", [lambda: convsmall(SHAPE, CLASSES), lambda: mlp(SHAPE, CLASSES, [64, 32])])
def test_features_of_a_batch_determine_its_images(make: Callable[[], nn.Module], labels: list[int]) -> None:
    own = batch(labels)
    assert worst(own, attack(make(), own)) > 40


class Products(nn.Module):
    """Fully connected layers whose parameters have names of their own."""

    def __init__(self, product: Callable[..., Tensor]) -> None:
        super().__init__()
        (self.w, self.b), (self.v, self.c) = (
            layer.parameters() for layer in (nn.Linear(256, 64), nn.Linear(64, CLASSES))
        )
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.product(x.flatten(1), self.w, self.b).relu(), self.v, self.c)


@pytest.mark.parametrize("product", [nn.functional.linear, lambda x, w, b: x @ w.T + b])
def test_layers_of_any_form_and_name_are_read_and_labels_restored(product: Callable[..., Tensor]) -> None:
    own = batch([1, 4])
    assert worst(own, attack(Products(product), own, given=False)) > 40


def test_few_features_are_matched_together_with_the_gradients() -> None:
    own = batch([1, 4])
    assert worst(own, attack(lenet(SHAPE, CLASSES), own)) > 20


@pytest.mark.parametrize("defense", [chain(local_sgd(0.1), clip(0.01)), chain(gaussian(1e-4), local_sgd(0.1))])
def test_a_clip_of_unknown_scale_and_weak_noise_are_read(defense: Chain) -> None:
    torch.manual_seed(0)
    own = batch([1, 4, 7])
    assert worst(own, attack(convsmall(SHAPE, CLASSES), own, defense)) > 40


def trained(make: Callable[[], nn.Module], own: Batch, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    descent = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(steps):
        descent.zero_grad()
        nn.functional.cross_entropy(model(normalise(own.x)), own.y).backward()
        descent.step()
    return model


@pytest.mark.parametrize("labels", [[3, 6], [1, 4, 7]])
def test_a_network_that_is_sure_of_the_batch_is_read(labels: list[int]) -> None:
    own = batch(labels)
    assert worst(own, attack(trained(lambda: convsmall(SHAPE, CLASSES), own, 8), own)) > 40


@pytest.mark.parametrize(
    ("make", "labels", "steps"),
    [
        (lambda: mlp(SHAPE, CLASSES, [64, 32]), [3, 6], 100),
        (lambda: mlp(SHAPE, CLASSES, [64, 32]), [3, 6], 200),
        (lambda: convsmall(SHAPE, CLASSES), [2, 5, 5, 0], 20),
    ],
)
def test_images_that_do_not_explain_the_update_are_not_converged(
    make: Callable[[], nn.Module], labels: list[int], steps: int
) -> None:
    """They were at 8 to 17 dB: the last layer is separated, but which ReLUs of the layers before were on is not known."""
    own = batch(labels)
    result = attack(trained(make, own, steps), own)
    assert result.status != "converged" and result.reason


def test_noise_and_too_many_examples_are_declined() -> None:
    model = convsmall(SHAPE, CLASSES)
    noisy = chain(gaussian(0.1), local_sgd(0.1))
    for own, links in ((batch([1, 4]), noisy), (batch([0] * CLASSES), BARE)):
        assert attack(model, own, links).status == "not_applicable"


def test_an_update_of_zeros_is_declined() -> None:
    model, own = convsmall(SHAPE, CLASSES), batch([1, 4])
    still = detached_params(model)
    known = Knowledge(model, BARE, SHAPE, CLASSES, 2, (MEAN,), (STD,), labels=own.y[None])
    wave = Wave.stack([Observation(1, 0, still, {k: torch.zeros_like(t) for k, t in still.items()})])
    streams = [lambda *purpose: torch.Generator().manual_seed(2)]
    assert feature_separation().reconstruct(wave, known, Budget(2), streams)[0].status == "not_applicable"
