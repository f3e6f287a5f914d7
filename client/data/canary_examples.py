"""Canary examples: a fair coin decides for each whether it is among its client's data (Steinke et al., NeurIPS 2023)."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedgauge.client.data.batches import Shards
from fedgauge.client.rng import generator


def with_canary_examples(shards: Shards, clients: Sequence[int], each: int, coins: Tensor) -> Shards:
    """Shards in which some of each client's own examples are canaries, with another label each where examples have one.

    If a canary's coin is heads, it replaces one of the client's other examples; otherwise it is left out. Sizes do not depend on
    the coins, so two data sets differ by one replaced record, like the neighbours of the accounting.

    Args:
        clients: those that get canaries.
        each: canaries of each client.
        coins: (len(clients) * each,) bool, client after client: which are among the data.

    Raises:
        ValueError: a client has too few examples.
    """
    indices, canaries = list(shards.indices), [shards.auxiliary[:0]] * len(shards.indices)
    for client, tossed in zip(clients, coins.split(each), strict=True):
        mine = indices[client]
        if len(mine) - each < max(each, shards.batch_size):
            raise ValueError(f"client {client} holds {len(mine)} examples, which is too few for {each} canaries")
        order = mine[torch.randperm(len(mine), generator=generator(shards.seed, "canary examples", client))]
        canaries[client], others = order[:each], order[each:]
        indices[client] = torch.cat([order[:each].where(tossed, others[:each]), others[each:]])
    dataset, rows = shards.dataset, torch.cat(canaries)
    if dataset.one_class and dataset.classes > 1:
        # the gradient of an example with a wrong label stays large while the others' fade
        y, rng = dataset.y.clone(), generator(shards.seed, "canary labels")
        y[rows] = (y[rows] + torch.randint(1, dataset.classes, rows.shape, generator=rng)) % dataset.classes
        dataset = replace(dataset, y=y)
    return replace(shards, dataset=dataset, indices=tuple(indices), canaries=tuple(canaries))
