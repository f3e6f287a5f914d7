"""Clients that refuse, or are away, are recorded with their reason; a run ends with the status of what became of it."""

import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.components import allowing
from fedgauge.server.app import federate
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger_types import DEPLOYMENT, OWN
from fedgauge.server.store.run import Run
from fedgauge.server.strategy.reply_checks import CLIENT_ABSENT
from fedgauge.server.views.notices import notices
from fedgauge.server.views.outcomes import none_accepted
from fedgauge.server.views.participation import participation
from fedgauge.server.views.snapshot import RunSnapshot, state_of
from fedgauge.simulations.cli import main as cli
from fedgauge.simulations.deploy.folder import DEMO, Deployment
from fedgauge.simulations.run import in_memory
from fedgauge.simulations.run.create import create_run
from fedgauge.simulations.run.exit_status import exit_status
from tests.owned import OwnedGrid, train_owned
from tests.waiting import wait_for

OWN_NETS = """
from torch import nn
def small(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))
"""


@pytest.fixture
def unattacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for an attack service: none is started."""
    monkeypatch.setattr("fedgauge.server.strategy.client_grading.GRACE", 0.0)


@pytest.fixture
def foreign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Deployment]:
    """A deployment whose scenario names a model of the user's own, which no owner has allowed."""
    (tmp_path / "mynets.py").write_text(OWN_NETS)
    scenario = tmp_path / "own.toml"
    # a small rate, as one example of one client moves this network by more than its guard takes for honest
    small = DEMO.read_text().replace("rate = 0.1", "rate = 0.01")
    scenario.write_text(re.sub(r"use = .*mlp.*\nhidden.*", 'use = "mynets:small"', small))
    folder = tmp_path / "federation"
    assert cli.main(["deploy", "init", str(folder), "--clients", "3", "--scenario", str(scenario)]) == 2
    assert "--allow mynets" in capsys.readouterr().err
    assert (
        cli.main(["deploy", "init", str(folder), "--clients", "3", "--scenario", str(scenario), "--allow", "mynets"])
        == 0
    )
    told = capsys.readouterr().out
    before = cli._parser("deploy").parse_args(
        ["deploy", "--allow", "one", "init", str(folder), "--clients", "3", "--allow", "two"]
    )
    assert [*before.allow, *before.allow_too] == ["one", "two"], "before the action and after it"
    assert 'allow = ["mynets"]' in told and f"{folder}/clients/*/client.toml" in told
    yield Deployment.open(folder)
    sys.modules.pop("mynets", None)


def owners(deployment: Deployment) -> list[Path]:
    return [deployment.folder / "clients" / str(k) / "client.toml" for k in range(deployment.clients)]


def test_where_every_client_refuses_the_run_has_failed_and_says_why(foreign: Deployment) -> None:
    with allowing(["mynets"], [foreign.folder.parent]):
        run, _ = foreign.begin("one")
        with run.ledger() as ledger:
            train_owned(run, owners(foreign))
            reasons = [(o["client"], "this client does not build it" in o["reason"]) for o in ledger.observations(3)]
            assert reasons == [(0, True), (1, True), (2, True)]
            why = none_accepted(ledger, ended=True)
            assert "0 of 9 updates" in why and "client 0 missing in 3" in why
            ledger.set_meta(state="failed", empty=why)
            assert state_of(run, ledger) == "failed", "although all its rounds are over"
        with closing(RunSnapshot(run)) as reading, reading.now():
            assert any(why in words for words, _ in notices(reading))


@pytest.mark.usefixtures("unattacked")
def test_an_owner_who_lets_the_code_be_loaded_takes_part_and_the_others_are_reported_of(foreign: Deployment) -> None:
    path = owners(foreign)[1]
    path.write_text(path.read_text().replace("allow = []", 'allow = ["mynets"]'))
    shutil.copy(foreign.folder.parent / "mynets.py", path.parent)
    with allowing(["mynets"], [foreign.folder.parent]):
        run, _ = foreign.begin("one")
        train_owned(run, owners(foreign))
        with run.ledger() as ledger:
            assert none_accepted(ledger, ended=True) == ""
            told = participation(ledger.observations())
            assert told.startswith("3 of 9 updates") and "client 0 missing in 3" in told


@pytest.mark.usefixtures("unattacked")
def test_a_client_that_is_away_has_a_row_that_says_so(made: Deployment, tmp_path: Path) -> None:
    """Two of three are there: the third is missing in each round, whoever was asked."""
    run = create_run(made.scenario(), tmp_path / "run", mode="deployment")

    class Without(OwnedGrid):
        def get_node_ids(self) -> Iterable[int]:
            return [1, 3]

    grid = Without(run.scenario().protocol, owners(made))
    with in_memory.flower(), pytest.MonkeyPatch.context() as patched:
        patched.setattr("fedgauge.server.app.discover_nodes", lambda *_: {1: 0, 3: 2})  # which waits for the third
        federate(run, grid)
    with run.ledger() as ledger:
        seen = [(o["round"], o["client"], o["status"]) for o in ledger.observations()]
        assert seen == [(r, c, "missing" if c == 1 else "accepted") for r in (1, 2, 3) for c in range(3)]
        told = participation(ledger.observations())
        assert told.startswith("6 of 9 updates") and told.endswith(f"; client 1 missing in 3 rounds: {CLIENT_ABSENT}")


def trained(name: str, run: Run, deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of `fedgauge deploy start` for a run whose training is over."""
    monkeypatch.setattr(Deployment, "begin", lambda *_: (run, False))
    monkeypatch.setattr("fedgauge.simulations.deploy.train._train", lambda *_: None)
    monkeypatch.setattr("fedgauge.simulations.deploy.train.WITHOUT_AUDIT", 0.0)
    return cli.main(["deploy", "start", str(deployment.folder), "--superlink", "here:1", "--name", name])


def test_a_run_that_nobody_attacked_has_failed(
    made: Deployment, make_scenario: Any, make_taped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = make_taped(tmp_path / "run", make_scenario())
    assert trained("one", run, made, monkeypatch) == 1
    assert f"fedgauge audit {run.folder}" in capsys.readouterr().err


def test_a_run_to_which_no_attack_applies_ends_as_a_simulation_does(
    made: Deployment, make_scenario: Any, make_taped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = make_scenario(model={"use": "lenet"}, attack=[{"use": "analytic"}], audit={"executor": "local"})
    run = make_taped(tmp_path / "run", scenario)
    serve(run, LocalExecutor())
    assert trained("one", run, made, monkeypatch) == 3


def test_a_complete_run_is_attacked_further_by_the_next_start(
    made: Deployment, make_scenario: Any, make_taped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service follows while the start holds its lock; a run without waiting attacks is complete."""
    run = make_taped(made.folder / "runs" / "one", make_scenario())
    run.model.write_bytes(b"weights")
    seen = []

    def waits(at: Run, ledger: Any, *_: Any) -> None:
        seen.append((ledger.progress().waiting, at.at_work("training")))
        serve(at, LocalExecutor())

    monkeypatch.setattr("fedgauge.simulations.deploy.train._wait_for_attacks", waits)
    command = ["deploy", "start", str(made.folder), "--superlink", "here:1", "--name", "one"]
    assert cli.main(command) == exit_status(run)
    assert cli.main(command) == 2, "it is complete"
    ((waiting, follows),) = seen
    assert waiting > 0 and follows


def test_a_start_waits_for_the_server_that_a_killed_start_left(
    made: Deployment, make_scenario: Any, make_taped: Any
) -> None:
    run = make_taped(made.folder / "runs" / "left", make_scenario())
    serve(run, LocalExecutor())
    locked = threading.Event()

    def train() -> None:
        with run.lock("server"):
            locked.set()
            wait_for(lambda: run.at_work("training"))
            time.sleep(1)  # in which the start would end
            run.model.write_bytes(b"weights")

    server = threading.Thread(target=train)
    server.start()
    locked.wait()
    command = ["deploy", "start", str(made.folder), "--superlink", "here:1", "--name", "left"]
    assert cli.main(command) == exit_status(run) != 2
    assert run.model.exists()
    server.join()


def test_the_attack_service_waits_for_a_failed_training_to_be_continued(
    make_scenario: Any, make_taped: Any, tmp_path: Path
) -> None:
    """Nothing waits and no process trains: it ends only when the model is there."""
    run = make_taped(tmp_path / "run", make_scenario(attack=[{"use": "analytic"}]))
    with run.ledger() as ledger:
        ledger.set_meta(state="failed", mode=DEPLOYMENT, **{OWN: "1"})

    def complete() -> None:
        with run.ledger(readonly=True) as ledger:
            wait_for(lambda: not ledger.progress().waiting)
        time.sleep(1)  # in which it would end
        run.model.write_bytes(b"weights")

    training = threading.Thread(target=complete)
    training.start()
    assert cli.main(["audit", str(run.folder), "--follow"]) == 0
    assert run.model.exists()
    training.join()
