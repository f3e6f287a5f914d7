"""The examples that a client holds, and its batch in a round, as pure functions of the seed.

The training examples are split once by the federation's seed: an auxiliary part (the attacker's public data, in no shard) and the
clients' shards.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.components import Count, Positive
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data_folder import cached
from fedgauge.client.rng import generator, seed_of
from fedgauge.client.update import Batch

Partition = Literal["iid", "dirichlet", "shards", "none"]


@dataclass(frozen=True, eq=False)
class Shards:
    """A dataset split among clients.

    Args:
        dataset: source of the images.
        indices: for each client, its training images.
        auxiliary: indices of the training images that no client holds: what a server may know about the distribution.
        batch_size: examples a client trains on in a round.
        seed: the federation's seed.
        canaries: each client's canary examples, some of them among its training images; empty by default.
    """

    dataset: Dataset
    indices: tuple[Tensor, ...]
    auxiliary: Tensor
    batch_size: int
    seed: int
    canaries: tuple[Tensor, ...] = ()

    def rows_at(self, client: int, round: int) -> Tensor:
        """Return the rows (B,) of a client's batch in a round: batch_size of its shard, without repeats."""
        mine = self.indices[client]
        order = torch.randperm(len(mine), generator=generator(self.seed, "batch", client, round))
        return mine[order[: self.batch_size]]

    def batch_at(self, client: int, round: int) -> Batch:
        """The examples that a client trains on in a round."""
        return batch_of(self.dataset.x, self.dataset.y, self.rows_at(client, round))

    def auxiliary_batch(self) -> Batch:
        """The whole auxiliary split."""
        return batch_of(self.dataset.x, self.dataset.y, self.auxiliary)


def batch_of(x: Tensor, y: Tensor, indices: Tensor) -> Batch:
    """Select examples with their labels; pixels (uint8) become float32 in [0, 1].

    Args:
        x: (N, ...), pixels as uint8, or other examples in their own dtype.
        y: (N, ...) labels.
        indices: (B,) int64, rows of x and y.
    """
    chosen = x[indices]
    return Batch(chosen.float() / 255 if x.dtype == torch.uint8 else chosen, y[indices])


def split(
    dataset: Dataset,
    clients: int,
    seed: int,
    partition: Partition = "iid",
    alpha: Positive = 0.5,
    shards_per_client: Count = 2,
    batch_size: Count = 1,
    auxiliary: Count = 1000,
) -> Shards:
    """Split a dataset's training images among clients, with partitioners from flwr-datasets.

    Args:
        partition: iid; dirichlet (label proportions drawn with concentration alpha); shards (sorted by label, each client
            gets shards_per_client pieces); none (clients hold other examples, as a recorded app's do).
        alpha: of dirichlet, above 0; smaller is more uneven.
        shards_per_client: of shards, at least 1.
        batch_size: examples that a client trains on in a round, at least 1; fewer leak more.
        auxiliary: examples set aside as the attacker's knowledge of the distribution, at least 1; no client holds them.

    Raises:
        ValueError: more clients than examples, or a shard that holds less than one batch.
    """
    if dataset.labelled and not dataset.one_class and partition in ("dirichlet", "shards"):
        raise ValueError(f'partition = "{partition}" needs one class an example: use "iid"')
    total = len(dataset.y)
    order = torch.randperm(total, generator=generator(seed, "split"))
    kept, aside = order[auxiliary:].sort().values, order[:auxiliary].sort().values
    if partition == "none":
        return Shards(dataset, (aside[torch.arange(batch_size) % len(aside)],) * clients, aside, batch_size, seed)
    if total - auxiliary < clients * batch_size:
        raise ValueError(
            f"{dataset.name} has {total} training examples, fewer than auxiliary {auxiliary} and {clients} clients x batch_size "
            f"{batch_size}: lower one of them"
        )
    if partition == "shards" and (pieces := clients * shards_per_client) > len(kept):
        raise ValueError(f"{len(kept)} examples cannot be cut into {pieces} shards: lower shards_per_client")
    labels = dataset.labels[kept].numpy()
    key = (dataset.name, hashlib.sha256(labels.tobytes()).hexdigest(), clients, seed, partition, alpha, batch_size)
    owner = cached(
        "partition-" + hashlib.sha256(repr((*key, shards_per_client)).encode()).hexdigest()[:24],
        lambda: {"owner": _owners(labels, clients, seed, partition, alpha, shards_per_client, batch_size)},
    )["owner"]
    indices = tuple(kept[torch.from_numpy(np.flatnonzero(owner == c))] for c in range(clients))
    if (least := min(map(len, indices))) < batch_size:
        raise ValueError(
            f"a shard has {least} examples, fewer than batch_size {batch_size}: raise alpha, or lower clients"
        )
    return Shards(dataset, indices, aside, batch_size, seed)


def _owners(
    labels: np.ndarray, clients: int, seed: int, partition: Partition, alpha: float, per_client: int, batch_size: int
) -> np.ndarray:
    """For each training image the client that holds it."""
    seed = seed_of(seed, "partition") % 2**32
    owner = np.full(len(labels), -1, dtype=np.int32)
    if partition == "iid":
        for c, rows in enumerate(np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients)):
            owner[rows] = c
        return owner
    import datasets  # seconds to import, and needed only where the partition is not cached yet
    from flwr_datasets import partitioner as partitioners

    if partition == "dirichlet":
        chosen = partitioners.DirichletPartitioner(
            clients, "label", alpha, min_partition_size=batch_size, self_balancing=False, seed=seed
        )
    else:
        chosen = partitioners.ShardPartitioner(clients, "label", num_shards_per_partition=per_client, seed=seed)
    chosen.dataset = datasets.Dataset.from_dict({"label": labels.tolist(), "row": list(range(len(labels)))})
    for c in range(clients):
        owner[np.asarray(chosen.load_partition(c)["row"], dtype=np.int64)] = c
    return owner
