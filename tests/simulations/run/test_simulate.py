"""The attack service beside a training: looked after, told when it is dead, left at once when the user wants no more."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import tomli_w
from rich.console import Console

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.strategy.reply_checks import AcceptedReply, RoundReplies
from fedgauge.server.update_recorder import UpdateRecorder
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run import in_memory
from fedgauge.simulations.run import simulate as module
from fedgauge.simulations.run.create import create_run, new_run
from fedgauge.simulations.run.launch import AuditFailed, TrainingFailed
from fedgauge.simulations.run.simulate import Interrupt, simulate
from tests.forks import processes_are_forked
from tests.small_runs import SMALLEST
from tests.waiting import wait_for

pytestmark = pytest.mark.slow  # the attack service is a process of its own, which loads torch

TABLES = SMALLEST | {"model": {"use": "mlp", "hidden": [16]}, "audit": {"executor": "local", "wave": 1}}
QUICK = {"use": "analytic"}
ENDLESS = {"use": "inverting_gradients", "iterations": 10_000_000}


@pytest.fixture
def begun(tmp_path: Path) -> Callable[[object], tuple[Run, Scenario]]:
    """A run whose first round is on the tape, its jobs in the queue."""

    def make(attack: object) -> tuple[Run, Scenario]:
        scenario = Scenario.from_tables({**TABLES, "attack": [attack]})
        run = new_run(scenario, "small", tmp_path / "runs")
        params, buffers = scenario.federation.initial()
        updates = [scenario.federation.client_update(params, buffers, c, 1) for c in range(2)]
        with run.ledger() as ledger:
            accepted = tuple(AcceptedReply(c, u, 1, {}) for c, u in enumerate(updates))
            UpdateRecorder(ledger, run.tape(), scenario.plan)(RoundReplies(1, params, buffers, accepted, ()))
        return run, scenario

    return make


Made = Callable[[object], tuple[Run, Scenario]]


@pytest.fixture(autouse=True)
def most_services_are_forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have a process of their own, as users' runs have."""
    if not any(words in request.node.name for words in ("dies", "second_ctrl_c")):
        processes_are_forked(monkeypatch)


def quietly() -> Console:
    return Console(stderr=True)


def trains(monkeypatch: pytest.MonkeyPatch, work: Callable[[Ledger, Interrupt], None]) -> None:
    """In the place of Flower's minutes: what happens while a federation trains, as far as it matters here."""

    def train(run: Run, ledger: Ledger, view: object, interrupt: Interrupt, in_memory: bool) -> None:
        work(ledger, interrupt)

    monkeypatch.setattr(module, "_train", train)


def test_an_attack_service_that_dies_is_reported_with_the_end_of_its_log(
    begun: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, scenario = begun(QUICK)
    written = run.folder / "scenario.toml"
    written.write_text(written.read_text().replace('"local"', '"nowhere"'))  # the service cannot read it
    trains(monkeypatch, lambda ledger, interrupt: None)
    interrupt = Interrupt()
    with pytest.raises(AuditFailed) as failed:
        simulate(run, scenario, quietly(), interrupt)
    assert str(failed.value).splitlines()[0].endswith("(exit status 2)")
    assert "nowhere" in str(failed.value)
    assert not interrupt.asked, "nobody wanted it to stop"


def test_a_second_ctrl_c_ends_the_attacks_in_flight(begun: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    run, scenario = begun(ENDLESS)

    def work(ledger: Ledger, interrupt: Interrupt) -> None:
        wait_for(lambda: ledger.progress().leased)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: interrupt.asked)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: False)

    trains(monkeypatch, work)
    with Interrupt().caught() as interrupt, pytest.raises(KeyboardInterrupt):
        simulate(run, scenario, quietly(), interrupt)
    assert run.holder("audit") is None, "an attack of days was not waited for"
    with run.ledger() as ledger:
        assert ledger.progress().done == 0
        assert ledger.progress().leased > 0


@pytest.mark.full
def test_a_service_that_is_stopped_alone_is_an_interrupted_run(begun: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fedgauge stop` finds no training any more, and speaks to the service."""
    run, scenario = begun(QUICK)

    def work(ledger: Ledger, interrupt: Interrupt) -> None:
        wait_for(lambda: run.holder("audit") is not None)
        wait_for(lambda: ledger.progress().done)
        holder = run.holder("audit")
        assert holder is not None
        os.kill(holder, signal.SIGTERM)

    trains(monkeypatch, work)
    interrupt = Interrupt()
    simulate(run, scenario, quietly(), interrupt)
    assert interrupt.asked


class Ended:
    """A federation that has failed; a Ctrl-C comes while it is asked how it ended, or does not."""

    interrupting = False

    def __init__(self, run: Run, in_memory: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def status(self) -> int:
        return 1

    def blame(self, what: str) -> str:
        if self.interrupting:
            os.kill(os.getpid(), signal.SIGINT)
        return what


def test_what_a_failed_training_had_sent_is_attacked_before_its_failure_is_reported(
    begun: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, scenario = begun(QUICK)
    monkeypatch.setattr(module, "training_process", Ended)
    with Interrupt().caught() as interrupt, pytest.raises(TrainingFailed):
        simulate(run, scenario, quietly(), interrupt)
    assert not interrupt.asked
    with run.ledger() as ledger:
        assert ledger.meta()["state"] == "failed"
        assert (ledger.progress().done, ledger.progress().total) == (8, 8)
    assert run.holder("audit") is None


def test_a_ctrl_c_while_the_training_ends_is_no_failure(begun: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    run, scenario = begun(QUICK)
    monkeypatch.setattr(module, "training_process", Ended)
    monkeypatch.setattr(Ended, "interrupting", True)
    with Interrupt().caught() as interrupt:
        simulate(run, scenario, quietly(), interrupt)
    assert interrupt.asked
    with run.ledger() as ledger:
        assert ledger.meta()["state"] == "interrupted"


@pytest.mark.full
def test_a_run_in_memory_that_was_interrupted_goes_on_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {**TABLES, "rounds": 40, "attack": [QUICK], "audit": {"executor": "local", "rounds": [1, 2]}}
    whole = create_run(Scenario.from_tables(tables), tmp_path / "whole")
    in_memory.train(whole)
    (tmp_path / "small.toml").write_text(tomli_w.dumps(tables))

    def interrupt() -> None:
        ledger_file = wait_for(lambda: next(iter(tmp_path.glob("runs/*/ledger.sqlite")), None))
        wait_for(lambda: rounds_of(ledger_file) > 1)
        os.kill(os.getpid(), signal.SIGINT)

    (watching := Thread(target=interrupt)).start()
    told = main(["run", "--in-memory", str(tmp_path / "small.toml"), "--runs", str(tmp_path / "runs")])
    watching.join()
    (folder,) = (tmp_path / "runs").iterdir()
    run = Run.open(folder)
    assert told == 130 and f"fedgauge run --resume {folder}" in capsys.readouterr().out
    assert not run.model.exists() and (run.holder("training"), run.holder("audit")) == (None, None)
    assert main(["run", "--in-memory", "--resume", str(folder), "--log", "quiet"]) == 0
    assert rounds_of(run.folder / "ledger.sqlite") == 41
    assert (folder / "report.html").stat().st_size > 100_000
    assert b"run_simulation" not in run.log("flower.log").read_bytes(), "Flower's engine was not started"
    assert run.model.read_bytes() == whole.model.read_bytes()


def rounds_of(ledger_file: Path) -> int:
    with Ledger(ledger_file) as ledger:
        return len(ledger.rounds())
