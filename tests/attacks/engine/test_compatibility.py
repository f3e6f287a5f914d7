"""The way of differentiation, for models that decide by their input's values or fail on some."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedgauge.attacks.base import Budget, Observation, Wave
from fedgauge.attacks.engine import compatibility
from fedgauge.attacks.engine.compatibility import Differentiation, differentiation_of, doubled, parameter_problem
from fedgauge.attacks.engine.gradient_distances import squared
from fedgauge.attacks.matching import recipes
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.recipes import inverting_gradients
from fedgauge.client.models.losses import FittedLoss
from fedgauge.client.models.vision import detached_params
from tests.attacks.matching.tiny_problems import network, normalise, scene, streams

RATE = 0.1


class Deciding(nn.Module):
    """A network behind something that is decided for the whole batch."""

    def __init__(self, decide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.decide, self.net = decide, network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.decide(x))


def by_numpy(x: Tensor) -> Tensor:
    return x / 255 if x.detach().numpy().max() > 0.2 else x


DECIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "if": lambda x: x / 255 if x.max() > 0.2 else x,
    "float": lambda x: x * (2.0 if float(x.detach().mean()) > -0.2 else 1.0),
    "list": lambda x: x * (2.0 if max(x.detach().flatten().tolist()) > 0.2 else 1.0),
    "numpy": by_numpy,
    "equal": lambda x: x if torch.equal(x, x.clamp(max=0.2)) else x / 255,
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("how", DECIDING)
def test_problems_do_not_share_a_decision(how: str) -> None:
    model = Deciding(DECIDING[how])
    wave, known, batches = scene(clients=2, model=model)
    posed = Problems(Objective(squared()), wave, known, known.labels, 1, torch.float64)
    assert posed.way.route == "loop"
    bright, dark = normalise(batches[0].x), normalise(0.1 * batches[1].x)
    value, slopes = posed.value_and_slopes({"x": torch.stack([bright, dark])}, torch.arange(2))
    params = dict(model.named_parameters())
    for c, x in enumerate((bright, dark)):
        leaf = x.clone().requires_grad_()
        loss = F.cross_entropy(model(leaf), batches[c].y)
        found = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        gaps = [(wave.update[k][c] + RATE * g).square().sum() for k, g in zip(params, found, strict=True)]
        expected = torch.stack(gaps).sum() / torch.stack([wave.update[k][c].square().sum() for k in params]).sum()
        (slope,) = torch.autograd.grad(expected, leaf)
        torch.testing.assert_close(value[c], expected.detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(slopes["x"][c], slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()])
def test_a_network_is_tried_once_for_searches_in_either_precision(
    monkeypatch: pytest.MonkeyPatch, loss: nn.Module | None
) -> None:
    tried = list[torch.dtype]()

    def choose(trial: Any, one_pass: bool) -> Differentiation:
        tried.append(trial.x.dtype)
        return Differentiation("loop")

    monkeypatch.setattr(compatibility, "_choose", choose)
    wave, known, _ = scene(clients=2)
    known = replace(known, loss=loss or known.loss)
    double = {k: p.double() for k, p in wave.params.items()}
    ways = [differentiation_of(known, wave.params, True)]
    ways += [differentiation_of(doubled(known), double, True) for _ in range(2)]
    assert ways == 3 * [Differentiation("loop")] and tried == [torch.float64]


def test_a_way_is_of_one_loss() -> None:
    def deciding(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) * (2.0 if float(outputs.detach().max()) > 0 else 1.0)

    wave, known, _ = scene(clients=2)
    ways = [
        differentiation_of(replace(known, loss=FittedLoss(loss, reads_input=False)), wave.params, True).route
        for loss in (F.cross_entropy, deciding)
    ]
    assert ways == ["one pass", "loop"]


def test_reading_what_does_not_depend_on_the_batch_leaves_one_pass() -> None:
    weight = torch.ones(3)
    model = Deciding(lambda x: x * float(weight.max()) if bool(weight[0] > 0) else x)
    wave, known, _ = scene(clients=2, model=model)
    objective = Objective(squared())
    assert Problems(objective, wave, known, known.labels, 1, torch.float32).way.route == "one pass"


def test_a_model_that_insists_on_float32_is_tried_in_it() -> None:
    def insisting(x: Tensor) -> Tensor:
        assert x.dtype == torch.float32, "convert to float32 first"
        return x

    wave, known, _ = scene(model=Deciding(insisting))
    differentiation_of(known, wave.params, True)
    assert {dtype for _, dtype in compatibility._chosen[known.model]} == {torch.float32}


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_declined(kind: torch.dtype) -> None:
    model = network()
    wave, known, _ = scene(model=model)
    model.to(kind)
    update = {k: t.to(kind)[0] for k, t in wave.update.items()}
    wave = Wave.stack([Observation(1, 0, detached_params(model), update)])
    (found,) = inverting_gradients().reconstruct(wave, known, Budget(2), streams(0))
    assert found.status == "not_applicable" and "float32" in found.reason


def test_a_model_that_fails_in_the_descent_is_declined() -> None:
    def within(x: Tensor) -> Tensor:
        assert x.abs().max() < normalise(torch.ones(())) + 0.1, "pixels out of range"
        return x

    wave, known, _ = scene(model=Deciding(within))
    (found,) = inverting_gradients().reconstruct(wave, known, Budget(2), streams(0))
    assert found.status == "not_applicable" and "AssertionError: pixels" in found.reason


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", ["idlg", "inverting_gradients"])
def test_reentrant_checkpointing_is_declined(name: str) -> None:
    wave, known, _ = scene()
    known = replace(known, model=Recomputed())
    params = detached_params(known.model)
    wave = Wave.stack([Observation(1, 0, params, {k: torch.ones_like(p) for k, p in params.items()})])
    (found,) = getattr(recipes, name)().reconstruct(wave, known, Budget(2), streams(0))
    assert found.status == "not_applicable" and "differentiated" in found.reason


class Recomputed(nn.Module):
    """Recomputes its activations in the backward pass, in the way that allows `backward()` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = checkpoint(self.net, x, use_reentrant=True)
        return logits


def test_complex_parameters_are_declined_by_name() -> None:
    problem = parameter_problem(network(), {"a": torch.ones(2, dtype=torch.cfloat), "b": torch.ones(2)})
    assert problem is not None and (problem.code, problem.where) == ("complex", "parameter 'a'")
