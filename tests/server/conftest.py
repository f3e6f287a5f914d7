"""A federation in memory: real messages, serialized as on the wire, answered by the real client/app.py."""

import json
import os
import random
import shutil
import subprocess
import tempfile
import tomllib
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.client.app import app as client_app
from fedgauge.client.federation import Federation
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import Tape
from fedgauge.server.strategy.reply_checks import AcceptedReply, RoundReplies
from fedgauge.server.update_recorder import UpdateRecorder
from fedgauge.simulations.run import in_memory, processes
from fedgauge.simulations.run.launch import child_environment
from tests.waiting import free_port, listens, wait_for
from tests.wire import travel

FOREIGN = Path(__file__).resolve().parents[1] / "foreign"

Tables = dict[str, Any]
Tamper = Callable[[int, list[Message]], list[Message]]  # (round, replies) -> the replies that arrive


class MemoryGrid(in_memory.MemoryGrid):
    """Flower's transport without its processes: random node ids, each node with a state of its own.

    Args:
        protocol: the run-config that clients read.
        clients: how many nodes.
        draw: of node ids and of the order in which nodes are listed and replies arrive.
        tamper: changes what arrives of a round's training replies.
    """

    def __init__(
        self,
        protocol: str,
        clients: int,
        draw: int = 0,
        tamper: Tamper = lambda round, replies: replies,
        app: ClientApp = client_app,
    ) -> None:
        self.app = app
        self.tamper = tamper
        self.rng = random.Random(draw)
        self.nodes = {self.rng.getrandbits(64): partition for partition in range(clients)}
        self.contexts = {
            node: Context(1, node, {"partition-id": p, "num-partitions": clients}, RecordDict(), {"protocol": protocol})
            for node, p in self.nodes.items()
        }
        self.sent: list[Message] = []

    def node(self, partition: int) -> int:
        return next(n for n, p in self.nodes.items() if p == partition)

    def get_node_ids(self) -> Iterable[int]:
        return self.rng.sample(list(self.nodes), len(self.nodes))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = [travel(message) for message in messages]  # strategies use their records again in the next round
        self.sent += sent
        replies = [self._answer(message) for message in sent]
        self.rng.shuffle(replies)
        if sent and sent[0].metadata.message_type == "train":
            round = next(iter(sent[0].content.config_records.values()))["server-round"]
            assert isinstance(round, int)
            replies = self.tamper(round, replies)
        return replies

    def _answer(self, message: Message) -> Message:
        try:
            return travel(self.app(message, self.contexts[message.metadata.dst_node_id]))
        except Exception as error:  # Flower turns a ClientApp's exception into an error reply of this form
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)


@pytest.fixture(autouse=True)
def named(identity: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every test writes messages; Flower's records collect garbage after every array, which takes most of the time."""
    monkeypatch.setattr("flwr.app.message.arrayrecord.gc", SimpleNamespace(collect=lambda: 0))


def tables(**changes: Any) -> Tables:
    """A small scenario: four clients with two digits each a round, a narrow mlp, three rounds of FedAvg."""
    base: Tables = {
        "seed": 3,
        "rounds": 3,
        "clients": 4,
        "data": {"use": "mnist5k", "batch_size": 2, "auxiliary": 64},
        "model": {"use": "mlp", "hidden": [8]},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
        "attack": [{"use": "inverting_gradients", "iterations": 3}],
        "audit": {"executor": "local"},
    }
    return base | changes


def make_run(folder: Path, scenario: Scenario, rounds: int = 1, tape: bool = True) -> Run:
    """A run folder as a curious server leaves it after some rounds: real updates on the tape, jobs in the ledger."""
    run = Run.create(folder, scenario)
    federation = Federation(scenario.protocol)
    with run.ledger() as ledger:
        ledger.add_attacks(scenario.plan, {p.name: knowledge_card(federation, p) for p in scenario.plan.attacks})
        if tape:
            record_rounds(run, ledger, scenario, federation, rounds)
    return run


def record_rounds(run: Run, ledger: Ledger, scenario: Scenario, federation: Federation, rounds: int) -> None:
    """Each round's updates from the federation's first weights, through the server's own recorder."""
    params, buffers = federation.initial()
    recorder = UpdateRecorder(ledger, run.tape(), scenario.plan, scenario.tape.keep)
    size = federation.shards.batch_size
    for round in range(1, rounds + 1):
        accepted = [
            AcceptedReply(c, federation.client_update(params, buffers, c, round), size, {})
            for c in range(scenario.protocol.clients)
        ]
        recorder(RoundReplies(round, params, buffers, tuple(accepted), ()))


def run_under_flower(
    folder: Path, app: str, config: Mapping[str, Any], seconds: float = 240, source: Path = FOREIGN
) -> None:
    """An app of tests/foreign, or of another folder, on two simulated nodes, as `flwr run` runs it; it must complete."""
    scratch, mark = folder / "flower", uuid.uuid4().hex
    scratch.mkdir()
    shutil.copytree(source, scratch / "app", ignore=shutil.ignore_patterns("__pycache__"))
    project = tomllib.loads((source / "pyproject.toml").read_text())
    parts = {f"{kind}app": f"{app}.{kind}_app:app" for kind in ("server", "client")}
    project["tool"]["flwr"]["app"] |= {"components": parts, "config": dict(config)}
    (scratch / "app" / "pyproject.toml").write_text(tomli_w.dumps(project))
    # where torchvision's wheel is not torch's: a node's process imports the app first
    (scratch / "app" / app / "__init__.py").write_text("import fedgauge.client\n")
    port = free_port()
    (scratch / "home").mkdir()
    links = {"default": "here", "here": {"address": f"127.0.0.1:{port}", "insecure": True}}
    (scratch / "home" / "config.toml").write_text(tomli_w.dumps({"superlink": links}))
    short = Path(tempfile.mkdtemp(prefix="fl-"))  # Ray's sockets live below it
    env = child_environment(short, mark) | {"FLWR_HOME": str(scratch / "home"), "FEDGAUGE_ALLOW": app}
    env["PYTHONPATH"] = os.pathsep.join([str(FOREIGN.parents[1]), env.get("PYTHONPATH", "")])
    superlink = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess", "--port", str(port)]
    process = processes.start(superlink, folder / "superlink.log", env)
    try:
        wait_for(lambda: listens(port), 90, process=process)
        federation = "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=1 init-args-log-to-driver=false"
        command = ["flwr", "run", str(scratch / "app"), "here", "--stream", "--federation-config", federation]
        told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
        listing = subprocess.run(
            ["flwr", "ls", "here", "--format", "json"], env=env, capture_output=True, text=True, timeout=60
        )
        status = json.loads(listing.stdout)["runs"][0]["status"]
        assert status == "finished:completed", told.stdout[-3000:] + (folder / "superlink.log").read_text()[-3000:]
    finally:
        processes.end(process)
        processes.sweep(mark)
        shutil.rmtree(short, ignore_errors=True)


class Kit:
    """What the tests of this folder share."""

    MemoryGrid = MemoryGrid
    Tape = Tape
    travel = staticmethod(travel)
    tables = staticmethod(tables)
    make_run = staticmethod(make_run)
    record_rounds = staticmethod(record_rounds)
    run_under_flower = staticmethod(run_under_flower)

    @staticmethod
    def scenario(**changes: Any) -> Scenario:
        return Scenario.from_tables(tables(**changes))

    @staticmethod
    def grid(scenario: Scenario, **options: Any) -> MemoryGrid:
        return MemoryGrid(scenario.protocol.to_json(), scenario.protocol.clients, **options)

    @staticmethod
    def reply(
        message: Message, arrays: Mapping[str, torch.Tensor | Array], examples: Any = 2, name: str = "update"
    ) -> Message:
        """A client's reply as it arrives, with any arrays in it."""
        record = ArrayRecord({k: v if isinstance(v, Array) else Array(v.numpy()) for k, v in arrays.items()})
        content = RecordDict({name: record, "metrics": MetricRecord({"num-examples": examples})})
        return travel(Message(content, reply_to=message))


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
