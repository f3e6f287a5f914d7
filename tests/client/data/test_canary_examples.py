"""Canary examples: the coins alone say which are among the data, and sizes do not tell."""

import pytest
import torch
from torch import Tensor

from fedgauge.client.data.batches import Shards, split
from fedgauge.client.data.canary_examples import with_canary_examples
from fedgauge.client.data.dataset import Dataset

CLIENTS, EACH = (1, 2), 3


def dataset(count: int = 90) -> Dataset:
    x = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1)
    return Dataset("numbers", x, torch.arange(count) % 5, x[:5], torch.arange(5), 5, (0.5,), (0.5,))


def planted(coins: Tensor) -> tuple[Shards, Shards]:
    before = split(dataset(), 3, seed=4, batch_size=2, auxiliary=30)
    return before, with_canary_examples(before, CLIENTS, EACH, coins)


def test_a_coin_says_whether_the_client_holds_a_canary() -> None:
    coins = torch.tensor([True, False, True, False, False, True])
    before, after = planted(coins)
    for place, client in enumerate(CLIENTS):
        held = torch.isin(after.canaries[client], after.indices[client])
        assert held.tolist() == coins[place * EACH : (place + 1) * EACH].tolist()
        assert torch.isin(after.canaries[client], before.indices[client]).all()
        assert len(after.indices[client]) == len(before.indices[client]) - EACH == len(after.indices[client].unique())
        assert torch.isin(after.indices[client], before.indices[client]).all()
    everybody = torch.cat([*after.indices, after.auxiliary])
    assert not torch.isin(torch.cat(after.canaries)[~coins], everybody).any(), "nobody holds it"
    assert torch.equal(after.indices[0], before.indices[0]) and not len(after.canaries[0])


def test_two_coins_replace_one_record() -> None:
    coins = torch.zeros(6, dtype=torch.bool)
    _, without = planted(coins)
    coins[4] = True
    _, beside = planted(coins)
    changed = without.indices[2] != beside.indices[2]
    assert int(changed.sum()) == 1 and beside.indices[2][changed].tolist() == [int(beside.canaries[2][1])]
    assert torch.equal(without.indices[1], beside.indices[1])
    assert all(torch.equal(a, b) for a, b in zip(without.canaries, beside.canaries, strict=True))
    assert torch.equal(without.dataset.y, beside.dataset.y)


def test_a_canary_has_another_label_and_nobody_else_has() -> None:
    before, after = planted(torch.ones(6, dtype=torch.bool))
    changed = torch.nonzero(before.dataset.y != after.dataset.y).flatten()
    assert changed.tolist() == torch.cat(after.canaries).sort().values.tolist()
    assert 0 <= int(after.dataset.y.min()) <= int(after.dataset.y.max()) < 5
    assert torch.equal(before.dataset.y, dataset().y)


def test_too_few_examples_are_refused() -> None:
    shards = split(dataset(), 3, seed=4, batch_size=2, auxiliary=30)  # 20 of each client
    with_canary_examples(shards, CLIENTS, 10, torch.ones(20, dtype=torch.bool))
    whole = split(dataset(), 3, seed=4, batch_size=18, auxiliary=30)
    for among, each, named in ((shards, 11, "client 1 "), (whole, 3, "few")):
        with pytest.raises(ValueError, match=named):
            with_canary_examples(among, CLIENTS, each, torch.ones(2 * each, dtype=torch.bool))
