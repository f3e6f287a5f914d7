"""The tensor cache: bounded, whole, and keyed by everything that matters."""

import os
from pathlib import Path

import torch
from torch import nn

from fedgauge.attacks.engine.cache import TensorCache, digest
from fedgauge.attacks.learned.shadow_updates import UpdateFeatures
from fedgauge.attacks.text.learning_to_invert_text import learning_to_invert_text
from fedgauge.client.chain import Chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import resnet20
from fedgauge.client.transforms import GroupMean


def test_the_cache_evicts_the_least_recently_read(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, bound=1000)
    for name in ("a", "b"):
        cache.put(name, {"x": torch.zeros(80)})
    os.utime(tmp_path / "b.safetensors", (1, 1))
    cache.put("c", {"x": torch.ones(80)})
    assert [cache.read(name) is not None for name in "abc"] == [True, False, True]
    cache.put("d", {"x": torch.zeros(1000)})
    assert cache.read("d") is None


def test_damaged_entries_are_computed_again(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path)
    cache.put("a", {"x": torch.zeros(80)})
    path = tmp_path / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    made = cache.get("a", lambda: {"x": torch.ones(2)})
    assert made["x"].tolist() == [1, 1]
    assert cache.get("a", lambda: {})["x"].tolist() == [1, 1]


def test_digests_differ() -> None:
    a = torch.zeros(4)
    different = [a, a.view(2, 2), a.double(), a + 1, {"w": a}, {"v": a}, [a], [a, a], 0, "0", nn.functional.relu]
    assert len({digest(part) for part in different}) == len(different)
    assert digest(a, {"b": a, "a": 1}) == digest(a.clone(), {"a": 1, "b": a})


def test_renamed_classes_keep_their_digests() -> None:
    """Digests seed random streams: these are of the classes' first names."""
    assert digest(UpdateFeatures(True, 5), (1, 2)) == "33bd5cb9d5a28386ec54c00a396bf9b5"
    assert digest(Chain((local_sgd(0.1), GroupMean(2)))) == "e3e781235d18f168281bda75bbe5a3a1"
    assert digest(learning_to_invert_text()) == "f7f2753675f9df048247af932056301e"
    assert digest(str(resnet20((3, 8, 8), 4))) == "085f66909da19d6c523a59e4e77d7a5e"
