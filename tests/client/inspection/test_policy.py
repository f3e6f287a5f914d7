"""Inspection from round to round: honest weights pass, and another network than agreed does not."""

import pytest
import torch
from torch import nn

from fedgauge.client.inspection.policy import FIRST_NETWORK, InspectionPolicy, fingerprint
from fedgauge.client.inspection.results import THRESHOLDS
from fedgauge.client.models.vision import convnet, detached_params, lenet, mlp, resnet20
from fedgauge.client.transforms import TransformState
from tests.client.inspection.probing import CLASSES, SHAPE, alarmed, inspect, network, with_


@pytest.mark.parametrize("build", [mlp, lenet, convnet, resnet20])
def test_fresh_weights_of_the_papers_networks_pass(build: object) -> None:
    torch.manual_seed(1)
    model = build((3, 16, 16), 10, **({"width": 8} if build is convnet else {}))  # type: ignore[operator]
    rng = torch.Generator().manual_seed(2)
    params = detached_params(model)
    nearby = {
        k: t + 0.01 * t.std() * torch.randn(t.shape, generator=rng) if t.numel() > 1 else t for k, t in params.items()
    }
    found = inspect(model, nearby, params, agreed=fingerprint(model))
    assert found.suspicion < 1, found.reasons
    assert {f.detector for f in found.results} == set(THRESHOLDS)
    assert not found.reasons


def test_everything_is_left_as_it_was() -> None:
    model = convnet((3, 9, 9), 4, width=2).train()
    params = detached_params(model)
    before = {k: t.clone() for k, t in {**params, **dict(model.named_buffers())}.items()}
    inspect(model, params, params)
    after = {**params, **dict(model.named_buffers())}
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_the_fingerprint_is_of_the_tree_and_not_of_the_values() -> None:
    assert fingerprint(network(0)) == fingerprint(network(1))
    assert len({fingerprint(network(0, hidden)) for hidden in ((40,), (41,), (40, 40))}) == 3
    torch.manual_seed(0)
    relu, tanh = (mlp(SHAPE, CLASSES, hidden=[4], activation=a) for a in ("relu", "tanh"))  # type: ignore[arg-type]
    assert fingerprint(relu) != fingerprint(tanh), "of equal shapes"
    assert fingerprint(nn.MaxPool2d(2)) != fingerprint(nn.MaxPool2d(3)), "and of no tensor at all"


def test_another_network_than_agreed_is_an_alarm_whatever_its_weights() -> None:
    model = network()
    found = inspect(model, detached_params(model), None, agreed=fingerprint(lenet(SHAPE, CLASSES)))
    assert alarmed(found).keys() == {"architecture"}
    assert fingerprint(model) in found.reasons


def test_a_client_compares_with_the_last_weights_that_raised_no_alarm() -> None:
    params = detached_params(network())
    swapped = with_(params, p3_weight=params["3.weight"].flip(0), p3_bias=params["3.bias"].flip(0))
    memory: TransformState = {}
    inspection_policy = InspectionPolicy("refuse")
    assert not inspection_policy.findings(network(), params, 1, memory).alarms
    for round in (2, 3):
        assert "moved rows" in alarmed(inspection_policy.findings(network(), swapped, round, memory)), (
            "not taken for normal by repetition"
        )
    assert not inspection_policy.findings(network(), params, 4, memory).alarms
    kept = {k.removeprefix("params."): t for k, t in memory.items() if k.startswith("params.")}
    assert kept.keys() == params.keys()
    assert memory.keys() == {*(f"params.{k}" for k in params), "round", FIRST_NETWORK}


@pytest.mark.parametrize("round", [2, 400, 10**9])
def test_the_number_that_the_server_gives_a_round_does_not_excuse_a_jump(round: int) -> None:
    params = detached_params(network())
    altered = with_(params, p1_weight=16 * params["1.weight"], p1_bias=16 * params["1.bias"])
    inspection_policy, memory = InspectionPolicy("refuse"), TransformState()
    assert not inspection_policy.findings(network(), params, 1, memory).alarms
    found = inspection_policy.findings(network(), altered, round, memory)
    assert alarmed(found)["jump"].score == pytest.approx(15 / min(round - 1, 5))


def test_the_first_rounds_network_is_the_agreed_one_unless_the_owner_names_it() -> None:
    memory: TransformState = {}
    model, other = network(), network(hidden=(40, 40))
    assert not InspectionPolicy("warn").findings(model, detached_params(model), 1, memory).alarms
    found = InspectionPolicy("warn").findings(other, detached_params(other), 2, memory)
    assert alarmed(found).keys() == {"architecture"}, "nor are weights of another network compared"
    named = InspectionPolicy("warn", architecture=fingerprint(other))
    assert not named.findings(other, detached_params(other), 3, memory).alarms
    assert alarmed(named.findings(model, detached_params(model), 1, {})).keys() == {"architecture"}
