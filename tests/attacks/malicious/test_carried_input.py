"""Inputs carried to the classifier: exact to the bit, from numbers on paper to whole networks."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge, Reconstruction
from fedgauge.attacks.malicious.carried_input import (
    carried,
    carried_input,
    identity_convolutions,
    read_carried,
    reversible,
    reversible_blocks,
)
from fedgauge.attacks.malicious.server_attack import ServerAttack
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import Chain, chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import convnet, detached_params, lenet, mlp, resnet20
from fedgauge.client.update import Batch, Params
from tests.attacks.malicious.served import answer, check_refused, check_silent, craft, proven, read
from tests.attacks.refusals import check_named

SHAPE, CLASSES = (3, 6, 6), 6
MEAN, STD = (0.4, 0.5, 0.3), (0.3, 0.2, 0.25)


def plain() -> nn.Module:
    return lenet(SHAPE, CLASSES, stride=1)


def deep(activation: type[nn.Module]) -> nn.Module:
    """Two convolutions of different sizes with an activation of choice."""
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        activation(),
        nn.Conv2d(5, 4, 1),
        activation(),
        nn.Flatten(),
        nn.Linear(144, CLASSES),
    )


def no_spare() -> nn.Module:
    """Every channel passes a colour on: what the classifier reads is linear in the image."""
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(108, CLASSES))


# server attack (with or without the classifier's zeros) and network
WAYS: dict[str, tuple[Callable[[bool], ServerAttack], Callable[[], nn.Module]]] = {
    "identity": (identity_convolutions, plain),
    "identity, tanh": (identity_convolutions, lambda: deep(nn.Tanh)),
    "identity, relu": (identity_convolutions, lambda: deep(nn.ReLU)),
    "identity, no channel to spare": (identity_convolutions, no_spare),
    "carried": (carried_input, lambda: carried(lenet(SHAPE, CLASSES), SHAPE, CLASSES)),
    "carried, resnet": (carried_input, lambda: carried(resnet20(SHAPE, CLASSES), SHAPE, CLASSES).eval()),
    "reversible": (reversible_blocks, lambda: reversible(SHAPE, CLASSES)),
}
every = pytest.mark.parametrize(("make", "network"), WAYS.values(), ids=WAYS)


def pictures(seed: int, labels: list[int]) -> Batch:
    x = torch.randint(0, 256, (len(labels), *SHAPE), generator=torch.Generator().manual_seed(seed))
    return Batch(x.float() / 255, torch.tensor(labels))


def knowledge(model: nn.Module, size: int, links: Chain | None = None) -> Knowledge:
    return Knowledge(model, links or chain(local_sgd(0.1)), SHAPE, CLASSES, size, MEAN, STD)


def attacked(known: Knowledge, params: Params, batch: Batch) -> Reconstruction:
    return read(read_carried(), known, params, answer(known, params, batch))


def test_two_images_of_one_pixel_on_paper() -> None:
    """p = 1/3; dW = sum of (p - e_y) x / 2 and db = p - k / 2, for x = .2 of class 0 and .4 of class 1."""
    model = carried(mlp((1, 1, 1), 3, hidden=[1]), (1, 1, 1), 3)
    known = Knowledge(model, chain(local_sgd(0.5)), (1, 1, 1), 3, 2, (0.0,), (1.0,))
    params = craft(carried_input(zero=True), known)
    rows = torch.tensor([0.0, -0.1, 0.1])
    update = {k: torch.zeros_like(t) for k, t in params.items()}
    update["classifier.weight"] = -0.5 * torch.stack([torch.zeros(3), rows], 1)
    update["classifier.bias"] = -0.5 * torch.tensor([-1 / 6, -1 / 6, 1 / 3])
    found = read(read_carried(), known, params, update)
    assert found.x is not None and found.y is not None
    assert found.x.flatten().tolist() == pytest.approx([0.2, 0.4], abs=1e-6)
    assert found.y.tolist() == [0, 1]
    assert proven(found) == 2


@every
@pytest.mark.parametrize("zero", [False, True])
def test_one_example_is_carried_to_the_bit(
    make: Callable[[bool], ServerAttack], network: Callable[[], nn.Module], zero: bool
) -> None:
    torch.manual_seed(1)
    known = knowledge(network(), 1)
    params = craft(make(zero), known)
    for seed in range(5):
        batch = pictures(seed, [seed])
        found = attacked(known, params, batch)
        assert found.x is not None and found.y is not None, found.reason
        assert torch.equal(found.x, batch.x)
        assert found.y.tolist() == [seed]
        assert proven(found) == 1


@every
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), labels=st.lists(st.integers(0, CLASSES - 1), min_size=2, max_size=5, unique=True))
def test_distinct_labels_are_taken_apart_by_a_classifier_of_zeros(
    make: Callable[[bool], ServerAttack], network: Callable[[], nn.Module], seed: int, labels: list[int]
) -> None:
    torch.manual_seed(seed)
    known, batch = knowledge(network(), len(labels)), pictures(seed, labels)
    found = attacked(known, craft(make(True), known), batch)
    assert found.x is not None and found.y is not None, found.reason
    order = batch.y.argsort()
    assert torch.equal(found.x, batch.x[order])
    assert torch.equal(found.y, batch.y[order])
    assert proven(found) == len(labels)


def test_images_off_the_grid_are_proven_by_their_update() -> None:
    known = knowledge(plain(), 2)
    batch = Batch(torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3]))
    found = attacked(known, craft(identity_convolutions(zero=True), known), batch)
    assert found.x is not None and proven(found) == 2
    assert float(psnr(batch.x, found.x).min()) > 100


@every
def test_of_one_label_twice_nothing_is_called_exact(
    make: Callable[[bool], ServerAttack], network: Callable[[], nn.Module]
) -> None:
    """Whatever the mean of what the classifier read gives back: other images that give the same update are not the client's."""
    known, batch = knowledge(network(), 3), pictures(0, [2, 5, 2])
    found = attacked(known, craft(make(True), known), batch)
    assert found.x is not None and found.y is not None, found.reason
    assert found.y.tolist() == [2, 2, 5]
    assert torch.equal(found.x[2], batch.x[1])
    assert proven(found) == 1
    assert found.objective == pytest.approx(2 / 3)


@pytest.mark.parametrize("way", ["carried", "identity, no channel to spare"])
def test_of_one_label_twice_the_mean_is_found(way: str) -> None:
    make, network = WAYS[way]
    known, batch = knowledge(network(), 3), pictures(0, [2, 5, 2])
    found = attacked(known, craft(make(True), known), batch)
    assert found.x is not None
    assert torch.allclose(found.x[:2], batch.x[[0, 2]].mean(0), atol=1e-5)


def test_a_mean_that_happens_to_be_on_the_grid_is_no_image() -> None:
    """Of even grey values every mean of two is a grey value, and here it gives the update, too."""
    known, drawn = knowledge(no_spare(), 3), pictures(0, [2, 5, 2])
    batch = Batch((drawn.x * 255 / 2).floor() * 2 / 255, drawn.y)
    found = attacked(known, craft(identity_convolutions(zero=True), known), batch)
    assert proven(found) == 1


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_reversible_blocks_are_reversed(seed: int) -> None:
    torch.manual_seed(seed)
    model = reversible(SHAPE, CLASSES).double()
    x = torch.randn(3, *SHAPE, dtype=torch.float64)
    seen: list[Tensor] = []
    model.classifier.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        model(x)
        back = model.image(seen[0], detached_params(model))
    assert torch.allclose(back, x.flatten(1), atol=1e-10)
    assert not torch.allclose(seen[0], x.flatten(1), atol=1e-2), "the blocks do something"


def few_channels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Flatten(), nn.Linear(72, CLASSES))


NOT_CARRYING: dict[str, Callable[[], nn.Module]] = {
    "stride": lambda: lenet(SHAPE, CLASSES),
    "MaxPool2d": lambda: convnet((3, 9, 9), CLASSES, width=4, norm="none"),
    "Linear": lambda: mlp(SHAPE, CLASSES),
    "plain sequence": lambda: resnet20(SHAPE, CLASSES),
    "3 channels": few_channels,
    "no convolution": lambda: mlp(SHAPE, CLASSES, hidden=[]),
    "size": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 6)),
}


@pytest.mark.parametrize("name", NOT_CARRYING)
def test_a_network_that_cannot_carry_is_refused_by_both(name: str) -> None:
    check_refused(identity_convolutions(), read_carried(), knowledge(NOT_CARRYING[name](), 1))


@pytest.mark.parametrize(
    ("labels", "crafted", "links", "name"),
    [
        ([1], False, chain(local_sgd(0.1)), "conv3"),
        ([1, 2], True, chain(local_sgd(0.1)), "zero = true"),
        ([1], True, chain(local_sgd(0.1, steps=2)), "2 local steps"),
    ],
)
def test_unreadable_input_is_reported(labels: list[int], crafted: bool, links: Chain, name: str) -> None:
    known = knowledge(plain(), len(labels), links)
    params = craft(identity_convolutions(), known) if crafted else detached_params(known.model)
    found = attacked(known, params, pictures(0, labels))
    assert found.status == "not_applicable" and name in found.reason


def test_invalid_arguments_are_refused() -> None:
    check_named("images", lambda: carried(mlp(SHAPE, 2), (16,), 2))
    check_named("'3'", lambda: carried(mlp(SHAPE, 4), SHAPE, 2))
    check_named("carried", lambda: craft(carried_input(), knowledge(plain(), 1)))
    check_named("reversible", lambda: craft(reversible_blocks(), knowledge(plain(), 1)))
    known = knowledge(reversible(SHAPE, CLASSES), 1)
    check_silent(read_carried(), known, craft(reversible_blocks(), known))
