"""A deployed canary: its owner alone makes it one, and what it sends is the direction that the server looks for."""

from typing import Any

import pytest
from torch import Tensor

from fedgauge.attacks.membership.canary_epsilon import cosines
from fedgauge.client.components import SpecError
from fedgauge.client.deployment.deployed_client import NO_CANARY, UNWILLING, DeployedClient
from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.client.deployment.server_terms import RequestRefused
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.update import Update
from fedgauge.simulations.checks.owner_check import check_owner
from tests.client.deployment.conftest import SERVERS, SGD, Write, terms

CLIP, NOISE = {"use": "clip", "max_norm": 0.3}, {"use": "gaussian", "sigma": 1e-4}
DATA = {"use": "mnist5k", "batch_size": 4, "auxiliary": 64}
CANARIES = {"canaries": {"clients": 2}}  # of three clients, the last two


def sent(own: DeployedClient, memory: dict[str, Tensor]) -> Update:
    params, buffers = own.initial()
    return own.compute(params, buffers, own.owner.batch(own.draw(1)), memory)


@pytest.mark.parametrize(
    "chain",
    [[SGD, CLIP, NOISE], [{**CLIP, "each": True}, NOISE, SGD], [{"use": "dp_sgd", "max_norm": 0.3, "noise_multiplier": 1e-4}, SGD]],
    ids=["the update", "each gradient", "dp_sgd"],
)  # fmt: skip
def test_a_willing_client_sends_the_direction_that_the_server_knows(write: Write, chain: list[dict[str, Any]]) -> None:
    own = DeployedClient.of(OwnerConfig.load(write(canary=True, chain=chain, data=DATA)), terms(**CANARIES))
    servers = Federation(Protocol.from_tables(SERVERS | {"chain": [SGD, CLIP, NOISE]} | CANARIES))
    mine, other = cosines(sent(own, {}), [servers.direction(1), servers.direction(2)]).tolist()
    assert mine > 0.99 and abs(other) < 0.1
    owners = DeployedClient.of(OwnerConfig.load(write(canary=False, chain=chain, data=DATA)), terms())
    assert abs(float(cosines(sent(owners, {}), [servers.direction(1)]))) < 0.1


@pytest.mark.parametrize(
    ("canary", "server", "words"),
    [
        (False, CANARIES, UNWILLING),
        (None, CANARIES, UNWILLING),
        (True, {}, NO_CANARY),
        (True, {"canaries": {"clients": 1}}, NO_CANARY),
        (True, {"canaries": {"clients": 2, "examples": 3}}, NO_CANARY),
    ],
)
def test_who_disagrees_with_the_server_sends_nothing(
    write: Write, canary: bool | None, server: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        DeployedClient.of(OwnerConfig.load(write(canary=canary, chain=[SGD, CLIP, NOISE])), terms(**server))
    assert str(refused.value) == words


@pytest.mark.parametrize("table", [{"clients": "2"}, [2]])
def test_a_table_of_canaries_that_is_none_is_refused(table: Any) -> None:
    with pytest.raises(RequestRefused):
        terms(canaries=table)


def test_an_owner_learns_beforehand_what_makes_no_sense(write: Write) -> None:
    with pytest.raises(SpecError):
        DeployedClient.of(OwnerConfig.load(write(canary=True, chain=[SGD])), terms(**CANARIES))
    with pytest.raises(SpecError):
        OwnerConfig.load(write(canary=True, secure_sum={"group": 3}))
    with pytest.raises(SpecError):
        OwnerConfig.load(write(canary="yes"))
    checked = check_owner(OwnerConfig.load(write(canary=True, chain=[SGD, CLIP, NOISE])))
    assert [(r.name, r.message) for r in checked if r.works is False] == []
