"""A local start trains, reports its state, and ends in order."""

import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run, RunBusy
from fedgauge.simulations.cli import main as cli
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.deploy.local_start import LocalDeployment, down
from fedgauge.simulations.run import in_memory, processes
from fedgauge.simulations.run.create import create_run
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


def by_example(ledger: Ledger) -> dict[tuple[object, ...], float]:
    return {(r["round"], r["client"], r["attack"], r["example"]): r["value"] for r in ledger.scores("psnr")}


@pytest.mark.full
@pytest.mark.slow
def test_a_deployment_trains_what_a_simulation_of_its_seed_trains(tmp_path: Path) -> None:
    """TLS, node authentication, two clients with files of their own, a Ray cluster: the same updates, bit for bit."""
    folder = tmp_path / "federation"
    assert (
        cli.main(["deploy", "init", str(folder), "--clients", "2", "--sampling", "agreed", "--grading", "scores"]) == 0
    )
    deployment = Deployment.open(folder)
    command = [sys.executable, "-m", "fedgauge.simulations.cli.main", "deploy", "up", str(folder), "--local"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert "ending the services" in done.stderr and " of 2 clients" not in done.stderr, "all took part"
    assert "to 0.5 dB" in done.stdout and "no client grades" in done.stdout
    run = Run.open(Path(done.stdout.strip().splitlines()[-1]))
    assert run.folder == deployment.runs()[0].folder

    scenario = deployment.scenario()
    simulated = create_run(scenario, tmp_path / "simulated")
    in_memory.train(simulated)
    with run.ledger() as ours, simulated.ledger() as theirs:
        found, expected = ([tuple(o) for o in ledger.observations()] for ledger in (ours, theirs))
        assert found == expected and len(found) == 6, "round, client, what became of it, examples, digest"
        accuracies = [[(r["round"], r["accuracy"], r["loss"]) for r in ledger.rounds()] for ledger in (ours, theirs)]
        assert accuracies[0] == accuracies[1]
        serve(simulated, LocalExecutor())
        told, truth = (by_example(ledger) for ledger in (ours, theirs))
        assert told.keys() == truth.keys() and len(told) == 6 * 7, (
            "two attacks, their wrong clients, and three baselines"
        )
        # quantised to 0.5 dB by each client, and capped; packed differently, an attack's last digits differ
        assert max(abs(told[key] - min(truth[key], 60.0)) for key in told) <= 0.25 + 0.05
        progress = ours.progress()
        assert (progress.done, progress.failed, progress.waiting) == (30, 0, 0)
        graded = [r["value"] for r in ours.scores("psnr") if r["attack"] == "analytic"]
        assert len(graded) == 6 and min(graded) >= 60, "the first layer's gradient holds the image exactly"
    mark = json.loads((folder / "up.json").read_text())["mark"]
    assert processes.marked(mark) == []
