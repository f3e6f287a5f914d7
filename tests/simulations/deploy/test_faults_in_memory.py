"""What a deployment survives where the network is not the point: on an in-memory grid, with the owners' own files."""

import json
import tomllib
from collections import Counter
from collections.abc import Iterable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from flwr.app import Error, Message

from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder
from fedgauge.server.app import federate
from fedgauge.server.pool.executors import LocalExecutor, Result
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.views.privacy import spent_in
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.simulations.checks.owner_check import privacy
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.run import in_memory
from tests.owned import OwnedGrid, train_owned
from tests.small_runs import ANALYTIC, DEPLOYED

SCENARIO = DEPLOYED.format(rounds=4, clients=3) + ANALYTIC


class Died(BaseException):
    """In the place of a kill."""


class Troubled(OwnedGrid):
    """Client 1 is killed in round 2, client 0 is cut off in round 3; both are back in the next round."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        arrived = []
        for message in messages:
            fate = None
            if message.metadata.message_type == "train":
                round = message.content.config_records["config"]["server-round"]
                fate = {(2, 1): "killed", (3, 0): "cut off"}.get((round, self.clients[message.metadata.dst_node_id]))
            if fate == "killed":
                arrived.append(Message(Error(0, "the node is gone"), reply_to=message))
            elif fate is None:
                arrived += super().send_and_receive([message])
        return arrived


class Dying(LocalExecutor):
    """The attack service is killed after three waves, with another one in flight."""

    waves = 0

    def next_done(self, timeout: float) -> tuple[int, Result] | None:
        self.waves += 1
        if self.waves > 3:
            raise Died
        return super().next_done(timeout)


def test_a_run_through_many_faults_ends_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is killed, one is cut off, the server dies in round 4 and goes on, and so does the attack service."""
    monkeypatch.setattr("fedgauge.server.strategy.client_grading.GRACE", 0.0)  # nobody waits for an attack service
    (tmp_path / "small.toml").write_text(SCENARIO)
    deployment = Deployment.create(tmp_path / "federation", 3, scenario=tmp_path / "small.toml", sampling="agreed")
    owners = [deployment.folder / "clients" / str(k) / "client.toml" for k in range(3)]
    run, _ = deployment.begin("one")
    enter = Ledger.record_intake

    def dies(self: Ledger, round: int, *seen: Any) -> None:
        if round == 4:
            raise Died
        enter(self, round, *seen)

    with monkeypatch.context() as patched, in_memory.flower():
        patched.setattr(Ledger, "record_intake", dies)
        with pytest.raises(Died):
            federate(run, Troubled(run.scenario().protocol, owners))
    with run.ledger() as ledger:
        assert ledger.last_round() == 3
        ledger.set_meta(state="failed")  # as `up` does
    with pytest.raises(Died):
        serve(run, Dying())
    assert deployment.begin("one") == (run, True), "the next start goes on with it"
    train_owned(run, owners, number=2)
    serve(run, LocalExecutor())
    complete(run, {(2, 1), (3, 0)})


def complete(run: Run, lost: set[tuple[int, int]]) -> None:
    """Neither gap nor double: every round once, every client's fate in it once, every update attacked once by each attack."""
    with run.ledger() as ledger:
        assert [r["round"] for r in ledger.rounds()] == [0, 1, 2, 3, 4]
        status = {(o["round"], o["client"]): o["status"] for o in ledger.observations()}
        assert len(status) == len(ledger.observations()) == 4 * 3
        accepted = {key for key, state in status.items() if state == "accepted"}
        assert set(status) - accepted == lost
        progress = ledger.progress()
        assert (progress.done, progress.failed, progress.queued, progress.leased) == (4 * len(accepted), 0, 0, 0)
        rows = Counter((r["round"], r["client"], r["attack"], r["example"], r["metric"]) for r in ledger.scores())
        assert set(rows.values()) == {1}
        assert {(round, client) for round, client, *_ in rows} == accepted


class Late(OwnedGrid):
    """Client 1's first update comes after the round's end; the server dies in a round, with all updates there."""

    dies: int | None = None

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        training = messages[0].metadata.message_type == "train" if messages else False
        round = messages[0].content.config_records["config"]["server-round"] if training else 0
        if round and round == self.dies:
            raise Died
        return [r for r in replies if (round, self.clients[r.metadata.src_node_id]) != (1, 1)]


def private_deployment(folder: Path) -> tuple[Run, list[Path]]:
    """A run of three clients whose updates have noise behind a clip, and their owners' files."""
    noisy = [{"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 2.0}, {"use": "local_sgd", "rate": 0.1}]
    tables = {**tomllib.loads(SCENARIO), "chain": noisy}
    (folder / "small.toml").write_text(tomli_w.dumps(tables))
    deployment = Deployment.create(folder / "federation", 3, scenario=folder / "small.toml", sampling="agreed")
    run, _ = deployment.begin("one")
    return run, [deployment.folder / "clients" / str(k) / "client.toml" for k in range(3)]


def train_until(run: Run, owners: list[Path], dies: int | None, number: int = 1) -> None:
    """Train as one of Flower's runs, which ends when all updates of this round are there."""
    grid = Late(run.scenario().protocol, owners, run=number)
    grid.dies = dies
    with pytest.raises(Died) if dies else nullcontext(), in_memory.flower():
        federate(run, grid, number)


def epsilons(owners: list[Path], updates: int) -> list[float]:
    """Of the clients' own reports, of so many updates each."""
    own = [OwnerConfig.load(owner) for owner in owners]
    for owner in own:
        events = map(json.loads, ClientFolder(owner.state).log.read_text().splitlines())
        assert len({(event["run"], event["round"]) for event in events if "round" in event}) == updates
    spent = [found.record for owner in own if (found := privacy(owner)) is not None]
    assert len(spent) == len(owners)
    return [epsilon for epsilon in spent if epsilon is not None]


def page_epsilon(run: Run) -> float:
    """Of one record, as the page and the report show it."""
    with closing(RunSnapshot(run)) as reading, reading.now():
        told = spent_in(reading).record
    assert isinstance(told, float)
    return told


def tells_what_clients_tell(run: Run, owners: list[Path], updates: int) -> None:
    """The page has the epsilon of the clients' own reports, of so many updates each."""
    spent = epsilons(owners, updates)
    assert page_epsilon(run) == pytest.approx(max(spent), rel=1e-3)


def test_epsilon_counts_what_came_too_late_and_what_was_answered_to_a_server_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page and export told of fewer updates than the clients' own reports, and each has noise of its own."""
    monkeypatch.setattr("fedgauge.server.strategy.client_grading.GRACE", 0.0)
    run, owners = private_deployment(tmp_path)
    train_until(run, owners, dies=2)
    train_until(run, owners, None, number=2)
    tells_what_clients_tell(run, owners, run.scenario().protocol.rounds + 1)


@pytest.mark.parametrize("dies", [1, 3])
def test_epsilon_counts_the_round_that_a_dead_server_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: int
) -> None:
    """Nobody may ever start it again, and it died before that round was recorded."""
    monkeypatch.setattr("fedgauge.server.strategy.client_grading.GRACE", 0.0)
    run, owners = private_deployment(tmp_path)
    train_until(run, owners, dies)
    assert page_epsilon(run) == pytest.approx(max(epsilons(owners, dies)), rel=1e-3)
