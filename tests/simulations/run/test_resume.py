"""`fedgauge run --resume`: what was killed goes on, by the real thing; what cannot go on is told in a sentence."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.client.components import allowing
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run import in_memory, processes
from fedgauge.simulations.run.create import create_run, resume
from tests.waiting import wait_for

TABLES: dict[str, Any] = {
    "seed": 3,
    "rounds": 4,
    "clients": 2,
    "data": {"use": "mnist5k", "batch_size": 1, "auxiliary": 64},
    "model": {"use": "mlp", "hidden": [16]},
    "strategy": {"use": "FedAdam"},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "analytic"}],
    "audit": {"executor": "local"},
}


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that died after the checkpoint of round 2."""

    class Died(Exception):
        pass

    def enter(self: Any, round: int, *seen: Any) -> None:
        if round == 2:
            raise Died
        entered(self, round, *seen)

    run, entered = create_run(Scenario.from_tables(TABLES), tmp_path / "runs" / "stopped"), Ledger.record_intake
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "record_intake", enter)
        with pytest.raises(Died):
            in_memory.train(run)
    return run


def refused(run: Run, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What is said, with exit status 2, and nothing on standard output."""
    assert main(["run", "--resume", str(run.folder), *more]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    return told.err


def test_a_run_is_resumed_by_its_folder_or_its_name(stopped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    went_on = []

    def simulate(run: Run, scenario: Scenario, *_: object) -> None:
        in_memory.train(run)
        went_on.append((run.folder.resolve(), scenario))

    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", simulate)
    assert main(["run", "--resume", "stopped", "--runs", str(stopped.folder.parent), "--log", "quiet"]) == 4, (
        "its attacks wait"
    )
    assert went_on == [(stopped.folder.resolve(), stopped.scenario())]
    assert [p.name for p in stopped.folder.parent.iterdir()] == ["stopped"], "no other run was begun"
    with stopped.ledger() as ledger:
        assert [r["round"] for r in ledger.rounds()] == [0, 1, 2, 3, 4]


def test_a_complete_run_says_so(stopped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    in_memory.train(stopped)
    words = refused(stopped, capsys)
    assert "is complete" in words and f"fedgauge audit {stopped.folder}" in words
    before = stopped.model.read_bytes()
    in_memory.train(stopped)
    assert stopped.model.read_bytes() == before, "and a server that is started on it again changes nothing"


@pytest.mark.parametrize("purpose", ["training", "server"])
def test_a_run_that_somebody_still_trains_is_left_alone(
    stopped: Run, capsys: pytest.CaptureFixture[str], purpose: str
) -> None:
    with stopped.lock(purpose):
        assert f"process {os.getpid()}" in refused(stopped, capsys)
    with stopped.ledger() as ledger:
        assert [r["round"] for r in ledger.rounds()] == [0, 1]


def test_a_run_of_other_versions_says_which(stopped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = stopped.folder / "environment.json"
    facts = json.loads(path.read_text())
    facts["packages"]["torch"] = "0.0.7"
    path.write_text(json.dumps(facts))
    assert "torch 0.0.7" in refused(stopped, capsys)


def test_a_deployments_run_is_not_gone_on_with_as_a_simulation(
    stopped: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with stopped.ledger() as ledger:
        ledger.set_meta(mode="deployment")
        before = ledger.rounds()
    assert "./compose.sh FOLDER up" in refused(stopped, capsys)
    with stopped.ledger() as ledger:
        assert [tuple(r) for r in ledger.rounds()] == [tuple(r) for r in before], "nothing is trained"
    path = stopped.folder / "checkpoint.json"
    facts = json.loads(path.read_text())
    assert facts["strategy"]["min_available_nodes"] == stopped.scenario().protocol.clients
    facts["strategy"]["min_available_nodes"] = (
        1  # as a deployment's server builds it, where a client may never come back
    )
    path.write_text(json.dumps(facts))
    assert resume(stopped, "deployment") == stopped.scenario()


@pytest.mark.parametrize("name", ["environment.json", "checkpoint.json"])
def test_a_run_with_a_damaged_file_is_refused(stopped: Run, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (stopped.folder / name).write_text("{")
    assert str(stopped.folder / name) in refused(stopped, capsys)


def test_options_that_do_not_go_with_resume_are_refused(stopped: Run, tmp_path: Path) -> None:
    scenario, resumed = str(stopped.folder / "scenario.toml"), ["--resume", str(stopped.folder)]
    for arguments in ([], [scenario, *resumed], [*resumed, "--set", "rounds=9"], ["--resume", str(tmp_path)]):
        assert main(["run", *arguments]) == 2


def test_a_run_that_never_began_a_round_begins(tmp_path: Path) -> None:
    run = create_run(Scenario.from_tables(TABLES), tmp_path / "run")
    assert resume(run) == Scenario.from_tables(TABLES)


# -------------------------------------------------------------------------------------------------- with real Flower

OWN = """
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data.images import mnist5k

def stored(path: Path) -> Dataset:
    assert path.name == "data" and path.is_dir()
    return mnist5k()

def small(shape, classes, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, classes))

def entropy(logits, labels, scale: float = 1.0):
    return scale * F.cross_entropy(logits, labels)
"""
OWN_PARTS = {
    "data": TABLES["data"] | {"use": "mynets:stored", "path": "data"},
    "model": {"use": "mynets:small", "hidden": 16},
    "loss": {"use": "mynets:entropy", "scale": 0.5},
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc: Linux")
def test_a_federation_killed_in_round_2_goes_on_to_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of driver, ServerApp, clients and attack service, all at once.

    Data, model and loss are the user's: Flower's copy of the app, its Ray workers and the attack service load them elsewhere.
    The data's path is relative to where the command was called.
    """
    ours = uuid.uuid4().hex
    monkeypatch.setenv("FEDGAUGE_TEST", ours)
    tables = TABLES | OWN_PARTS | {"simulation": {"parallel_clients": 1}, "audit": {"executor": "ray", "workers": 1}}
    (tmp_path / "small.toml").write_text(tomli_w.dumps(tables))
    (tmp_path / "mynets.py").write_text(OWN)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    with allowing(["mynets"], [tmp_path]):
        whole = create_run(Scenario.from_tables(tables), tmp_path / "whole")
        in_memory.train(whole)
    command = [sys.executable, "-m", "fedgauge.simulations.cli.main", "run", "--allow", "mynets"]
    driver = subprocess.Popen(
        [*command, str(tmp_path / "small.toml"), "--runs", str(tmp_path / "runs"), "--log", "quiet"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        path = wait_for(lambda: next(iter(tmp_path.glob("runs/*/ledger.sqlite")), None), process=driver)
        wait_for(lambda: last_round(path) >= 1, process=driver)
    finally:
        driver.kill()
        while left := processes.marked(ours, "FEDGAUGE_TEST"):  # again, for what had been forked meanwhile
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        driver.wait()
    run = Run.open(path.parent)
    assert not run.model.exists()
    assert Path(tomllib.loads((run.folder / "scenario.toml").read_text())["data"]["path"]) == tmp_path / "data"
    wait_for(lambda: run.holder("server") is None)  # a process that dies gives up its locks last
    reached = last_round(path)
    assert 1 <= reached < 4
    resumed = subprocess.run(
        [*command, "--resume", str(run.folder), "--log", "quiet"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert run.model.read_bytes() == whole.model.read_bytes()
    with run.ledger() as a, whole.ledger() as b:
        assert [(r["round"], r["accuracy"], r["loss"]) for r in a.rounds()] == [
            (r["round"], r["accuracy"], r["loss"]) for r in b.rounds()
        ]
        assert [tuple(o) for o in a.observations()] == [tuple(o) for o in b.observations()]
        assert len(a.observations()) == 8
        assert (a.progress().done, a.progress().total) == (32, 32)
        assert a.meta()["replay"] == "ok"
        psnr = Counter((r["round"], r["client"], r["attack"], r["example"]) for r in a.scores("psnr"))
        assert set(psnr.values()) == {1}, "no row is doubled"
        assert {key[:2] for key in psnr} == {(r, c) for r in (1, 2, 3, 4) for c in (0, 1)}, "and none is missing"
    assert processes.marked(ours, "FEDGAUGE_TEST") == []


def last_round(path: Path) -> int:
    with Ledger(path) as ledger:
        return ledger.last_round()
