"""A deployment under a secure sum: the owners' files agree on it, clients drop out, and the server sees sums alone."""

import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import tomli_w
import torch
from flwr.app import Error, Message
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from safetensors.torch import load_file

from fedgauge.client.components import SpecError
from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.client.deployment.secure_sum_mod import ARRAYS, RECORD
from fedgauge.server.app import federate
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.simulations.checks.owner_check import check_owner
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.run import in_memory
from tests.forks import FORK, forked
from tests.owned import OwnedGrid, train_owned
from tests.small_runs import DEPLOYED, SEARCH

SCENARIO = DEPLOYED.format(rounds=3, clients=3) + SEARCH
SUMMED = SCENARIO + "[secure_sum]\ngroup = 3\nthreshold = 2\nclip = 1.0\n"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for an attack service."""
    monkeypatch.setattr("fedgauge.server.strategy.client_grading.GRACE", 0.0)


def deployed(
    folder: Path, scenario: str = SUMMED, grading: str = "off", clients: int = 3
) -> tuple[Deployment, list[Path]]:
    folder.mkdir()
    (folder / "small.toml").write_text(scenario)
    made = Deployment.create(
        folder / "federation",
        clients,
        scenario=folder / "small.toml",
        grading=grading,
        sampling="agreed",  # type: ignore[arg-type]
    )
    return made, [made.folder / "clients" / str(k) / "client.toml" for k in range(clients)]


class Leaving(OwnedGrid):
    """Client 1's masked vector is lost in round 2; client 0 is gone when round 3's masks are to be removed.

    Each question is answered in a process of its own, as Flower's SuperNodes do.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.left: list[Message] = []  # all that ever left a client that trained

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        arrived = []
        for message in messages:
            (reply,) = super().send_and_receive([message])
            if message.metadata.message_type == "train":
                self.left.append(reply)
                round = message.content.config_records["config"]["server-round"]
                step = message.content.config_records[RECORD]["step"]
                client = self.clients[message.metadata.dst_node_id]
                if (round, step, client) in {(2, "mask", 1), (3, "unmask", 0)}:
                    reply = Message(Error(0, "the node is gone"), reply_to=message)
            arrived.append(reply)
        return arrived

    def _answer(self, message: Message) -> Message:
        node, (here, there) = message.metadata.dst_node_id, FORK.Pipe(duplex=False)

        def work() -> None:
            reply = super(Leaving, self)._answer(message)
            there.send_bytes(message_to_proto(reply).SerializeToString())
            there.send_bytes(context_to_proto(self._contexts[node]).SerializeToString())

        child = forked(work)
        there.close()
        assert here.poll(60)
        reply = message_from_proto(ProtoMessage.FromString(here.recv_bytes()))
        assert here.poll(60)
        self._contexts[node] = context_from_proto(ProtoContext.FromString(here.recv_bytes()))
        child.join()
        return reply


@pytest.mark.usefixtures("identity")
def test_a_deployment_trains_on_sums_through_drop_outs_and_attacks_the_complete_ones(
    tmp_path: Path,
) -> None:
    deployment, owners = deployed(tmp_path / "a", grading="scores")
    terms = {"group": 3, "threshold": 2, "clip": 1.0}
    assert OwnerConfig.load(owners[1]).secure_sum == terms, "init writes what the owner agrees to"
    run, _ = deployment.begin("one")
    grid = Leaving(run.scenario().protocol, owners)
    with in_memory.flower():
        federate(run, grid)
    assert len(grid.left) == 3 * 3 * 5 - 2, (
        "five answers of each in each round; one was not asked to confirm and unmask"
    )
    assert all({*reply.content} <= {RECORD, ARRAYS} for reply in grid.left), "no update by itself ever left"
    serve(run, LocalExecutor())
    with run.ledger() as ledger:
        seen = {(o["round"], o["client"]): (o["status"], o["reason"], o["examples"]) for o in ledger.observations()}
        assert ledger.progress().failed == 0
        scores = list(ledger.scores())
    assert set(seen) == {(1, 0), (2, 0), (2, 1), (3, 0)}, "one entry for a group, and who dropped out"
    assert seen[1, 0] == ("accepted", "", 3) and seen[3, 0] == ("accepted", "", 3), "the vector counts, once it came"
    assert (seen[2, 0][0], seen[2, 0][2]) == ("accepted", 2) and "without client 1" in seen[2, 0][1]
    assert seen[2, 1][0] == "missing" and "dropped out" in seen[2, 1][1]
    assert {row["value"] for row in scores if row["metric"] == "psnr"} <= {None}, (
        "no client holds all examples of a sum"
    )
    attacked = {(row["round"], row["client"]) for row in scores if row["attack"] == "inverting_gradients"}
    assert attacked == {(1, 0), (3, 0)}, "the complete sums"


@pytest.mark.usefixtures("identity")
def test_the_model_is_that_without_a_secure_sum(tmp_path: Path) -> None:
    """Up to fixed point: a level is 1.2e-7, and an average of three moves less."""
    models = {}
    for name, text in {"summed": SUMMED, "plain": SCENARIO}.items():
        deployment, owners = deployed(tmp_path / name, text)
        run, _ = deployment.begin("one")
        train_owned(run, owners)
        models[name] = load_file(run.model)
    for key, value in models["plain"].items():
        torch.testing.assert_close(models["summed"][key], value, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize(
    ("mine", "scenario", "reason"),
    [
        pytest.param(
            {"group": 3, "threshold": 2, "clip": 1.0},
            SCENARIO,
            "this client sends its update only in a secure sum",
            marks=pytest.mark.full,
        ),
        (None, SUMMED, "this client's owner has agreed to no secure sum"),
        ({"group": 3, "threshold": 3, "clip": 1.0}, SUMMED, "does not answer that question of its secure sum"),
        pytest.param(
            {"group": 3, "threshold": 2, "clip": 2.0},
            SUMMED,
            "does not answer that question of its secure sum",
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_owner_who_has_agreed_to_something_else_sends_nothing(
    tmp_path: Path, mine: dict[str, object] | None, scenario: str, reason: str
) -> None:
    deployment, owners = deployed(tmp_path / "a", scenario)
    tables = {k: v for k, v in tomllib.loads(owners[2].read_text()).items() if k != "secure_sum"}
    owners[2].write_text(tomli_w.dumps(tables | ({} if mine is None else {"secure_sum": mine})))
    run, _ = deployment.begin("one")
    train_owned(run, owners)
    with run.ledger() as ledger:
        reasons = {o["reason"] for o in ledger.observations() if o["client"] == 2}
    log = (owners[2].parent / "state" / "log.jsonl").read_text()
    assert reason in log and '"sent"' not in log
    assert len(reasons) == 1 and ("dropped out" in str(reasons) or reason in str(reasons))


@pytest.mark.parametrize(
    "table",
    ["group = 3", "group = 3\nclip = 1.0\n[[model.defense]]\nuse = 'nothing'"],  # without clip; unknown
)
def test_terms_that_a_deployment_cannot_keep_are_refused_at_the_start(tmp_path: Path, table: str) -> None:
    with pytest.raises(SpecError):
        deployed(tmp_path / "a", SCENARIO + f"[secure_sum]\n{table}\n")
    norm = SCENARIO.replace('use = "mlp"\nhidden = [16]', 'use = "convnet"\nwidth = 1\nnorm = "batch"')
    with pytest.raises(SpecError):
        deployed(tmp_path / "b", norm + "[secure_sum]\ngroup = 3\nclip = 1.0\n")


def test_five_clients_with_threshold_three_are_refused_unless_asked_for_by_name(tmp_path: Path) -> None:
    text = SCENARIO.replace("clients = 3", "clients = 5") + "[secure_sum]\ngroup = 5\nthreshold = 3\nclip = 1.0\n"
    path = tmp_path / "five.toml"
    path.write_text(text)
    for table in ("group = 5\nthreshold = 3\nclip = 1.0", "group = 5"):  # without clip it cannot be real
        path.write_text(text.split("[secure_sum]")[0] + f"[secure_sum]\n{table}\n")
        with pytest.raises(SpecError):
            Deployment.create(tmp_path / "federation", 5, scenario=path)
    path.write_text(text + "colluders = 0\n")
    made = Deployment.create(tmp_path / "federation", 5, scenario=path)
    owner = OwnerConfig.load(made.folder / "clients" / "4" / "client.toml")
    (words,) = [result.message for result in check_owner(owner) if result.name == "secure sum"]
    assert "2 may drop" in words and "up to 0" in words
