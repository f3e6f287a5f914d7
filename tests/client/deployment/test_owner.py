"""The owner's file: what it may say, and what a mistake in it is refused with."""

from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.client.deployment.deployed_client import DeployedClient
from fedgauge.client.deployment.owner import OwnerConfig
from tests.client.deployment.conftest import DATA, SGD, Write, terms


def test_a_short_file_means_the_careful_choice(write: Write, tmp_path: Path) -> None:
    owner = OwnerConfig.load(write())
    assert (owner.sampling, owner.whole, owner.grading.mode, owner.guard, owner.allow) == (
        "secret",
        False,
        "off",
        None,
        frozenset(),
    )
    assert owner.state == tmp_path / "state", "paths are relative to the file"


MISTAKES = [
    ({"clients": 3}, "unknown key 'clients' (an owner's file has: client, state, allow, data, loss, chain"),
    ({"chain": None}, "the owner's file needs 'chain'"),
    ({"client": -1}, "client must lie in 0..99999, got -1"),
    ({"client": "0"}, "client must be a whole number, got '0'"),
    ({"data": {**DATA, "sampling": "open"}}, "[data]: sampling must be one of 'secret', 'agreed', got 'open'"),
    ({"data": {**DATA, "batch_size": 0}}, "[data]: batch_size must be at least 1, got 0"),
    (
        {"data": {**DATA, "whole": True}},
        "[data]: auxiliary divides data that clients share; whole = true",
    ),
    ({"grading": {"mode": "all"}}, "[grading]: mode must be one of 'off', 'scores', got 'all'"),
    ({"grading": {"modus": "off"}}, "[grading]: unknown key 'modus' (it has: mode, precision, queries)"),
    ({"grading": {"precision": 0.0}}, "[grading]: precision must be above 0 and at most 60 dB, got 0.0"),
    ({"grading": {"precision": 61.0}}, "[grading]: precision must be above 0 and at most 60 dB, got 61.0"),
    ({"grading": {"queries": 0}}, "[grading]: queries must be at least 1, got 0"),
    ({"guard": {"max_norm": -1.0}}, "[guard]: max_norm must be above 0, got -1.0"),
    (
        {"guard": {"norm": 1.0}},
        "[guard]: unknown key 'norm' (it has: max_norm, audit, iterations, seconds, threshold, inspect, architecture, "
        "examples)",
    ),
    ({"allow": "mine"}, "allow must be a list, each a text, got 'mine'"),
]


@pytest.mark.parametrize(("changes", "words"), MISTAKES, ids=[str(c) for c, _ in MISTAKES])
def test_a_mistake_is_told_with_the_file_and_what_is_allowed(write: Write, changes: Any, words: str) -> None:
    path = write(**changes)
    with pytest.raises(SpecError) as told:
        OwnerConfig.load(path)
    assert str(told.value).startswith(f"{path}: {words}")


def test_a_file_that_is_missing_or_no_toml_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no such file"):
        OwnerConfig.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("client = = 1")
    with pytest.raises(SpecError, match="bad.toml: not a readable TOML file"):
        OwnerConfig.load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    "changes", [{"chain": [{**SGD, "rat": 1.0}]}, {"data": {**DATA, "pixels": 3}}], ids=["chain", "data"]
)
def test_a_mistake_in_a_component_names_the_owners_file(write: Write, changes: Any) -> None:
    path = write(**changes)
    with pytest.raises(SpecError, match="client.toml: .*has no argument"):
        DeployedClient.of(OwnerConfig.load(path), terms())
