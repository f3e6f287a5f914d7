"""`fedgauge run --resume`: what was killed goes on, by the real thing; what cannot go on is told in a sentence."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.server import app as server_app
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run import in_memory, processes
from fedgauge.simulations.run.create import create_run, resume

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

    def enter(self: Any, round: int, seen: Any) -> None:
        if round == 2:
            raise Died
        entered(self, round, seen)

    run, entered = (
        create_run(Scenario.from_tables(TABLES), tmp_path / "runs" / "stopped"),
        server_app.UpdateRecorder.enter,
    )
    with monkeypatch.context() as patched:
        patched.setattr(server_app.UpdateRecorder, "enter", enter)
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
    assert f"{stopped.folder} is complete: its 4 rounds are trained; 32 attacks wait: fedgauge audit" in words
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


@pytest.mark.parametrize("package", ["torch", "fedgauge", "flwr", "numpy"])
def test_a_run_of_other_versions_says_which(stopped: Run, capsys: pytest.CaptureFixture[str], package: str) -> None:
    path = stopped.folder / "environment.json"
    facts = json.loads(path.read_text())
    now, facts["packages"][package] = facts["packages"][package], "0.0.7"
    path.write_text(json.dumps(facts))
    assert f"was started with {package} 0.0.7, and this is {package} {now}" in refused(stopped, capsys)


def test_a_deployments_run_is_not_gone_on_with_as_a_simulation(
    stopped: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stopped.ledger() as ledger:
        ledger.set_meta(mode="deployment")
        before = ledger.rounds()
    assert "continue with: the server that began it" in refused(stopped, capsys), "of an app of somebody's own"
    (tmp_path / "keys").mkdir()
    assert (
        f"a deployment's run, which a simulation must not continue; continue with: fedgauge deploy up {tmp_path} --local"
        in (refused(stopped, capsys))
    )
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


@pytest.mark.parametrize("text", [None, "", "[]", '{"packages": 3}', "{}"])
def test_a_run_of_unknown_versions_is_refused(
    stopped: Run, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    path = stopped.folder / "environment.json"
    path.unlink() if text is None else path.write_text(text)
    assert "environment.json does not say which versions trained this run" in refused(stopped, capsys)


def test_a_damaged_checkpoint_is_named(stopped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (stopped.folder / "checkpoint.json").write_bytes(b"{")
    assert f"{stopped.folder / 'checkpoint.json'} is damaged" in refused(stopped, capsys)


@pytest.mark.parametrize("setting", [["--set", "rounds=9"], ["--rounds", "9"]])
def test_a_run_goes_on_with_its_own_scenario(
    stopped: Run, capsys: pytest.CaptureFixture[str], setting: list[str]
) -> None:
    assert "leave out --set and --rounds" in refused(stopped, capsys, *setting)


def test_a_scenario_or_a_run_and_not_both(stopped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = str(stopped.folder / "scenario.toml")
    for arguments in ([], [scenario, "--resume", str(stopped.folder)]):
        assert main(["run", *arguments]) == 2
        assert "a SCENARIO.toml to start, or --resume RUN" in capsys.readouterr().err


def test_what_is_no_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--resume", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_run_that_never_began_a_round_begins(tmp_path: Path) -> None:
    run = create_run(Scenario.from_tables(TABLES), tmp_path / "run")
    assert resume(run) == Scenario.from_tables(TABLES)


# -------------------------------------------------------------------------------------------------- with real Flower


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc: Linux")
def test_a_federation_killed_in_round_2_goes_on_to_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of driver, ServerApp, clients and attack service, all at once."""
    ours = uuid.uuid4().hex
    monkeypatch.setenv("FEDGAUGE_TEST", ours)
    whole = create_run(Scenario.from_tables(TABLES), tmp_path / "whole")
    in_memory.train(whole)
    (tmp_path / "small.toml").write_text(tomli_w.dumps(TABLES))
    command = [sys.executable, "-m", "fedgauge.simulations.cli.main", "run"]
    driver = subprocess.Popen(
        [*command, str(tmp_path / "small.toml"), "--runs", str(tmp_path / "runs"), "--log", "quiet"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        path = wait_for(lambda: next(iter(tmp_path.glob("runs/*/ledger.sqlite")), None), driver)
        wait_for(lambda: last_round(path) >= 1 or None, driver)
    finally:
        for pid in (driver.pid, *marked(ours)):
            kill(pid)
        driver.wait()
        while left := marked(ours):  # what had been forked meanwhile
            for pid in left:
                kill(pid)
            time.sleep(0.1)
    run = Run.open(path.parent)
    assert not run.model.exists()
    wait_for(lambda: True if run.holder("server") is None else None)  # a process that dies gives up its locks last
    reached = last_round(path)
    assert 1 <= reached < 4
    resumed = subprocess.run(
        [*command, "--resume", str(run.folder), "--log", "json"], capture_output=True, text=True, timeout=400
    )
    assert resumed.returncode == 0, resumed.stderr
    events = [json.loads(line) for line in resumed.stdout.splitlines()]
    assert (events[-1]["event"], events[-1]["state"]) == ("finished", "complete")
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
    assert marked(ours) == []


def marked(ours: str) -> list[int]:
    """Processes that a launch of this test started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):  # ended while we looked, or another user's
            continue
        if f"FEDGAUGE_TEST={ours}".encode() in environment and processes.MARK.encode() in environment and state != "Z":
            found.append(int(entry.name))
    return found


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def last_round(path: Path) -> int:
    with Ledger(path) as ledger:
        return ledger.last_round()


def wait_for(look: Callable[[], Any], driver: subprocess.Popen[bytes] | None = None, patience: float = 240.0) -> Any:
    deadline = time.monotonic() + patience
    while (found := look()) is None:
        assert time.monotonic() < deadline, "waited in vain"
        assert driver is None or driver.poll() is None, "the driver ended"
        time.sleep(0.05)
    return found
