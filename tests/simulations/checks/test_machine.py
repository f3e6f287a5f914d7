"""What the doctor says of this machine."""

import pytest
import torch

from fedgauge.attacks.engine import devices
from fedgauge.simulations.checks import machine
from fedgauge.simulations.checks.check_result import CheckResult
from fedgauge.simulations.checks.machine import gpus
from tests.separate_device import separate_device

# ------------------------------------------------------------------------------------------------------------ GPUs


def with_driver(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for module in (devices, machine):
        monkeypatch.setattr(module, "driver", lambda: version)


def test_a_machine_without_a_gpu_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (found,) = gpus()
    assert (found.name, found.works, found.needed) == ("GPU", None, False) and "CPU" in found.message


@pytest.mark.parametrize("built", [False, True])
def test_a_driver_whose_gpu_torch_does_not_see_is_named(monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    with_driver(monkeypatch, "550.54.15")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (found,) = gpus()
    assert (found.works, found.needed) == (False, False)
    assert "550.54.15" in found.message and ("CUDA_VISIBLE_DEVICES" if built else torch.__version__) in found.message


def test_each_gpu_is_reported_with_its_free_memory_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, "550.54.15")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    with separate_device() as device:
        monkeypatch.setattr(machine, "devices_of", lambda wanted: [device])
        (found,) = gpus()
    assert found == CheckResult("GPU lazy:0", True, False, "NVIDIA H100, 60.0 of 80.0 GiB free, driver 550.54.15")
