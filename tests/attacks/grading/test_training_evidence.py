"""What an update says of the local training behind it, where only theta, the update and public examples are known."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.training_evidence import TrainingEvidence, training_evidence
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import local_training
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.server.store.uploads import as_the_model_has_it

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
    assert "momentum, rate, number of steps, augmentation" in evidence({}, SGD).words
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
        (lambda k, t: t if k in HEAD else 0 * t, False, "conv1, conv2, conv3 did not move, but would have"),
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
    assert coarse.kind == "sum of gradients" and coarse.fits is not False, coarse.words


def test_noise_that_nobody_declared_is_explained_by_no_training() -> None:
    fed = federation(SGD)
    params, buffers = fed.initial()
    update = fed.own_update(params, buffers, 0, 1)
    noisy = {k: t + 1e-3 * torch.randn(t.shape, generator=generator(k)) * t.abs().max() for k, t in update.items()}
    found = training_evidence(fed, Observation(1, 0, params, noisy, buffers))
    assert found.fits is not True, found.words


@pytest.mark.parametrize("model", ["lenet", "mlp"])
@pytest.mark.parametrize("own", [{}, {"optimizer": "adam", "rate": 1e-3}], ids=["SGD", "Adam"])
def test_normal_noise_is_named_with_its_size_before_adam_is(model: str, own: dict[str, Any]) -> None:
    fed = federation(SGD, model)
    params, buffers = fed.initial()
    client = local_training(examples=BATCH, **{"rate": 0.05, **own})(fed.gradient)
    update = client(params, fed.shards.batch_at(0, 1), generator("client"))
    entries = torch.cat([t.flatten() for t in update.values()])
    sigma = 5 * float(entries.square().mean().sqrt())
    noisy = {k: t + sigma * torch.randn(t.shape, generator=generator(k)) for k, t in update.items()}
    found = training_evidence(fed, Observation(1, 0, params, noisy, buffers))
    assert (found.kind, found.fits) == ("noise", False), found.words
    named = float(found.words.partition("standard deviation of ")[2].partition(";")[0])
    assert 0.85 * sigma < named < 1.15 * sigma


def test_uploaded_differences_are_not_called_weight_decay() -> None:
    fed = federation(SGD)
    params, buffers = fed.initial()
    difference = fed.own_update(params, buffers, 0, 1)
    taken_for_weights = {k: t - params[k] for k, t in difference.items()}
    found = training_evidence(fed, Observation(1, 0, params, taken_for_weights, buffers))
    assert (found.kind, found.fits) == ("differences", False)
    assert 'replies = "updates"' in found.words


def test_a_network_of_other_outputs_than_classes_is_undecided() -> None:
    found = brought(
        lambda network, x, y: steps(loss=lambda out, y: (out - x.flatten(1)).square().mean())(network, x, y),
        [SGD],
        nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 784)),
    )
    assert (found.kind, found.fits) == ("undecided", None)
    assert "784 outputs for 10 classes" in found.words


FROZEN = {"use": "freeze", "layers": ["conv1", "conv2", "conv3"]}
BACKBONE = "conv1, conv2, conv3"
SUMS = "it sums to zero over the classes"


def brought(
    train: Callable[[nn.Module, Tensor, Tensor], None], assumed: list[dict[str, Any]], network: nn.Module | None = None
) -> TrainingEvidence:
    """Of an update by a training as an app's author writes it with torch's own optimizers."""
    fed = federation(SGD, chain=assumed)
    if network is not None:
        fed.__dict__["model"] = network
    params, buffers = fed.initial()
    own, batch = copy.deepcopy(fed.model), fed.shards.batch_at(0, 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        train(own, fed.shards.dataset.normalise(batch.x), batch.y)
    update = {k: p.detach() - params[k] for k, p in own.named_parameters()}
    return training_evidence(fed, Observation(1, 0, params, update, buffers))


def steps(
    count: int = 1,
    head_alone: bool = False,
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
    half: bool = False,
    make: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> Callable[[nn.Module, Tensor, Tensor], None]:
    def train(network: nn.Module, x: Tensor, y: Tensor) -> None:
        for name, p in network.named_parameters():
            p.requires_grad_(name in HEAD or not head_alone)
        trained = [p for p in network.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05) if make is None else make(network)
        for _ in range(count):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                value = loss(network(x), y)
            value.backward()  # type: ignore[no-untyped-call]  # torch annotates it in part
            optimizer.step()

    return train


@pytest.mark.parametrize(
    ("train", "chain", "fits", "words"),
    [
        (steps(head_alone=True), [FROZEN, SGD], True, f"{SUMS}, as a sum of gradients (SGD) does; "),
        (steps(head_alone=True), [FROZEN, SGD], True, f"; {BACKBONE} did not move, as the chain says"),
        (steps(head_alone=True), [SGD], False, f"layers = ['conv1', 'conv2', 'conv3'] before local training; of the rest: {SUMS}"),
        (steps(head_alone=True), [FROZEN, ADAM], False, 'set use = "local_training" with optimizer = "sgd"'),
        (steps(), [FROZEN, SGD], False, f"{BACKBONE} moved, which the chain freezes: leave it out there"),
        (steps(5), [FROZEN, {**SGD, "steps": 5}], False, f"{BACKBONE} moved, which the chain freezes"),
    ],
)  # fmt: skip
def test_what_is_frozen_is_named_and_the_rest_is_compared(
    train: Callable[..., None], chain: list[dict[str, Any]], fits: bool, words: str
) -> None:
    found = brought(train, chain)
    assert found.fits is fits and words in found.words, found.words


def up(logits: Tensor, y: Tensor) -> Tensor:
    return -functional.cross_entropy(logits, y)


def decay_of_weights_alone(network: nn.Module) -> torch.optim.Optimizer:
    weights = {"params": [p for p in network.parameters() if p.dim() > 1], "weight_decay": 0.01}
    return torch.optim.SGD([weights, {"params": [p for p in network.parameters() if p.dim() == 1]}], lr=0.05)


def of_each_class(logits: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, functional.one_hot(y, 10).float())


@pytest.mark.parametrize(
    ("train", "assumed", "fits", "words"),
    [
        (steps(5, loss=up), {**SGD, "steps": 5}, False, "it goes up the loss"),
        (steps(5, loss=up, make=decay_of_weights_alone), {**TRAINING, "steps": 5, "weight_decay": 0.01}, False, "up the loss"),
        (steps(loss=up, make=lambda n: torch.optim.Adam(n.parameters())), ADAM, False, "it goes up the loss"),
        (steps(5), {**SGD, "steps": 5}, True, SUMS),
        (steps(make=decay_of_weights_alone), {**TRAINING, "weight_decay": 0.01}, True, "-0.0005 times the weights"),
        (steps(make=lambda n: torch.optim.Adam(n.parameters())), ADAM, True, "nearly one size"),
        (steps(half=True), SGD, None, "it nearly sums to zero over the classes, as with half precision"),
        (steps(loss=partial(functional.cross_entropy, label_smoothing=0.1)), SGD, True, "a smoothed or weighted loss"),
        (steps(loss=partial(functional.cross_entropy, reduction="sum")), SGD, True, "rate"),
        (steps(loss=of_each_class), SGD, False, "SGD on this loss does not do this; another loss"),
    ],
    ids=["ascent", "ascent with decay", "ascent of Adam", "descent", "decay of weights", "Adam", "autocast", "smoothing",
         "sums", "another loss"],
)  # fmt: skip
def test_what_apps_do_beside_the_assumed_training_is_neither_explained_nor_accused_wrongly(
    train: Callable[..., None], assumed: dict[str, Any], fits: bool | None, words: str
) -> None:
    found = brought(train, [assumed])
    assert found.fits is fits and words in found.words, found.words


@pytest.mark.parametrize("count", [1, 5])
def test_dropout_is_no_reason_for_an_accusation(count: int) -> None:
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10)
    found = brought(
        lambda network, x, y: steps(count)(network.train(), x, y),
        [{**SGD, "steps": count}],
        nn.Sequential(*layers).eval(),
    )
    assert found.fits is True and "dropout" in found.words, found.words


@pytest.mark.parametrize(("trains", "moved"), [(True, False), (False, True)])
def test_running_statistics_tell_the_mode_that_the_app_trains_in(trains: bool, moved: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)).train(trains)
    fed = federation(SGD)
    fed.__dict__["model"] = network
    params, buffers = fed.initial()
    seen = Observation(1, 0, params, fed.client_update(params, buffers, 0, 1), buffers)

    def told(moved: bool) -> TrainingEvidence:
        mean = torch.full((32,), 0.1 * moved)
        sent = {**seen.update, "2.running_mean": mean, "2.num_batches_tracked": torch.tensor(1)}
        app = replace(seen, params={**network.state_dict(), **params, **buffers}, update=sent, buffers={})
        return training_evidence(fed, as_the_model_has_it(app, fed, "updates"))

    found = told(moved)
    assert found.fits is False
    assert f'set [model] mode = "{"eval" if trains else "train"}"' in found.words
    assert told(trains).fits is True
    assert training_evidence(fed, seen).fits is True


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
