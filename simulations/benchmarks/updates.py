"""The updates that benchmarks attack: of an untrained network, from clients with a batch each."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from fedgauge.attacks.base import Knowledge, Observation, Wave
from fedgauge.client.models.vision import detached_params
from fedgauge.client.update import Batch

Network = TypeVar("Network", bound=nn.Module)


def untrained(make: Callable[[], Network], seed: int = 0) -> Network:
    """Return a network in eval mode with the initial weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def singles(batch: Batch) -> list[Batch]:
    """Return a batch's examples as batches of one."""
    return [Batch(batch.x[[k]], batch.y[[k]]) for k in range(len(batch.y))]


def observed(known: Knowledge, batches: Sequence[Batch]) -> Wave:
    """Return the updates of clients that hold a batch each."""
    params = detached_params(known.model)
    updates = [{name: t.detach() for name, t in known.forward(params, batch, None).items()} for batch in batches]
    return Wave.stack([Observation(1, k, params, update) for k, update in enumerate(updates)])
