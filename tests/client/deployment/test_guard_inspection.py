"""A guard that inspects: what the owner's file names, and what the client's folder remembers."""

from pathlib import Path

import torch
from torch import Tensor

from fedgauge.client.deployment.owner_file import GuardPolicy, OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder
from fedgauge.client.inspection.policy import FIRST_NETWORK, InspectionPolicy
from fedgauge.client.models.vision import convnet, detached_params


def network() -> convnet:
    torch.manual_seed(0)
    return convnet((3, 9, 9), 5, width=8)


def swapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: t.flip(0) if k.startswith("linear") else t for k, t in state.items()}


def owner(guard: str) -> OwnerConfig:
    text = f'client = 0\n[data]\nuse = "mnist5k"\n[[chain]]\nuse = "local_sgd"\nrate = 0.1\n{guard}'
    return OwnerConfig.parse(text, Path("owner.toml"))


def test_an_owners_file_names_mode_and_network() -> None:
    mine = owner('[guard]\ninspect = "refuse"\narchitecture = "ab"').guard
    assert mine == GuardPolicy("refuse", "ab")


def test_an_owners_folder_remembers_one_run_and_the_first_network(tmp_path: Path) -> None:
    state, inspection_policy, run = (
        ClientFolder(tmp_path),
        InspectionPolicy("refuse"),
        2**64 - 1,
    )  # Flower's numbers have 64 bits
    model = network()
    params = detached_params(model)
    with state.inspection_memory(run) as memory:
        assert not inspection_policy.findings(model, params, 1, memory).alarms
    with state.inspection_memory(run) as memory:
        assert inspection_policy.findings(model, swapped(params), 2, memory).alarms
    with state.inspection_memory(run - 1) as memory:
        assert memory.keys() == {FIRST_NETWORK}
        assert not inspection_policy.findings(model, swapped(params), 1, memory).alarms, (
            "another federation begins elsewhere"
        )
    assert (tmp_path / "inspected.safetensors").stat().st_mode & 0o077 == 0
