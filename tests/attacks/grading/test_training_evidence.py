"""What an update says of the local training behind it, where only theta, the update and public examples are known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.training_evidence import TrainingEvidence, training_evidence
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import local_training
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator

BATCH = 8
HEAD = ("linear.weight", "linear.bias")
SGD = {"use": "local_sgd", "rate": 0.05}
TRAINING = {"use": "local_training", "rate": 0.05}
ADAM = {"use": "local_training", "optimizer": "adam", "rate": 1e-3}
LOOP = {"epochs": 3, "batch_size": 3, "shuffle": True}


def federation(assumed: dict[str, Any], model: str = "lenet", **beside: Any) -> Federation:
    tables = {
        "rounds": 1,
        "clients": 2,
        "data": {"use": "mnist5k", "batch_size": BATCH, "auxiliary": 100},
        "model": {"use": model},
        "chain": [assumed],
    }
    return Federation(Protocol.from_tables({**tables, **beside}))


def evidence(
    own: dict[str, Any],
    assumed: dict[str, Any],
    model: str = "lenet",
    dtype: torch.dtype = torch.float32,
    **beside: Any,
) -> TrainingEvidence:
    """Of an update by the training `own`, which travels as weights of a dtype; the server assumes another chain."""
    fed = federation(assumed, model, **beside)
    params, buffers = fed.initial()
    client = local_training(examples=BATCH, **{"rate": 0.05, **own})(fed.gradient)
    update = client(params, fed.shards.batch_at(0, 1), generator("client"))
    sent = {k: (params[k] + t).to(dtype).float() - params[k] for k, t in update.items()}
    return training_evidence(fed, Observation(1, 0, params, sent, buffers))


@pytest.mark.parametrize("model", ["lenet", pytest.param("mlp", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("own", "kind"),
    [
        ({}, "sum of gradients"),
        ({"momentum": 0.9, **LOOP}, "sum of gradients"),
        ({"max_norm": 0.5, **LOOP}, "sum of gradients"),
        ({"weight_decay": 0.01}, "weight decay"),
        ({"weight_decay": 5e-4, "momentum": 0.9, **LOOP}, "weight decay"),
        ({"optimizer": "adam", "rate": 1e-3}, "Adam"),
        ({"optimizer": "adam", "rate": 1e-3, **LOOP}, "Adam"),
        ({"optimizer": "adamw", "rate": 1e-3, "weight_decay": 0.01}, "Adam"),
        ({"optimizer": "adamw", "rate": 1e-3, "weight_decay": 0.01, **LOOP}, "Adam"),
    ],
)
def test_the_training_is_told_from_the_update(model: str, own: dict[str, Any], kind: str) -> None:
    blind = evidence(own, SGD, model)
    assert blind.kind == kind
    if kind != "sum of gradients":  # of which one update does not tell all
        assert blind.fits is False
        assert blind.words.startswith("WARNING: ")
    beside = {k: v for k, v in own.items() if k != "optimizer"}
    described = {"use": "local_training", "rate": 0.05, "optimizer": own.get("optimizer", "sgd"), **beside}
    told = evidence(own, described, model)
    assert (told.kind, told.fits) == (kind, True), told.words


def test_adam_taken_for_sgd_is_a_warning_that_says_what_to_write() -> None:
    words = evidence({"optimizer": "adam", "rate": 1e-3}, SGD).words
    assert words.startswith(
        "WARNING: the assumed local training does not explain the update, so attacks may show noise"
    )
    assert "nearly one size, 0.001, as after Adam's first steps, or a sign" in words
    assert 'the chain assumes 1 local step of SGD: set use = "local_training" with optimizer = "adam"' in words


def test_sgd_taken_for_adam_is_a_warning() -> None:
    found = evidence({}, ADAM)
    assert (found.kind, found.fits) == ("sum of gradients", False)
    assert 'set use = "local_training" with optimizer = "sgd"' in found.words


def test_more_steps_than_assumed_show_in_the_rank() -> None:
    found = evidence({"epochs": 5}, SGD, "mlp")
    assert (found.kind, found.fits) == ("sum of gradients", False)
    assert "its rank of" in found.words and "than the 8 that the chain assumes" in found.words
    assert evidence({"epochs": 5}, {**SGD, "steps": 5}, "mlp").fits is True


def test_what_one_update_cannot_tell_is_said() -> None:
    assert "momentum, rate and number of steps cannot be told" in evidence({}, SGD).words
    assert "times as large" not in evidence({}, SGD).words
    assert "times as large as the assumed training makes those" in evidence({"rate": 5.0}, SGD).words
    assert "times as large as the assumed training makes those" in evidence({"rate": 1e-3}, {**SGD, "rate": 1.0}).words


@pytest.mark.parametrize("own", [{**ADAM, **LOOP}, {**ADAM, **LOOP, "epochs": 10}, {}], ids=["3", "10", "SGD"])
def test_two_classes_have_opposite_rows_under_any_training(own: dict[str, Any], tmp_path: Path) -> None:
    digits = federation(SGD).shards.dataset
    two = digits.y < 2
    np.savez(tmp_path / "two.npz", x=digits.x[two].numpy(), y=digits.y[two].numpy())
    data = {"use": "npz", "path": str(tmp_path / "two.npz"), "batch_size": BATCH, "auxiliary": 100}
    used = {k: v for k, v in own.items() if k != "use"}
    found = evidence(used, {**SGD, "steps": 10}, data=data)
    assert found.kind in (("Adam", "undecided") if own else ("undecided",)), found.words
    decayed = {"weight_decay": 0.5}  # makes the entries of SGD's step as even as Adam's
    assert evidence(decayed, {**TRAINING, **decayed}, data=data).fits is None


def test_many_steps_of_adam_are_undecided_where_they_are_assumed() -> None:
    own = {"optimizer": "adam", "rate": 1e-3, "epochs": 20, "batch_size": 3}
    found = evidence(own, {"use": "local_training", **own})
    assert (found.kind, found.fits) == ("undecided", None)
    assert "60 local steps of Adam may do this or not" in found.words
    for_sgd = evidence(own, SGD)
    assert for_sgd.fits is False
    assert "many steps of Adam, noise or a defense may" in for_sgd.words


@pytest.mark.parametrize(
    ("own", "assumed", "words"),
    [
        ({}, {"weight_decay": 0.1}, "makes this -0.005 times the weights"),
        ({"weight_decay": 0.01}, {"weight_decay": 0.5}, "makes this -0.025 times the weights"),
        ({"optimizer": "adam", "rate": 1e-3}, {"optimizer": "adam", "rate": 0.1}, "rate 0.1 is larger than 0.001"),
        ({"optimizer": "adam", "rate": 1e-3, **LOOP}, {"optimizer": "adam", "rate": 1e-3}, "move no entry by"),
    ],
)
def test_another_size_than_is_assumed_is_a_warning(own: dict[str, Any], assumed: dict[str, Any], words: str) -> None:
    found = evidence(own, {**TRAINING, **assumed})
    assert found.fits is False
    assert words in found.words


@pytest.mark.parametrize(
    ("change", "fits", "words"),
    [
        (lambda k, t: -t, False, "it goes up the loss"),
        (lambda k, t: t if k in HEAD else 0 * t, False, "conv1.weight did not move"),
        (
            lambda k, t: t if k in HEAD else torch.randn(t.shape, generator=generator(k)) * t.norm(),
            None,
            "is a sum of gradients, but conv1.weight has no more in common with gradients than noise",
        ),
        (lambda k, t: t, True, "(1 local step of SGD) fits the classifier's update: it sums to zero"),
    ],
    ids=["ascent", "head alone", "noise before the head", "as it is"],
)
def test_what_the_classifier_hides_is_looked_at(
    change: Callable[[str, Tensor], Tensor], fits: bool | None, words: str
) -> None:
    fed = federation(SGD)
    params, buffers = fed.initial()
    update = {k: change(k, t) for k, t in fed.own_update(params, buffers, 0, 1).items()}
    found = training_evidence(fed, Observation(1, 0, params, update, buffers))
    assert found.fits is fits, found.words
    assert words in found.words


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ({"secure_sum": {"group": 2}}, "the server sees only sums of clients"),
        ({"chain": [SGD, {"use": "gaussian", "sigma": 0.1}]}, "a defense stands in the chain, too"),
    ],
)
def test_what_cannot_be_read_is_undecided(beside: dict[str, Any], reason: str) -> None:
    found = evidence({"optimizer": "adam"}, SGD, **beside)
    assert (found.kind, found.fits) == ("undecided", None)
    assert found.words == f"the clients' local training is assumed and was not checked: {reason}"


def test_an_update_lost_in_the_rounding_of_half_precision_is_undecided() -> None:
    found = evidence({"optimizer": "adam", "rate": 1e-5}, SGD, dtype=torch.float16)
    assert (found.kind, found.fits) == ("undecided", None)
    assert "the weights' rounding hides it" in found.words
    coarse = evidence({"momentum": 0.9, "epochs": 10, "rate": 0.1}, {**SGD, "steps": 10}, dtype=torch.float16)
    assert (coarse.kind, coarse.fits) == ("sum of gradients", True), coarse.words


def test_noise_that_nobody_declared_is_explained_by_no_training() -> None:
    fed = federation(SGD)
    params, buffers = fed.initial()
    update = fed.own_update(params, buffers, 0, 1)
    noisy = {k: t + 1e-3 * torch.randn(t.shape, generator=generator(k)) * t.abs().max() for k, t in update.items()}
    found = training_evidence(fed, Observation(1, 0, params, noisy, buffers))
    assert found.fits is not True, found.words


def test_a_network_of_made_weights_and_mixed_modes_is_read_and_left_as_it_was() -> None:
    """Weight norm has no tensor called weight; a frozen BatchNorm stays in eval mode inside a network that trains."""
    fed = federation(SGD)
    network = nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(784, 8)), nn.BatchNorm1d(8), nn.Linear(8, 10)
    )
    network.train()
    network[2].eval()
    fed.__dict__["model"] = network
    params = {k: p.detach().clone() for k, p in network.named_parameters()}
    buffers = {k: b.clone() for k, b in network.named_buffers()}
    seen = Observation(1, 0, params, fed.client_update(params, buffers, 0, 1), buffers)
    assert training_evidence(fed, seen).fits is True
    assert network.training and not network[2].training
