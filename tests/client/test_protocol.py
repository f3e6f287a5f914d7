"""The protocol: what a wrong table is refused with, what travels as JSON, and who misses a round."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol, Stragglers

Make = Callable[..., Any]
CLIP = {"use": "clip", "max_norm": 1.0}
SGD = {"use": "local_sgd", "rate": 0.1}
BATCHNORM = {"use": "convnet", "width": 2}


@pytest.mark.parametrize(
    ("changes", "start", "message"),
    [
        ({"rounds": 0}, "rounds", "must be at least 1, got 0"),
        ({"clients": 0}, "clients", "must be at least 1, got 0"),
        ({"seed": -1}, "seed", "must be at least 0, got -1"),
        ({"rounds": True}, "rounds", "must be a whole number, got True"),
        ({"clients": 2.0}, "clients", "must be a whole number, got 2.0"),
        ({"seed": "0"}, "seed", "must be a whole number, got '0'"),
        ({"data": 3}, "[data]", "must be a table, got 3"),
        ({"model": [SGD]}, "[model]", "must be a table"),
        ({"chain": SGD}, "chain", "must be a list, got {"),
        ({"chain": [SGD, "clip"]}, "[[chain]] #2", "must be a table, got 'clip'"),
        # [data]
        ({"data": {"use": "digits"}}, "[data]", "nothing is called 'digits'; a dataset is one"),
        ({"data": {"partiton": "iid"}}, "[data]", "unknown key 'partiton' (it has: use, alpha, auxiliary, batch_size"),
        ({"data": {"partition": "sorted"}}, "[data]: partition", "must be one of 'iid', 'dirichlet', 'shards', got 'so"),
        ({"data": {"batch_size": 1.5}}, "[data]: batch_size", "must be a whole number, got 1.5"),
        ({"data": {"batch_size": 0}}, "[data]", "batch_size must be at least 1, got 0"),
        ({"data": {"alpha": float("nan")}}, "[data]: alpha", "must be a finite number, got nan"),
        ({"data": {"clients": 3}}, "[data]", "unknown key 'clients'"),
        ({"clients": 4000}, "[data]", "mnist5k has 4000 training images; 1000 auxiliary leave 3000, fewer than 4000"),
        # [model]
        ({"model": {"use": "os:system"}}, "[model]", "'os:system' is not allowed here; a model is one of"),
        ({"model": {"width": 3}}, "[model]", "lenet() has no argument 'width' (it has: stride, mode, weights, adapter, defense, "),
        ({"model": {"mode": "training"}}, "[model]: mode", "must be one of 'train', 'eval', got 'training'"),
        ({"model": {**BATCHNORM, "width": 0}}, "[model]", "width must be at least 1, got 0"),
        # [[chain]]
        ({"chain": []}, "[[chain]]", "exactly one local_sgd or local_training"),
        ({"chain": [CLIP]}, "[[chain]]", "this one has 0"),
        ({"chain": [SGD, SGD]}, "[[chain]]", "this one has 2"),
        ({"chain": [{**SGD, "each": True}]}, "[[chain]] #1", "each = true acts per example, so it belongs before local"),
        ({"chain": [SGD, {**CLIP, "each": True}]}, "[[chain]] #2", "each = true acts per example, so it belongs before"),
        ({"chain": [{**CLIP, "each": 1}, SGD]}, "[[chain]] #1: each", "must be true or false, got 1"),
        ({"chain": [{**CLIP, "max_norm": 0}, SGD]}, "[[chain]] #1", "max_norm must be above 0, got 0.0"),
        ({"chain": [SGD, {"use": "gaussian", "sigma": -1}]}, "[[chain]] #2", "sigma must not be negativ"),
        ({"chain": [{**SGD, "rate": -0.1}]}, "[[chain]] #1", "rate must be above 0, got -0.1"),
        ({"chain": [{**SGD, "steps": 2.0}]}, "[[chain]] #1: steps", "must be a whole number, got 2.0"),
        ({"chain": [{**SGD, "use": "local_training", "epochs": 0}]}, "[[chain]] #1", "epochs must be at least 1, got 0"),
        ({"chain": [{**SGD, "momentum": 0.9}]}, "[[chain]] #1", "has no argument 'momentum' (it has: rate, steps, bat"),
        (
            {"model": {**BATCHNORM, "mode": "train"}, "chain": [{**CLIP, "each": True}, SGD]},
            "[[chain]]",
            "acts per example, and layer 'norm0' (BatchNorm in train mode) mixes examples: set [model] mode = \"eval\"",
        ),
        # [stragglers]
        ({"stragglers": {"probability": 1.0}}, "[stragglers]", "probability must be in [0, 1), got 1.0"),
        ({"stragglers": {"probability": -0.1}}, "[stragglers]", "probability must be in [0, 1), got -0.1"),
        ({"stragglers": {"probability": float("nan")}}, "[stragglers]: probability", "must be a finite number, got nan"),
        ({"stragglers": {"rate": 0.1}}, "[stragglers]", "unknown key 'rate' (it has: probability)"),
        ({"stragglers": 0.1}, "[stragglers]", "must be a table, got 0.1"),
    ],
)  # fmt: skip
def test_a_mistake_names_its_table_and_what_is_allowed(
    changes: dict[str, Any], start: str, message: str, tables: Make
) -> None:
    with pytest.raises(SpecError) as told:
        Federation(Protocol.from_tables(tables(**changes))).check()
    assert str(told.value).startswith(start)
    assert message in str(told.value)


@pytest.mark.parametrize("key", ["rounds", "clients", "data", "model", "chain"])
def test_a_missing_table_is_told(key: str, tables: Make) -> None:
    spec = tables()
    del spec[key]
    with pytest.raises(SpecError, match=f"the scenario needs '{key}'"):
        Protocol.from_tables(spec)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seed": 2**60, "stragglers": {"probability": 0.25}},
        {"model": {"use": "mlp", "hidden": [4, 5]}, "chain": [{**CLIP, "each": True}, SGD]},
    ],
)
def test_json_carries_the_protocol_unchanged(changes: dict[str, Any], tables: Make) -> None:
    protocol = Protocol.from_tables(tables(**changes))
    text = protocol.to_json()
    assert "\n" not in text
    assert Protocol.from_json(text) == protocol
    assert Protocol.from_json(text).to_json() == text
    assert set(json.loads(text)) == {"seed", "rounds", "clients", "data", "model", "chain", "stragglers"}


def test_the_plan_of_attack_never_enters_the_json_that_clients_get(tables: Make) -> None:
    spec = {**tables(), "attack": [{"use": "analytic"}], "audit": {"seed": 99}}
    assert "attack" not in Protocol.from_tables(spec).to_json()
    assert "99" not in Protocol.from_tables(spec).to_json()


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_stragglers_come_at_their_rate(probability: float, tables: Make) -> None:
    protocol = Protocol.from_tables(tables(stragglers={"probability": probability}))
    n = 4000
    late = sum(protocol.misses(c, r) for c in range(40) for r in range(n // 40))
    deviation = (n * probability * (1 - probability)) ** 0.5
    assert abs(late - n * probability) <= 4 * deviation


def test_stragglers_are_drawn_from_the_seed(tables: Make) -> None:
    def late(seed: int) -> list[bool]:
        protocol = Protocol.from_tables(tables(seed=seed, stragglers={"probability": 0.5}))
        return [protocol.misses(c, r) for c in range(8) for r in range(8)]

    assert late(1) == late(1)
    assert late(1) != late(2)
    assert Stragglers().probability == 0
