"""Evidence of the local training behind an update, where only theta and the update are known."""

import copy
import re
from collections.abc import Callable
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
from fedgauge.client.components import allowing
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import local_training
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator

HERE = "tests.attacks.grading.test_training_evidence"
BATCH = 8
HEAD = ("linear.weight", "linear.bias")
SGD = {"use": "local_sgd", "rate": 0.05}
TRAINING = {"use": "local_training", "rate": 0.05}
ADAM = {"use": "local_training", "optimizer": "adam", "rate": 1e-3}
LOOP = {"epochs": 3, "batch_size": 3, "shuffle": True}


def federation(assumed: dict[str, Any], model: str | dict[str, Any] = "lenet", **beside: Any) -> Federation:
    tables = {
        "rounds": 1,
        "clients": 2,
        "data": {"use": "mnist5k", "batch_size": BATCH, "auxiliary": 100},
        "model": {"use": model} if isinstance(model, str) else model,
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
        ({"weight_decay": 0.01}, "sum of gradients"),
        ({"weight_decay": 5e-4, "momentum": 0.9, **LOOP}, "sum of gradients"),
        ({"optimizer": "adam", "rate": 1e-3}, "Adam"),
        ({"optimizer": "adam", "rate": 1e-3, **LOOP}, "unexplained"),
        ({"optimizer": "adamw", "rate": 1e-3, "weight_decay": 0.01}, "Adam"),
    ],
)
def test_training_is_inferred_from_the_update(model: str, own: dict[str, Any], kind: str) -> None:
    blind = evidence(own, SGD, model)
    assert blind.kind == kind
    if kind != "sum of gradients":  # of which one update does not tell all
        assert blind.fits is False
        assert blind.words.startswith("WARNING: ")
    beside = {k: v for k, v in own.items() if k != "optimizer"}
    described = {"use": "local_training", "rate": 0.05, "optimizer": own.get("optimizer", "sgd"), **beside}
    told = evidence(own, described, model)
    assert (told.kind, told.fits) == (kind if kind != "unexplained" else "Adam", True), told.words


@pytest.mark.parametrize(
    ("own", "assumed", "model", "kind", "named"),
    [
        ({"optimizer": "adam", "rate": 1e-3}, SGD, "lenet", "Adam", 'use = "local_training" with optimizer = "adam"'),
        ({}, ADAM, "lenet", "sum of gradients", 'optimizer = "sgd"'),
        ({"optimizer": "adam", "rate": 1e-3, "epochs": 20, "batch_size": 3}, SGD, "lenet", "unexplained", "[loss]"),
    ],
)
def test_a_wrong_assumption_gives_a_warning_with_a_remedy(
    own: dict[str, Any], assumed: dict[str, Any], model: str, kind: str, named: str
) -> None:
    found = evidence(own, assumed, model)
    assert (found.kind, found.fits) == (kind, False)
    assert found.words.startswith("WARNING: ") and named in found.words


@pytest.mark.parametrize("optimizer", [torch.optim.RMSprop, torch.optim.Adagrad])
def test_the_first_step_of_another_adaptive_optimizer_is_named_as_one_of_adam_at_its_size(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    fed = federation(SGD, "mlp")
    params, buffers = fed.initial()
    batch, own = fed.shards.batch_at(0, 1), {k: p.clone().requires_grad_() for k, p in params.items()}
    for name, slope in fed.gradient(params, batch, generator("client")).items():
        own[name].grad = slope
    optimizer(own.values(), lr=1e-3).step()
    update = {k: p.detach() - params[k] for k, p in own.items()}
    found = training_evidence(fed, Observation(1, 0, params, update, buffers))
    size = float(re.findall(r"one size, ([\d.e-]+),", found.words)[0])
    same = local_training(examples=BATCH, optimizer="adam", rate=size)(fed.gradient)(params, batch, generator("client"))
    off = sum(float((same[k] - t).square().sum()) for k, t in update.items())
    assert off < 1e-3 * sum(float(t.square().sum()) for t in update.values()) and optimizer.__name__ in found.words


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


@pytest.mark.parametrize(
    "beside", [{"secure_sum": {"group": 2}}, {"chain": [SGD, {"use": "gaussian", "sigma": 0.1}]}], ids=str
)
def test_unreadable_updates_are_undecided(beside: dict[str, Any]) -> None:
    found = evidence({"optimizer": "adam"}, SGD, **beside)
    assert (found.kind, found.fits) == ("undecided", None)
    assert "not checked" in found.words


def test_an_update_lost_in_the_rounding_of_half_precision_is_undecided() -> None:
    found = evidence({"optimizer": "adam", "rate": 1e-5}, SGD, dtype=torch.float16)
    assert (found.kind, found.fits) == ("undecided", None)
    coarse = evidence({"momentum": 0.9, "epochs": 10, "rate": 0.1}, {**SGD, "steps": 10}, dtype=torch.float16)
    assert coarse.kind == "sum of gradients" and coarse.fits is not False, coarse.words


FROZEN = {"use": "freeze", "layers": ["conv1", "conv2", "conv3"]}


def brought(
    train: Callable[[nn.Module, Tensor, Tensor], None],
    assumed: list[dict[str, Any]],
    model: str | dict[str, Any] = "lenet",
) -> TrainingEvidence:
    """Of an update by a training as an app's author writes it with torch's own optimizers."""
    fed = federation(SGD, chain=assumed, model=model)
    params, buffers = fed.initial()
    own, batch = copy.deepcopy(fed.model), fed.shards.batch_at(0, 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        train(own, fed.shards.dataset.normalise(batch.x), batch.y)
    update = {k: p.detach() - params[k] for k, p in own.named_parameters()}
    returned = {k: b for k, b in own.named_buffers() if k in buffers}
    return training_evidence(fed, Observation(1, 0, params, update, buffers, returned=returned))


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


def decay_of_weights_alone(network: nn.Module) -> torch.optim.Optimizer:
    weights = {"params": [p for p in network.parameters() if p.dim() > 1], "weight_decay": 0.01}
    return torch.optim.SGD([weights, {"params": [p for p in network.parameters() if p.dim() == 1]}], lr=0.05)


def of_each_class(logits: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, functional.one_hot(y, 10).float())


@pytest.mark.parametrize(
    ("train", "chain", "fits", "named"),
    [
        (steps(head_alone=True), [FROZEN, SGD], True, ""),
        (steps(head_alone=True), [FROZEN, ADAM], False, 'optimizer = "sgd"'),
        (steps(5), [{**SGD, "steps": 5}], True, ""),
        (steps(make=decay_of_weights_alone), [{**TRAINING, "weight_decay": 0.01}], True, "-0.0005 times the weights"),
        (steps(make=lambda n: torch.optim.Adam(n.parameters())), [ADAM], True, ""),
        (steps(half=True), [SGD], None, "half precision"),
        (steps(loss=partial(functional.cross_entropy, label_smoothing=0.1)), [SGD], True, ""),
        (steps(loss=partial(functional.cross_entropy, reduction="sum")), [SGD], True, ""),
        (steps(loss=of_each_class), [SGD], False, "[loss]"),
    ],
    ids=["frozen", "frozen, not Adam", "steps", "decay of weights", "Adam",
         "autocast", "smoothing", "sums", "another loss"],
)  # fmt: skip
def test_training_of_apps_is_explained_correctly(
    train: Callable[..., None], chain: list[dict[str, Any]], fits: bool | None, named: str
) -> None:
    found = brought(train, chain)
    assert found.fits is fits and named in found.words, found.words


def ending(shape: tuple[int, ...], end: str) -> nn.Module:
    ends = {"relu": nn.ReLU(), "sigmoid": nn.Sigmoid(), "log_softmax": nn.LogSoftmax(-1)}
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 10), ends[end])


def few(shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(28), nn.Flatten(), nn.Linear(1, 10, bias=False))


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        ({"use": "ending", "end": "relu"}, None),
        ({"use": "ending", "end": "sigmoid"}, None),
        ({"use": "ending", "end": "log_softmax"}, True),
        ({"use": "few"}, True),  # of a few entries, half have one size by chance
    ],
    ids=lambda given: given.get("end", "few") if isinstance(given, dict) else "",
)
def test_an_activation_behind_the_classifier_or_few_weights_are_no_other_training(
    model: dict[str, Any], fits: bool | None
) -> None:
    with allowing([HERE]):
        found = brought(steps(), [SGD], {**model, "use": f"{HERE}:{model['use']}"})
    assert found.fits is fits, found.words


@pytest.mark.parametrize(("trained", "assumed"), [(True, "eval"), (False, "train"), (True, "train")])
def test_batch_statistics_say_in_which_mode_the_client_trained(trained: bool, assumed: str) -> None:
    def train(network: nn.Module, x: Tensor, y: Tensor) -> None:
        steps()(network.train(trained), x, y)

    found = brought(train, [SGD], {"use": "convnet", "width": 4, "norm": "batch", "mode": assumed})
    assert found.fits is (trained == (assumed == "train"))
    assert found.fits or f'mode = "{"train" if trained else "eval"}"' in found.words
