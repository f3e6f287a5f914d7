"""The owner's file: what it may say, and what a mistake in it is refused with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedgauge.client.components import SpecError
from fedgauge.client.deployment.deployed_client import DeployedClient
from fedgauge.client.deployment.owner_file import Draw, GradingPolicy, OwnerConfig
from tests.client.deployment.conftest import DATA, SGD, Write, terms


def test_a_short_file_means_the_careful_choice(write: Write, tmp_path: Path) -> None:
    owner = OwnerConfig.load(write())
    assert (owner.draw, owner.grading, owner.guard) == (Draw(4, False, "secret"), GradingPolicy("off"), None)
    assert (owner.allow, owner.updates, owner.canary) == ((), None, False)
    assert owner.state == tmp_path / "state", "paths are relative to the file"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"clients": 3}, "clients"),
        ({"chain": None}, "chain"),
        ({"client": -1}, "client"),
        ({"client": "0"}, "client"),
        ({"split": {"alpha": 1.0}}, "unknown key 'split'"),
        ({"updates": 0}, "updates"),
        ({"max_parameters": 0}, "max_parameters"),
        ({"data": {**DATA, "sampling": "open"}}, "sampling"),
        ({"data": {**DATA, "batch_size": 0}}, "batch_size"),
        ({"data": {**DATA, "whole": True}}, "whole"),
        ({"grading": {"mode": "all"}}, "mode"),
        ({"grading": {"modus": "off"}}, "modus"),
        ({"grading": {"precision": 0.0}}, "precision"),
        ({"grading": {"precision": 61.0}}, "precision"),
        ({"grading": {"queries": 0}}, "queries"),
        ({"guard": {"max_norm": -1.0}}, "max_norm"),
        ({"guard": {"norm": 1.0}}, "norm"),
        ({"guard": {"inspect": "shout"}}, "inspect"),
        ({"allow": "mine"}, "allow"),
    ],
)
def test_a_mistake_is_named_with_the_file(write: Write, changes: Any, name: str) -> None:
    with pytest.raises(SpecError, match=rf"client.toml: .*{name}"):
        OwnerConfig.load(write(**changes))


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("client = = 1")
    for name in ("none.toml", "bad.toml", ""):
        with pytest.raises(SpecError, match=str(tmp_path / name)):
            OwnerConfig.load(tmp_path / name)


@pytest.mark.parametrize(
    "changes", [{"chain": [{**SGD, "rat": 1.0}]}, {"data": {**DATA, "pixels": 3}}], ids=["chain", "data"]
)
def test_a_mistake_in_a_component_names_the_owners_file(write: Write, changes: Any) -> None:
    path = write(**changes)
    with pytest.raises(SpecError):
        DeployedClient.of(OwnerConfig.load(path), terms())


@pytest.mark.parametrize(("key", "value"), [("classes", 2), ("mean", [0.5, 0.5]), ("std", [0.0])])
def test_data_that_nobody_can_train_on_is_refused(write: Write, tmp_path: Path, key: str, value: Any) -> None:
    np.savez(tmp_path / "own.npz", x=np.arange(24, dtype=np.uint8).reshape(6, 2, 2), y=np.arange(6) % 3)
    data = {"use": "npz", "path": "own.npz", "classes": 3, "mean": [0.5], "std": [0.5], "whole": True}
    assert OwnerConfig.load(write(data=data)).dataset.classes == 3
    with pytest.raises(SpecError):
        _ = OwnerConfig.load(write(data={**data, key: value})).dataset
