"""The protocol: what a wrong table is refused with, what travels as JSON, and who misses a round."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol

Make = Callable[..., Any]
CLIP = {"use": "clip", "max_norm": 1.0}
SGD = {"use": "local_sgd", "rate": 0.1}
BATCHNORM = {"use": "convnet", "width": 2}


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"rounds": 0}, "rounds"),
        ({"clients": 0}, "clients"),
        ({"seed": -1}, "seed"),
        ({"rounds": 10**7}, "rounds"),
        ({"data": 3}, "[data]"),
        ({"model": [SGD]}, "[model]"),
        ({"chain": SGD}, "chain"),
        ({"chain": [SGD, "clip"]}, "[[chain]] #2"),
        ({"data": {"use": "digits"}}, "[data]: unknown component 'digits'"),
        ({"data": {"partiton": "iid"}}, "[data]: unknown key 'partiton' (it has: alpha, auxiliary, "),
        ({"data": {"partition": "sorted"}}, "[data]: partition"),
        ({"data": {"batch_size": 0}}, "[data]: batch_size"),
        ({"data": {"clients": 3}}, "[data]: unknown key 'clients'"),
        ({"clients": 4000}, "[data]: mnist5k"),
        ({"model": {"use": "os:system"}}, "[model]: use = 'os:system' is not allowed"),
        ({"model": {"width": 3}}, "[model]: unknown key 'width' (it has: stride, activation, mode, weights, adapter, "),
        ({"model": {"mode": "training"}}, "[model]: mode"),
        ({"model": {**BATCHNORM, "width": 0}}, "[model]: width"),
        ({"chain": []}, "[[chain]]: "),
        ({"chain": [SGD, SGD]}, "[[chain]]: "),
        ({"chain": [{**SGD, "each": True}]}, "[[chain]]: "),
        ({"chain": [SGD, {**CLIP, "each": True}]}, "[[chain]]: #2 (clip)"),
        ({"chain": [{**CLIP, "max_norm": 0}, SGD]}, "[[chain]] #1: max_norm"),
        ({"chain": [{**SGD, "steps": 2.0}]}, "[[chain]] #1: steps"),
        ({"chain": [{**SGD, "use": "local_training", "epochs": 0}]}, "[[chain]] #1: epochs"),
        ({"chain": [{**SGD, "momentum": 0.9}]}, "[[chain]] #1: unknown key 'momentum'"),
        (
            {"data": {"batch_size": 2}, "chain": [{"use": "mixup", "alpha": 1.0, "each": True}, SGD]},
            "[[chain]]: #1 (mixup)",
        ),
        (
            {"model": {**BATCHNORM, "mode": "train"}, "chain": [{**CLIP, "each": True}, SGD]},
            "[[chain]] acts per example",
        ),
        *(({key: None}, key) for key in ("rounds", "clients", "data", "model", "chain")),
    ],
)
def test_a_mistake_names_its_table(changes: dict[str, Any], where: str, tables: Make) -> None:
    spec = {key: value for key, value in tables(**changes).items() if value is not None}
    with pytest.raises(SpecError, match=rf"^(the scenario needs ')?{re.escape(where)}"):
        Federation(Protocol.from_tables(spec)).check()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seed": 2**60},
        {"model": {"use": "mlp", "hidden": [4, 5]}, "chain": [{**CLIP, "each": True}, SGD]},
    ],
)
def test_json_carries_the_protocol_unchanged(changes: dict[str, Any], tables: Make) -> None:
    protocol = Protocol.from_tables(tables(**changes))
    text = protocol.to_json()
    assert "\n" not in text
    assert Protocol.from_json(text) == protocol
    assert Protocol.from_json(text).to_json() == text
    assert set(json.loads(text)) == {"seed", "rounds", "clients", "data", "model", "chain"}
