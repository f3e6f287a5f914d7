"""The doctor's comparison of the second derivative: no false alarm on a network that can be attacked, and every true one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.components import allowing
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.simulations.checks.check_result import CheckFailed
from fedgauge.simulations.checks.second_derivative import check_second_derivative
from tests.zoo.networks import Network, networks

ZOO = networks()
QUICK = ("Flower's quickstart", "FedAvg's convolutions", "resnet18")
LACKING = "first derivative only"  # matching runs on it, with a derivative that lacks a term
ATTACKED = [name for name, network in ZOO.items() if not network.declined and name != LACKING]
Compare = Callable[..., str]


@pytest.fixture
def compare() -> Iterator[Compare]:
    """What the doctor finds of a model and data."""

    def found(model: dict[str, Any], data: dict[str, Any]) -> str:
        tables = {"rounds": 1, "clients": 2, "model": model, "chain": [{"use": "local_sgd", "rate": 0.1}]}
        protocol = Protocol.from_tables({**tables, "data": {"batch_size": 2, "auxiliary": 100, **data}})
        return check_second_derivative(Federation(protocol), Federation(protocol))

    with allowing(["zoo_of_tests"], [Path(__file__).parent]):
        yield found


def of(network: Network) -> tuple[dict[str, Any], dict[str, Any]]:
    channels, size, _ = network.shape
    model = {"use": "zoo_of_tests:network", "name": network.name, "mode": "train" if network.train else "eval"}
    return model, {"use": "zoo_of_tests:digits", "channels": channels, "size": size}


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("norm", ["batch", "none"])
def test_our_own_convnet_on_our_own_digits_is_in_order(compare: Compare, mode: str, norm: str) -> None:
    """On their flat background its max-pools are tied, where no finite difference agrees with a derivative."""
    told = compare({"use": "convnet", "width": 4, "norm": norm, "mode": mode}, {"use": "mnist5k"})
    assert told.startswith("equal to the finite difference")


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")  # googlenet's constructor
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in ATTACKED])
def test_no_network_of_the_zoo_raises_a_false_alarm(compare: Compare, name: str) -> None:
    pytest.importorskip(ZOO[name].package)
    told = compare(*of(ZOO[name]))
    assert told.startswith(("equal to the finite difference", "not comparable"))


def test_a_missing_term_of_one_parameter_among_many_is_found(compare: Compare) -> None:
    with pytest.raises(CheckFailed, match="differs from the change of the gradient of"):
        compare(*of(ZOO[LACKING]))
