"""A local start reports its state, and ends in order."""

import json
import signal
from contextlib import closing

import pytest

from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run, RunBusy
from fedgauge.simulations.cli import main as cli
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.deploy.local_start import LocalDeployment, down
from fedgauge.simulations.run import processes
from fedgauge.simulations.run.launch import TrainingFailed
from tests.forks import hold
from tests.simulations.deploy.conftest import SLEEP, linux, program
from tests.waiting import wait_for


def test_a_run_that_cannot_go_on_is_reported_before_anything_is_started(
    fresh: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a disk that was full in round 1 leaves it: a round, and no checkpoint."""
    run, _ = fresh.begin("one")
    with run.ledger() as ledger:
        ledger.record_intake(1, [Participation(0, "accepted", "", 1, "digest")])
        ledger.set_meta(state="failed")
    began: list[str] = []

    def listen(self: LocalDeployment) -> None:
        began.append(self.addresses.run)
        raise TrainingFailed("enough for a test")

    monkeypatch.setattr(LocalDeployment, "listen", listen)
    assert cli.main(["deploy", "up", str(fresh.folder), "--local"]) == 2
    told = capsys.readouterr().err
    assert "up to 1" in told and "no checkpoint" in told and "audit" in told
    assert told.strip().endswith(f": fedgauge deploy up {fresh.folder} --local --new")
    assert began == []
    assert cli.main(["deploy", "up", str(fresh.folder), "--local", "--new", "--log", "quiet"]) == 1
    told = capsys.readouterr().err
    assert began == [fresh.runs()[-1].name] != ["one"]
    assert "every user of this machine can run code in it" in told, "however quiet it is"
    assert f"deploy up {fresh.folder} --local" in told


@linux
def test_all_that_was_started_ends_with_the_start_even_what_left_its_group(local: LocalDeployment) -> None:
    stray = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True); {SLEEP}"
    )
    for name in ("one", "two"):
        program(local, name, stray)
    wait_for(lambda: len(processes.marked(local.mark)) == 4)
    facts = json.loads((local.deployment.folder / "up.json").read_text())
    assert facts["pids"] == {name: child.pid for name, child in local.children.items()}
    local.close()
    assert processes.marked(local.mark) == [] and not local.scratch.exists()


def test_a_needed_service_that_died_is_named_with_the_end_of_its_log(local: LocalDeployment) -> None:
    program(local, "dashboard", "raise SystemExit(1)")
    program(local, "superlink", "print('no such key'); raise SystemExit(9)")
    for child in local.children.values():
        child.wait()
    with pytest.raises(TrainingFailed, match=r"superlink: exit status 9\n(.*\n)+no such key"):
        local.check("superlink")


@linux
def test_a_deployment_is_up_once_and_down_asks_the_owner_of_it(fresh: Deployment) -> None:
    holder = hold(fresh.folder, "up")
    with closing(LocalDeployment(fresh, "one")) as left:
        with pytest.raises(RunBusy), Run(fresh.folder).lock("up"):
            pass
        program(left, "stray", SLEEP)
        assert down(fresh) == [left.children["stray"].pid]
        holder.join()
        assert holder.exitcode == -signal.SIGTERM and left.children["stray"].wait() != 0
        assert down(fresh) == [], "nothing is left to end"
