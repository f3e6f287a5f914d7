"""The private data: real, split without overlap, and pure in the seed."""

import gzip
import io
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgauge.client import data_folder
from fedgauge.client.components import SpecError, call, check_arguments
from fedgauge.client.data import images
from fedgauge.client.data.batches import Partition, batch_of, split
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data_folder import cache_folder
from fedgauge.client.rng import seed_of
from tests.client.data.refusals import refused

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return images.mnist5k()


def toy(n: int = 400, classes: int = 5) -> Dataset:
    """n one-pixel images that carry their own number, labels drawn unevenly."""
    numbers = torch.arange(n)
    x = torch.stack([numbers % 256, numbers // 256], 1).to(torch.uint8).view(n, 2, 1, 1)
    y = torch.randint(classes, (n,), generator=torch.Generator().manual_seed(1))
    return Dataset("toy", x, y, x[:0], y[:0], classes, (0.0, 0.0), (1.0, 1.0))


def numbers_of(x: torch.Tensor) -> list[int]:
    return [int(v) for v in (x[:, 0, 0, 0] * 255).round() + 256 * (x[:, 1, 0, 0] * 255).round()]


# ------------------------------------------------------------------------------------------------------------ mnist5k


def test_mnist5k_is_five_thousand_digits(digits: Dataset) -> None:
    assert images.mnist5k() is digits, "unpacked once for all federations of a process"
    assert digits.x.shape == (4000, 1, 28, 28)
    assert digits.x_test.shape == (1000, 1, 28, 28)
    assert digits.x.dtype == torch.uint8
    assert digits.y.dtype == torch.int64
    assert digits.shape == (1, 28, 28)
    assert torch.cat([digits.y, digits.y_test]).bincount().tolist() == [500] * 10
    # every class stands in the test part, which a sorted file would not give
    assert digits.y_test.bincount(minlength=10).min() > 60


def test_mnist5k_is_mnist(digits: Dataset, local_file: Callable[[str], Path]) -> None:
    local_file("mnist")
    whole = images.mnist()
    label_of = {
        t.numpy().tobytes(): int(y)
        for x, labels in ((whole.x, whole.y), (whole.x_test, whole.y_test))
        for t, y in zip(x, labels, strict=True)
    }
    for x, labels in ((digits.x, digits.y), (digits.x_test, digits.y_test)):
        assert [label_of.get(t.numpy().tobytes()) for t in x] == labels.tolist()


def test_normalisation_gives_mnist_mean_zero_and_variance_one(local_file: Callable[[str], Path]) -> None:
    local_file("mnist")
    mnist = images.mnist()
    assert (mnist.x.shape, mnist.x_test.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert mnist.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]  # the best known labels of the field
    z = mnist.normalise(mnist.x.float() / 255)
    assert abs(float(z.double().mean())) < 1e-3
    assert abs(float(z.double().std()) - 1) < 1e-3


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_local_cifar_is_read(local_file: Callable[[str], Path], name: str, classes: int) -> None:
    local_file(f"{name}-t*.npz")
    cifar = getattr(images, name)()
    for x, y in ((cifar.x, cifar.y), (cifar.x_test, cifar.y_test)):
        assert x.shape[1:] == (3, 32, 32)
        assert len(x) == len(y) > 900
        assert int(y.min()) >= 0
        assert int(y.max()) < classes
    if name == "cifar10":
        assert cifar.y_test[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]  # cat, ship, ship, airplane, frog ...
        assert len(cifar.names) == classes and (cifar.names[0], cifar.names[9]) == ("aeroplane", "lorry")
    z = cifar.normalise(cifar.x.float() / 255).double()
    assert z.mean((0, 2, 3)).abs().max() < 0.05, "the published mean is of all 50,000 images"
    assert (z.std((0, 2, 3)) - 1).abs().max() < 0.05


def test_normalise_acts_per_channel() -> None:
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    nothing = torch.zeros(0)
    dataset = Dataset("d", torch.zeros(1, 3, 2, 2), nothing, nothing, nothing, 2, mean, std)
    x = torch.rand(4, 5, 3, 2, 2, dtype=torch.float64)
    z = dataset.normalise(x)
    assert z.dtype == torch.float64
    for c in range(3):
        torch.testing.assert_close(z[:, :, c], (x[:, :, c] - mean[c]) / std[c])


# ---------------------------------------------------------------------------------------------------------- the split


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    clients=st.integers(1, 9),
    partition=st.sampled_from(["iid", "dirichlet", "shards"]),
    auxiliary=st.integers(1, 100),
    batch_size=st.integers(1, 3),
)
def test_nobody_shares_an_image(seed: int, clients: int, partition: Partition, auxiliary: int, batch_size: int) -> None:
    shards = split(toy(), clients, seed, partition, alpha=2.0, batch_size=batch_size, auxiliary=auxiliary)
    parts = [*shards.indices, shards.auxiliary]
    everyone = torch.cat(parts)
    assert len(everyone.unique()) == len(everyone), "parts overlap"
    assert len(shards.indices) == clients
    assert len(shards.auxiliary) == auxiliary
    # equal pieces of a sorted list may leave a rest smaller than the number of pieces; the others leave none
    rest = 400 - len(everyone)
    assert rest == 0 if partition != "shards" else 0 <= rest < 2 * clients
    assert min(map(len, shards.indices)) >= batch_size
    assert len(shards.auxiliary_batch().x) == auxiliary


@pytest.mark.parametrize("clients", [1, 3, 7])
def test_iid_shards_are_those_of_flwr_datasets(clients: int) -> None:
    import datasets
    from flwr_datasets.partitioner import IidPartitioner

    rows = np.random.default_rng(seed_of(5, "partition") % 2**32).permutation(300)
    theirs = IidPartitioner(num_partitions=clients)
    theirs.dataset = datasets.Dataset.from_dict({"row": rows.tolist()})
    shards = split(toy(), clients, 5, "iid", auxiliary=100)
    kept = torch.cat(shards.indices).sort().values
    for c, mine in enumerate(shards.indices):
        assert torch.equal(mine, kept[torch.tensor(theirs.load_partition(c)["row"]).sort().values])


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards"])
def test_a_split_is_a_function_of_its_seed(
    partition: Partition, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = split(toy(), 4, 5, partition, auxiliary=100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the second time nothing is remembered
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    again = split(toy(), 4, 5, partition, auxiliary=100)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert all(torch.equal(a, b) for a, b in zip(first.indices, again.indices, strict=True))
    other = split(toy(), 4, 6, partition, auxiliary=100)
    assert not all(torch.equal(a, b) for a, b in zip(first.indices, other.indices, strict=True))
    assert not torch.equal(first.auxiliary, other.auxiliary)


@pytest.mark.parametrize("field", ["x", "y", "x_test", "y_test"])
def test_what_is_no_tensor_is_named(field: str) -> None:
    data = toy()
    with pytest.raises(ValueError, match="y of x_test" if field == "y_test" else field):
        replace(data, **{"x_test": data.x, "y_test": data.y, field: getattr(data, field).numpy()}).check()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"auxiliary": 0}, "auxiliary"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"shards_per_client": 0}, "shards_per_client"),
        ({"shards_per_client": 151, "partition": "shards"}, "302 shards"),
        ({"clients": 301}, "301 clients"),
        ({"clients": 4, "batch_size": 76}, "batch_size 76"),
        ({"auxiliary": 500}, "auxiliary 500"),
        ({"clients": 30, "partition": "dirichlet", "alpha": 1e-6}, "alpha"),
        # 299 images in 2 x 3 pieces are pieces of 49, so a client has 98 where 99 were asked for
        ({"clients": 3, "partition": "shards", "batch_size": 99, "auxiliary": 101}, "98 examples"),
    ],
)
@pytest.mark.filterwarnings("ignore:The specified min_partition_size:UserWarning")  # its ten attempts
def test_an_impossible_split_is_refused(arguments: dict[str, Any], name: str) -> None:
    given = {"dataset": toy(), "seed": 0, "clients": arguments.pop("clients", 2)}
    with pytest.raises(SpecError, match=name):
        call(split, check_arguments(split, {"auxiliary": 100, **arguments}, "[data]", given), "[data]")


@pytest.mark.parametrize("auxiliary", [3, 1000])
def test_where_clients_hold_other_examples_each_row_is_public_once(auxiliary: int) -> None:
    x, y = torch.zeros(10, 1, 2, 2, dtype=torch.uint8), torch.arange(10)
    dataset = Dataset("ten", x, y, x, y, 10, (0.0,), (1.0,))
    shards = split(dataset, clients=4, seed=0, partition="none", batch_size=12, auxiliary=auxiliary)
    assert len(shards.auxiliary) == len(set(shards.auxiliary.tolist())) == min(auxiliary, 10)
    assert all(len(rows) == 12 and set(rows.tolist()) <= set(shards.auxiliary.tolist()) for rows in shards.indices)


def test_exactly_enough_is_split() -> None:
    shards = split(toy(), 3, 0, "shards", batch_size=100, auxiliary=100)
    assert [len(i) for i in shards.indices] == [100] * 3


# -------------------------------------------------------------------------------------------------------- the batches


def test_a_batch_is_a_function_of_seed_client_and_round() -> None:
    def batch(seed: int, client: int, round: int) -> list[int]:
        return numbers_of(split(toy(), 3, seed, batch_size=5, auxiliary=100).batch_at(client, round).x)

    assert batch(0, 1, 2) == batch(0, 1, 2)
    different = [tuple(batch(*at)) for at in ((0, 1, 2), (0, 1, 3), (0, 2, 2), (1, 1, 2))]
    assert len(set(different)) == 4


def test_a_batch_is_float_pixels_between_zero_and_one(digits: Dataset) -> None:
    batch = split(digits, 2, 0, batch_size=8).batch_at(0, 1)
    assert batch.x.dtype == torch.float32
    assert batch.y.dtype == torch.int64
    assert (float(batch.x.min()), float(batch.x.max())) == (0.0, 1.0)
    dark = batch_of(torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8), torch.tensor([3]), torch.tensor([0]))
    assert dark.x.flatten().tolist() == pytest.approx([0.0, 0.2, 1.0])


# ----------------------------------------------------------------------------------------------------- files and cache


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(header + array.tobytes())


def write_idx(folder: Path, x: np.ndarray, y: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("train", "t10k"):
        (folder / f"{kind}-images-idx3-ubyte.gz").write_bytes(idx(x))
        (folder / f"{kind}-labels-idx1-ubyte.gz").write_bytes(idx(y))
        x, y = x[:1] + 1, y[:1]


def test_idx_files_are_read(no_local_data: Path) -> None:
    x = np.arange(2 * 300 * 3, dtype=np.int64).astype(np.uint8).reshape(2, 300, 3)  # a size above 255 needs two bytes
    write_idx(no_local_data / "fashion_mnist", x, np.array([7, 2], dtype=np.uint8))
    dataset = images.fashion_mnist()
    assert dataset.x.shape == (2, 1, 300, 3)
    assert np.array_equal(dataset.x[:, 0].numpy(), x)
    assert np.array_equal(dataset.x_test[:, 0].numpy(), x[:1] + 1)
    assert (dataset.y.tolist(), dataset.y_test.tolist()) == ([7, 2], [7])


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "not gzip", "short"])
def test_a_damaged_idx_file_is_named(no_local_data: Path, damage: str) -> None:
    folder = no_local_data / "mnist"
    write_idx(folder, np.zeros((2, 4, 4), dtype=np.uint8), np.zeros(2, dtype=np.uint8))
    path = folder / "train-images-idx3-ubyte.gz"
    raw = path.read_bytes()
    damaged = {
        "truncated": raw[:-12],
        "flipped": raw[:15] + bytes([raw[15] ^ 0xFF, raw[16] ^ 0xFF]) + raw[17:],
        "not gzip": b"<html>404</html>",
        "short": gzip.compress(gzip.decompress(raw)[:-1]),
    }
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(damaged[damage])
    refused(str(path), use="mnist")


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def test_npz_files_are_read(no_local_data: Path) -> None:
    x = np.arange(3 * 4 * 5 * 3).astype(np.uint8).reshape(3, 4, 5, 3)
    for part in ("train", "test"):
        (no_local_data / f"cifar10-{part}-few.npz").write_bytes(npz(images=x, labels=np.array([1, 2, 3])))
    dataset = images.cifar10()
    assert dataset.shape == (3, 4, 5)
    assert np.array_equal(dataset.x[1].numpy(), x[1].transpose(2, 0, 1))
    assert dataset.y_test.tolist() == [1, 2, 3]


@pytest.mark.parametrize("damage", ["empty", "no labels", "pickle"])
def test_a_damaged_npz_file_is_reported(no_local_data: Path, damage: str, make_federation: Make) -> None:
    x = np.zeros((1, 32, 32, 3), dtype=np.uint8)
    raw = {"empty": b"", "no labels": npz(images=x), "pickle": npz(images=x, labels=np.array([{}], dtype=object))}
    for part in ("train", "test"):
        (no_local_data / f"cifar10-{part}-few.npz").write_bytes(raw[damage])
    with pytest.raises(SpecError):
        make_federation(data={"use": "cifar10"}).check()


NOWHERE = "http://127.0.0.1:9/"  # nothing listens there: refused at once, and nothing is ever downloaded by a test


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist"])
def test_a_download_that_fails_says_what_to_do(
    no_local_data: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_federation: Make
) -> None:
    import torchvision

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for kind in (torchvision.datasets.CIFAR10, torchvision.datasets.CIFAR100):
        monkeypatch.setattr(kind, "url", NOWHERE)
    for kind in (torchvision.datasets.MNIST, torchvision.datasets.FashionMNIST):
        monkeypatch.setattr(kind, "mirrors", [NOWHERE])
    with pytest.raises(SpecError):
        make_federation(data={"use": name}).check()


def test_downloaded_files_read_like_local_ones(
    no_local_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The archives lie where torchvision would put them: it unpacks and reads them, and asks no mirror."""
    import torchvision

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = cache_folder() / "torchvision" / "MNIST" / "raw"
    write_idx(source, np.arange(2 * 28 * 28).astype(np.uint8).reshape(2, 28, 28), np.array([7, 2], dtype=np.uint8))
    unchecked = [(name, None) for name, _ in torchvision.datasets.MNIST.resources]  # their md5 is the real MNIST's
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", unchecked)
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [NOWHERE])
    downloaded = images.mnist()
    (no_local_data / "mnist").symlink_to(source)
    local = images.mnist()
    for part in ("x", "y", "x_test", "y_test"):
        a, b = getattr(downloaded, part), getattr(local, part)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), part


def test_the_data_folder_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDGAUGE_DATA", str(tmp_path))
    assert data_folder.data_folder() == tmp_path
    monkeypatch.setenv("FEDGAUGE_DATA", str(tmp_path / "absent"))
    with pytest.raises(SpecError):
        data_folder.data_folder()
    monkeypatch.delenv("FEDGAUGE_DATA")
    beside = Path(data_folder.__file__).resolve().parents[2] / "shared" / "data"
    assert data_folder.data_folder() == (beside if beside.is_dir() else None)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedgauge"


def test_a_kept_array_is_made_once(own_cache: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        return {"a": np.arange(5)}

    results = [data_folder.cached("thing", make) for _ in range(3)]
    assert len(made) == 1
    assert all(r["a"].tolist() == [0, 1, 2, 3, 4] for r in results)
    assert [p.name for p in own_cache.iterdir()] == ["thing.npz"], "no scratch file is left"
