"""What benchmarks attack: an untrained network, what a server knows of it, and the updates of clients with a batch each."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge, Observation, Wave
from fedgauge.client.chain import Chain
from fedgauge.client.data.images import Dataset
from fedgauge.client.models.vision import detached_params
from fedgauge.client.update import Batch, UpdateFn

Network = TypeVar("Network", bound=nn.Module)


def untrained(make: Callable[[], Network], seed: int = 0) -> Network:
    """A network in eval mode with the initial weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def known_of(
    model: nn.Module,
    links: Chain,
    data: Dataset,
    batch_size: int = 1,
    auxiliary: Batch | None = None,
    labels: Tensor | None = None,
) -> Knowledge:
    """What the server knows; by default it has no public examples, and restores the labels."""
    return Knowledge(model, links, data.shape, data.classes, batch_size, data.mean, data.std, labels, auxiliary)


def singles(batch: Batch) -> list[Batch]:
    """A batch's examples as batches of one."""
    return [Batch(batch.x[[k]], batch.y[[k]]) for k in range(len(batch.y))]


def observed(known: Knowledge, batches: Sequence[Batch], client: UpdateFn | None = None) -> Wave:
    """The updates of clients that hold a batch each.

    Args:
        client: what they compute; default: what the server takes them to compute.
    """
    params, compute = detached_params(known.model), client or known.forward
    updates = [{name: t.detach() for name, t in compute(params, batch, None).items()} for batch in batches]
    return Wave.stack([Observation(1, k, params, update) for k, update in enumerate(updates)])
