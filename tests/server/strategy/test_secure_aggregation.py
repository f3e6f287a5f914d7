"""The server of a secure sum: what the wrapped strategy sees, whoever drops out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import Tensor

from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.client.components import SpecError
from fedgauge.client.deployment.secure_sum import PairwiseMasking
from fedgauge.client.deployment.secure_sum_mod import RECORD, secure_sum
from fedgauge.client.federation import Federation
from fedgauge.client.inspection.policy import REASON, WITHHELD
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import Tape
from fedgauge.server.strategy.reply_checks import CheckedStrategy, RoundReplies
from fedgauge.server.strategy.secure_aggregation import NO_SUM, SUMMED, SecureSumStrategy
from fedgauge.server.update_recorder import UpdateRecorder
from fedgauge.server.views.gallery import Gallery
from fedgauge.server.views.snapshot import RunSnapshot

STEPS = ("advertise", "share", "mask", "confirm", "unmask")
THETA = {"w": torch.tensor([[1.0, 2.0, 3.0]]), "n": torch.tensor(4), "b": torch.tensor([-1.0])}
FLOATS = {k: t for k, t in THETA.items() if k != "n"}


def update_of(client: int, round: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(100 * client + round)
    return {k: 0.2 * torch.randn(t.shape, generator=rng) for k, t in THETA.items() if t.is_floating_point()}


def app_of(terms: PairwiseMasking, replies: Literal["updates", "weights"] = "weights") -> ClientApp:
    """Somebody's ClientApp: client c moves by update_of(c, round) and has c + 1 examples."""
    app = ClientApp()

    @app.train(mods=[secure_sum(terms, replies)])
    def train(message: Message, context: Context) -> Message:
        client, round = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])  # type: ignore[arg-type,call-overload,index]
        sent = message.content.array_records["arrays"].to_torch_state_dict()
        moved = update_of(client, round)
        weights = {k: t + moved[k] if k in moved else t + client for k, t in sent.items()}
        metrics = MetricRecord({"num-examples": client + 1, "loss": 0.1 * client})
        arrays = ArrayRecord(weights if replies == "weights" else moved)
        return Message(RecordDict({"model": arrays, "m": metrics}), reply_to=message)

    return app


class Recorder(FedAvg):
    """FedAvg that keeps what it was handed; it asks all clients in their order."""

    def __init__(self) -> None:
        super().__init__(1.0, 0.0, 1, 0, 1)
        self.handed: list[list[Message]] = []

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.handed.append(list(replies))
        return super().aggregate_train(server_round, self.handed[-1])


def losing(grid: Any, lost: dict[str, set[int]]) -> Callable[[int, list[Message]], list[Message]]:
    """Replies of some clients to some questions never arrive."""

    def tamper(round: int, replies: list[Message]) -> list[Message]:
        step = grid.sent[-1].content.config_records[RECORD]["step"]
        return [m for m in replies if grid.nodes[m.metadata.src_node_id] not in lost.get(step, set())]

    return tamper


def train(
    kit: Any,
    terms: PairwiseMasking,
    clients: int,
    lost: dict[str, set[int]] | None = None,
    rounds: int = 1,
    theta: dict[str, Tensor] = THETA,
) -> tuple[dict[str, Tensor], Recorder, Any]:
    """Weights after some rounds, what FedAvg was handed, and the grid."""
    grid, recorder = kit.MemoryGrid("", clients, app=app_of(terms)), Recorder()
    grid.tamper = losing(grid, lost or {})
    result = SecureSumStrategy(recorder, terms).start(grid, ArrayRecord(theta), rounds)
    return dict(result.arrays.to_torch_state_dict()) if result.arrays else dict(theta), recorder, grid


def expected(members: Any, theta: dict[str, Tensor], round: int = 1) -> dict[str, Tensor]:
    """theta + the mean update of some clients, by their examples, in float64."""
    total = sum(c + 1 for c in members)
    moved = {k: sum((c + 1) / total * update_of(c, round)[k].double() for c in members) for k in ("w", "b")}
    return {k: (t.double() + moved[k]).float() if k in moved else t for k, t in theta.items()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


FIVE = PairwiseMasking(group=5, clip=2.0, threshold=3, colluders=0)


@pytest.mark.product
@pytest.mark.parametrize("gone", range(5))
@pytest.mark.parametrize("step", STEPS)
def test_any_one_of_five_may_drop_out(kit: Any, step: str, gone: int) -> None:
    """What the strategy is handed is the sum of the fixed-point integers of the others, to the last bit."""
    _, recorder, _ = train(kit, FIVE, 5, {step: {gone}})
    members = [c for c in range(5) if c != gone or step in ("confirm", "unmask")]
    flat = [torch.cat([update_of(c, 1)[k].flatten() for k in ("w", "b")]) for c in members]
    theta = torch.cat([THETA[k].flatten() for k in ("w", "b")])
    moved = [((theta + u).double() - theta.double()).numpy() for u in flat]  # weights travel in float32
    total = np.sum([FIVE.quantise(u, c + 1) for u, c in zip(moved, members, strict=True)], axis=0, dtype=np.uint64)
    mean, examples = FIVE.mean(total)
    (reply,) = (m for m in recorder.handed[0] if not m.has_error())
    arrays = reply.content.array_records["arrays"].to_torch_state_dict()
    found = torch.cat([arrays[k].flatten() for k in ("w", "b")])
    assert torch.equal(found, (theta.double() + torch.from_numpy(mean)).float())
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": examples}
    assert examples == sum(c + 1 for c in members)
    assert int(arrays["n"]) == 4, "an integer is nobody's update"


@pytest.mark.parametrize("step", STEPS)
def test_below_the_threshold_there_is_no_update_and_training_goes_on(kit: Any, step: str) -> None:
    intakes: list[RoundReplies] = []
    grid = kit.MemoryGrid("", 5, app=app_of(FIVE, "updates"))
    lost = losing(grid, {step: {0, 2, 4}})
    grid.tamper = lambda round, replies: lost(round, replies) if round == 1 else replies
    checked = CheckedStrategy(Recorder(), intakes.append, clients=dict(grid.nodes))
    result = SecureSumStrategy(checked, FIVE, "updates").start(grid, ArrayRecord(FLOATS), 2)
    assert [len(i.accepted) for i in intakes] == [0, 1]
    (reason,) = {s.reason for s in intakes[0].refused}
    assert "2 clients" in reason and "threshold 3" in reason
    assert {(s.client, s.status) for s in intakes[0].refused} == {(c, "missing") for c in range(5)}
    assert distance(dict(result.arrays.to_torch_state_dict()), expected(range(5), FLOATS, 2)) < 1e-6


def test_a_curious_server_tapes_one_update_for_each_group(kit: Any, tmp_path: Path) -> None:
    terms = PairwiseMasking(group=4, clip=2.0, threshold=3)
    scenario = kit.scenario(clients=7)
    grid = kit.MemoryGrid("", 7, app=app_of(terms, "updates"))
    grid.tamper = losing(grid, {"mask": {1}})
    with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        ledger.add_attacks(scenario.plan, {p.name: "" for p in scenario.plan.attacks})
        recorder = UpdateRecorder(ledger, Tape(tmp_path / "tape"), scenario.plan)
        checked = CheckedStrategy(InOrder(), recorder, clients=dict(grid.nodes))
        SecureSumStrategy(checked, terms, "updates").start(grid, ArrayRecord(FLOATS), 1)
        rows = ledger.observations()
        taped = {
            o["client"]: recorder.tape.read(1, o["client"], o["digest"]).update
            for o in rows
            if o["status"] == "accepted"
        }
    assert sorted(taped) == [0, 4], "groups of four and three"
    for first, members in ((0, (0, 2, 3)), (4, (4, 5, 6))):
        mean = {k: t - FLOATS[k] for k, t in expected(members, FLOATS).items()}
        assert distance(taped[first], mean) < 1e-6
    assert {o["client"]: o["examples"] for o in rows if o["status"] == "accepted"} == {0: 1 + 3 + 4, 4: 5 + 6 + 7}
    reasons = {o["client"]: o["reason"] for o in rows if o["status"] == "missing"}
    assert "dropped out" in reasons.pop(1)
    assert reasons.keys() == {2, 3, 5, 6} and all("3 clients" in words for words in reasons.values())


@pytest.mark.parametrize(("guarded", "summed"), [({1}, 4), ({1, 2, 3, 4}, 0)])
def test_the_server_learns_whose_guards_withheld_their_updates(kit: Any, guarded: set[int], summed: int) -> None:
    """So that weights over which most refuse can be taken back; in a sum of the others, and where there is none."""

    def withhold(round: int, replies: list[Message]) -> list[Message]:
        asked = {m.metadata.dst_node_id: m for m in grid.sent[-5:]}
        silent = [
            n for n in asked if asked[n].content.config_records[RECORD]["step"] == "mask" and grid.nodes[n] in guarded
        ]
        rest = [m for m in replies if m.metadata.src_node_id not in silent]
        return rest + [Message(Error(WITHHELD, REASON), reply_to=asked[node]) for node in silent]

    grid, inner = kit.MemoryGrid("", 5, app=app_of(FIVE)), Recorder()
    grid.tamper = withhold
    SecureSumStrategy(inner, FIVE).start(grid, ArrayRecord(THETA), 1)
    codes = {grid.nodes[m.metadata.src_node_id]: m.error.code for m in inner.handed[0] if m.has_error()}
    assert {client for client, code in codes.items() if code == WITHHELD} == guarded
    assert list(codes.values()).count(SUMMED) == max(summed - 1, 0)


class InOrder(FedAvg):
    """All clients, in the order in which the door lists them: stock strategies draw another one."""

    def __init__(self) -> None:
        super().__init__(1.0, 0.0, 1, 0, 1)

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        content = RecordDict({"arrays": arrays, "config": config})
        return [Message(content, dst_node_id=node, message_type="train") for node in grid.get_node_ids()]


@pytest.mark.parametrize(
    ("clients", "group", "threshold", "sizes", "left"),
    [
        (7, 4, 3, [4, 3], 0),
        (12, 5, 3, [4, 4, 4], 0),
        (6, 5, 4, [5], 1),
        (5, 5, 3, [5], 0),
        (2, 5, 3, [], 2),
        (4, 4, 4, [4], 0),
        (7, 4, 4, [4], 3),
    ],
)
def test_groups_are_of_nearly_equal_size_and_never_below_the_threshold(
    kit: Any, clients: int, group: int, threshold: int, sizes: list[int], left: int
) -> None:
    terms = PairwiseMasking(group, 2.0, threshold, colluders=0)
    grid, inner = kit.MemoryGrid("", clients, app=app_of(terms)), Recorder()
    SecureSumStrategy(inner, terms).start(grid, ArrayRecord(THETA), 1)
    codes = [m.error.code for m in inner.handed[0] if m.has_error()]
    assert len(inner.handed[0]) == clients
    assert codes.count(SUMMED) == sum(sizes) - len(sizes)
    assert codes.count(NO_SUM) == left
    assert sorted((len(members) for members in groups_of(grid)), reverse=True) == sizes


def groups_of(grid: Any) -> list[set[int]]:
    """The groups, by the sessions in which clients were asked for keys."""
    found: dict[bytes, set[int]] = {}
    for m in grid.sent:
        question = m.content.config_records[RECORD]
        if question["step"] == "advertise":
            found.setdefault(question["session"], set()).add(grid.nodes[m.metadata.dst_node_id])
    return list(found.values())


# ------------------------------------------------------------------------------------------- the ideal one of simulations

EIGHT: dict[str, Any] = {"clients": 8, "data": {"use": "mnist5k", "batch_size": 1, "auxiliary": 64}}


def simulated(
    kit: Any, scenario: Any, rounds: int = 3, inner: Strategy | None = None, **grid: Any
) -> tuple[dict[str, Tensor], list[RoundReplies], CheckedStrategy]:
    """Weights after some rounds of the scenario's real clients, and what the door recorded."""
    params, buffers = Federation(scenario.protocol).initial()
    network, intakes = kit.grid(scenario, **grid), []
    validator = CheckedStrategy(
        inner or FedAvg(1.0, 0.0, 1, 0, 1), intakes.append, buffers, 1, dict(network.nodes), protocol=scenario.protocol
    )
    result = validator.start(network, ArrayRecord(params), rounds)
    return (dict(result.arrays.to_torch_state_dict()) if result.arrays else params), intakes, validator


def test_the_tap_and_the_strategy_see_one_reply_for_each_group(kit: Any) -> None:
    scenario, recorder = kit.scenario(**EIGHT, secure_sum={"group": 4}), Recorder()
    _, intakes, _ = simulated(kit, scenario, 2, recorder)
    federation = Federation(scenario.protocol)
    for intake, handed in zip(intakes, recorder.handed, strict=True):
        assert [(a.client, a.examples) for a in intake.accepted] == [(0, 4), (4, 4)]
        assert intake.refused == ()
        for seen, reply in zip(intake.accepted, handed, strict=True):
            truth = federation.client_update(intake.params, intake.buffers, seen.client, intake.round)
            assert distance(seen.update, truth) < 1e-7
            weights = dict(reply.content.array_records["arrays"].to_torch_state_dict())
            assert distance(weights, {k: t + seen.update[k] for k, t in intake.params.items()}) == 0
            assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 4}


def test_a_reply_that_the_door_refuses_costs_its_group_the_round(kit: Any) -> None:
    def tamper(round: int, replies: list[Message]) -> list[Message]:
        for m in replies:
            if grid_of[0].nodes[m.metadata.src_node_id] == 5:
                m.content.array_records["update"]["1.bias"] = ArrayRecord({"x": torch.full((8,), float("nan"))})["x"]
        return replies

    scenario = kit.scenario(**EIGHT, secure_sum={"group": 4, "threshold": 3})
    grid_of: list[Any] = [kit.grid(scenario, tamper=tamper)]
    params, intakes = Federation(scenario.protocol).initial()[0], []
    validator = CheckedStrategy(
        FedAvg(1.0, 0.0, 1, 0, 1), intakes.append, clients=dict(grid_of[0].nodes), protocol=scenario.protocol
    )
    validator.start(grid_of[0], ArrayRecord(params), 1)
    assert [a.client for a in intakes[0].accepted] == [0]
    told = {s.client: s.reason for s in intakes[0].refused}
    assert "1.bias" in told.pop(5)
    assert set(told) == {4, 6, 7} and all("client 5" in words for words in told.values())


def test_a_secure_sum_of_some_clients_is_refused(kit: Any) -> None:
    with pytest.raises(SpecError):
        kit.scenario(**EIGHT, secure_sum={"group": 4}, strategy={"use": "FedAvg", "fraction_train": 0.5})


def test_a_run_under_a_secure_sum_is_replayed_attacked_and_shown(kit: Any, tmp_path: Path) -> None:
    """Four clients' digits from one update, from the tape to the gallery; the same numbers of rows as for a batch of four."""
    attack = [{"use": "inverting_gradients", "iterations": 20}]
    audit = {"executor": "local", "rounds": [1]}
    scenario = kit.scenario(**EIGHT, attack=attack, audit=audit, secure_sum={"group": 4})
    run = Run.create(tmp_path / "run", scenario)
    federation = Federation(scenario.protocol)
    with run.ledger() as ledger:
        ledger.add_attacks(scenario.plan, {p.name: knowledge_card(federation, p) for p in scenario.plan.attacks})
        recorder = UpdateRecorder(ledger, run.tape(), scenario.plan)
        network = kit.grid(scenario)
        validator = CheckedStrategy(
            FedAvg(1.0, 0.0, 1, 0, 1), recorder, {}, 1, dict(network.nodes), protocol=scenario.protocol
        )
        validator.start(network, ArrayRecord(federation.initial()[0]), 1)
    serve(run, LocalExecutor(), scenario)
    with run.ledger() as ledger:
        assert ledger.meta()["replay"] == "ok", ledger.meta()["replay_detail"]
        assert [(o["client"], o["examples"]) for o in ledger.observations()] == [(0, 4), (4, 4)]
        cards = {row["name"]: row["knowledge"] for row in ledger._db.execute("SELECT name, knowledge FROM attacks")}
        scores = ledger._db.execute(
            "SELECT attack, client, example, value FROM scores WHERE metric = 'psnr' AND status = 'converged'"
        ).fetchall()
    assert "update, sum of 4" in cards["inverting_gradients"]
    mine = {(s["client"], s["example"]): s["value"] for s in scores if s["attack"] == "inverting_gradients"}
    assert sorted(mine) == [(c, e) for c in (0, 4) for e in range(4)]
    wrong = {(s["client"], s["example"]) for s in scores if s["attack"] == "wrong_client(inverting_gradients)"}
    assert wrong == set(mine)
    gallery = Gallery(RunSnapshot(run))
    assert gallery.rows_at(1, 4) == [int(federation.shards.rows_at(c, 1)[0]) for c in (4, 5, 6, 7)]
