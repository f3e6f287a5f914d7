"""Canaries send their direction, as far as the clip allows, whatever they hold; what makes no sense is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.membership.one_run import guess_bound
from fedgauge.client.components import SpecError, Table
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import CanaryOptions, Protocol
from fedgauge.client.update import Update

SGD: Table = {"use": "local_sgd", "rate": 0.5}
CLIP: Table = {"use": "clip", "max_norm": 0.3}
SILENT: Table = {
    "use": "gaussian",
    "sigma": 1e-9,
}  # noise, so that canaries make sense, too small to change what is seen
# by how much a canary's update is longer than the clip: a gradient's bound is multiplied by the rate, in each step
CHAINS: dict[str, tuple[list[Table], float]] = {
    "the update": ([SGD, CLIP, SILENT], 1.0),
    "each gradient": ([{**CLIP, "each": True}, SILENT, SGD], 0.5),
    "the mean gradient, in three steps": ([CLIP, SILENT, {**SGD, "steps": 3}], 1.5),
    "dp_sgd": ([{"use": "dp_sgd", "max_norm": 0.3, "noise_multiplier": 1e-9}, SGD], 0.5),
    "behind other links": ([{"use": "mask", "keep": 1.0}, SGD, {"use": "prune", "keep": 1.0}, CLIP, SILENT], 1.0),
}


def federation(chain: list[Table], canaries: Any = None, clients: int = 4, **tables: Any) -> Federation:
    table = {"canaries": {"clients": 2} if canaries is None else canaries}
    data = {"use": "mnist5k", "batch_size": 2, "auxiliary": 20}
    small = {"rounds": 2, "clients": clients, "data": data, "model": {"use": "mlp", "hidden": [8]}, "chain": chain}
    return Federation(Protocol.from_tables(small | table | tables)).check()


def flat(update: Update) -> Tensor:
    return torch.cat([t.flatten() for t in update.values()]).double()


@pytest.mark.parametrize("name", CHAINS)
def test_a_canary_sends_its_direction_as_far_as_the_clip_allows(name: str) -> None:
    chain, longer = CHAINS[name]
    fed = federation(chain)
    params, buffers = fed.initial()
    for client in (2, 3):
        expected = 0.3 * longer * flat(fed.direction(client))
        for round in (1, 2):
            sent = flat(fed.own_update(params, buffers, client, round))
            assert torch.allclose(sent, expected, atol=1e-6), name
    between = torch.dot(flat(fed.direction(2)), flat(fed.direction(3)))
    assert abs(float(between)) < 5 / len(flat(params)) ** 0.5  # five standard deviations of chance


def test_the_others_train_as_without_canaries() -> None:
    chain = [SGD, CLIP, {"use": "gaussian", "sigma": 0.1}]
    fed, without = federation(chain), federation(chain, canaries={"clients": 3})
    params, buffers = fed.initial()
    assert torch.equal(flat(fed.own_update(params, buffers, 0, 1)), flat(without.own_update(params, buffers, 0, 1)))
    assert not torch.equal(flat(fed.own_update(params, buffers, 1, 1)), flat(without.own_update(params, buffers, 1, 1)))


def test_the_protocol_carries_them_to_clients() -> None:
    fed = federation([SGD, CLIP, SILENT])
    again = Protocol.from_json(fed.protocol.to_json())
    assert again.canaries == CanaryOptions(2) and list(again.canary_clients) == [2, 3]
    assert list(Protocol.from_tables({**WITHOUT}).canary_clients) == []


def test_fewer_than_six_canary_examples_are_refused_with_the_number_needed() -> None:
    with pytest.raises(SpecError, match="examples = 2"):
        federation([SGD, CLIP, SILENT], canaries={"clients": 3, "examples": 1})
    federation([SGD, CLIP, SILENT], canaries={"clients": 3, "examples": 2})
    five, six = (guess_bound(torch.ones(n) - 0.5, torch.ones(n) > 0, 0.0).epsilon for n in (5, 6))
    assert five == 0 < six


def test_clients_with_canary_examples_train_on_them() -> None:
    """All four may: they have updates like others, of shards that lack as many examples as each has canaries."""
    fed = federation([SGD, CLIP, SILENT], canaries={"clients": 4, "examples": 20})
    again = Protocol.from_json(fed.protocol.to_json())
    assert again.canaries == CanaryOptions(4, 20) and torch.equal(again.coins, fed.protocol.coins)
    assert 20 < int(again.coins.sum()) < 60 and len(again.coins) == 80
    assert {len(mine) for mine in fed.shards.indices} == {975} and {len(c) for c in fed.shards.canaries} == {20}
    params, buffers = fed.initial()
    sent = flat(fed.own_update(params, buffers, 3, 1))
    other = fed.update_fn()(params, fed.shards.batch_at(3, 1), None)
    assert torch.allclose(sent, flat(other), atol=1e-6), "an update of its batch, not a direction"
    held = [int(torch.isin(c, mine).sum()) for c, mine in zip(fed.shards.canaries, fed.shards.indices, strict=True)]
    assert held == fed.protocol.coins.view(4, 20).sum(1).tolist()


WITHOUT: Table = {"rounds": 1, "clients": 2, "data": {"use": "mnist5k"}, "model": {"use": "mlp"}, "chain": [SGD]}


FITTING = [SGD, CLIP, SILENT]


@pytest.mark.parametrize(
    ("chain", "canaries"),
    [
        ([SGD], None),
        ([SGD, SILENT, CLIP], None),
        ([SGD], {"clients": 2, "examples": 2}),
        (FITTING, {"clients": 1}),
        (FITTING, {"clients": 4}),
        (FITTING, {}),
        (FITTING, {"clients": 0, "examples": 2}),
        (FITTING, {"clients": 5, "examples": 2}),
        (FITTING, {"clients": 2, "examples": -1}),
        (FITTING, {"clients": 2, "examples": 600}),
        (FITTING, {"clients": 2, "size": 3}),
        (FITTING, [2]),
    ],
)
def test_invalid_settings_are_refused(chain: list[Table], canaries: Any) -> None:
    with pytest.raises(SpecError):
        federation(chain, canaries)
