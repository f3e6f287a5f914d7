"""A device that cannot be had ends every command that would attack on it with one sentence, before anything starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger_types import Progress
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import AuditOptions, Scenario
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.run.create import create_run
from tests.simulations.cli.conftest import scenario_file

NO_CUDA = "sees 0 GPUs"


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without CUDA, whatever the tests' own is."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def told(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("fedgauge: [audit] devices: ") and error.count("\n") == 1, error
    return error


def test_run_trains_nothing_for_a_gpu_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scenario_file(tmp_path, audit={"devices": "cuda"})
    assert main(["run", str(path), "--runs", str(tmp_path / "runs")]) == 2
    assert NO_CUDA in told(capsys)
    assert not (tmp_path / "runs").exists()


def test_audit_puts_nothing_into_the_queue_for_a_device_that_is_not_there(
    attacked: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(attacked.folder), "--retry", "all", "--devices", "cuda:0,cuda:1"]) == 2
    assert "cuda:0" in told(capsys)
    with attacked.ledger() as ledger:
        assert ledger.progress() == Progress(done=16)
    assert main(["audit", str(attacked.folder), "--retry", "all", "--devices", "gpu"]) == 2
    assert "'gpu'" in told(capsys)
    assert main(["audit", str(attacked.folder), "--retry", "all", "--devices", "cpu"]) == 0
    with attacked.ledger() as ledger:
        assert ledger.devices()


@pytest.mark.parametrize(
    "audit", [{"executor": "local", "devices": "cuda"}, {"devices": ["cuda:0"]}, {"devices": "gpu"}]
)
def test_deploy_writes_no_folder_for_devices_that_its_workers_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], audit: dict[str, object]
) -> None:
    path = scenario_file(tmp_path, audit=audit)
    assert main(["deploy", "init", str(tmp_path / "made"), "--clients", "2", "--scenario", str(path)]) == 2
    assert told(capsys) and not (tmp_path / "made").exists()


def test_a_deployment_has_its_clusters_gpus_and_no_single_ones(tmp_path: Path) -> None:
    path = scenario_file(tmp_path, audit={"devices": "cuda"})
    Deployment.create(tmp_path / "all", 2, scenario=path).begin("in containers, which have them")
    path = scenario_file(tmp_path, audit={"devices": ["cuda:0"]})
    with pytest.raises(SpecError):
        Deployment.create(tmp_path / "one", 2, scenario=path)


@pytest.mark.parametrize(("devices", "audit", "wave"), [("cuda", {}, 64), ("cuda", {"wave": 5}, 5), ("cpu", {}, 8)])
def test_waves_are_of_a_size_for_the_devices(
    make_scenario: Callable[..., Scenario],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    devices: str,
    audit: dict[str, Any],
    wave: int,
) -> None:
    monkeypatch.setattr(AuditOptions, "devices_here", lambda _: [torch.device(devices)])
    run = create_run(make_scenario(audit={"executor": "local", **audit}), tmp_path / "run")
    assert run.scenario().plan.wave == wave
