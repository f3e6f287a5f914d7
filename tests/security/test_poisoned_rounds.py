"""One client that spoils a round: it is left out by name, and the training is the one in which it did not answer."""

import math
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, Strategy
from torch import Tensor

from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.server.app import federate
from fedgauge.server.store.checkpoint import Checkpoint
from fedgauge.server.store.ledger_types import DEPLOYMENT, ROUND_NOTE, STARTED, USUAL_NORM, Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import read_tensors
from fedgauge.server.strategy import round_checks
from fedgauge.server.strategy.aggregation import Aggregation
from fedgauge.server.strategy.model_check import ModelCheck
from fedgauge.server.strategy.reply_checks import AcceptedReply, ReplyRejected, tensors_of
from fedgauge.server.strategy.strategy_state import StateSnapshot, not_finite
from fedgauge.server.strategy.validator import UpdateValidator
from fedgauge.server.views.notices import notices
from fedgauge.server.views.reading import Reading
from fedgauge.simulations.reports.report import write_report
from fedgauge.simulations.run.create import create_run
from fedgauge.simulations.run.in_memory import MemoryGrid

Spoil = Callable[[Message], Message]
HOSTILE = 3
TABLES: dict[str, Any] = {
    "seed": 3,
    "rounds": 4,
    "clients": 4,
    "data": {"use": "mnist5k", "batch_size": 4, "auxiliary": 64},
    "model": {"use": "mlp", "hidden": [8]},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "inverting_gradients", "iterations": 2}],
    "audit": {"executor": "local", "rounds": [1]},
}


class Poisoned(MemoryGrid):
    """Real clients, of which the last one's replies are spoiled in some rounds."""

    def __init__(self, protocol: Protocol, spoil: Mapping[int, Spoil]) -> None:
        super().__init__(protocol)
        self.spoil = spoil

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        if message.metadata.message_type != "train" or self.clients[message.metadata.dst_node_id] != HOSTILE:
            return reply
        round = int(str(message.content.config_records["config"]["server-round"]))
        return self.spoil[round](reply) if round in self.spoil else reply


def absent(reply: Message) -> Message:
    return Message(Error(1, "away"), metadata=reply.metadata)  # type: ignore[call-overload, no-any-return]


def filled(value: float, record: str = "update", name: str = "") -> Spoil:
    """All arrays of a record, or those whose name has a part in it, filled with a value."""

    def spoil(reply: Message) -> Message:
        tensors = reply.content.array_records[record].to_torch_state_dict()
        changed = {k: torch.full_like(t, value) if name in k else t for k, t in tensors.items()}
        reply.content[record] = ArrayRecord(changed)
        return reply

    return spoil


def claiming(examples: float) -> Spoil:
    def spoil(reply: Message) -> Message:
        reply.content["metrics"] = MetricRecord({"num-examples": examples})
        return reply

    return spoil


def trained(folder: Path, spoil: Mapping[int, Spoil], **changes: Any) -> Run:
    scenario = Scenario.from_tables(TABLES | changes)
    run = create_run(scenario, folder)
    federate(run, Poisoned(scenario.protocol, spoil))
    return run


def refused(run: Run) -> dict[tuple[int, int], str]:
    with run.ledger() as ledger:
        seen = [o for o in ledger.observations() if o["status"] != "accepted"]
    return {(o["round"], o["client"]): o["reason"] for o in seen}


def identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[k]) for k, t in a.items())


def model(run: Run) -> dict[str, Tensor]:
    return read_tensors(run.model)


# ------------------------------------------------------------------------------------- one client against all others


STRATEGIES: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FedAvgM": {"server_momentum": 0.9},
    "FedAdam": {},
    "FedYogi": {},
    "FedAdagrad": {},
    "FedMedian": {},
    "Krum": {},
}


@pytest.mark.parametrize(
    ("use", "value"),
    [
        ("FedAvg", 1e20),
        ("FedAdam", 1e20),
        *(pytest.param(use, 1e20, marks=pytest.mark.full) for use in STRATEGIES if use not in ("FedAvg", "FedAdam")),
        pytest.param("FedAvg", 1e10, marks=pytest.mark.full),
        pytest.param("FedAdam", 1e10, marks=pytest.mark.full),
    ],
)
def test_a_huge_update_costs_its_client_the_round_and_nobody_else_a_bit(tmp_path: Path, use: str, value: float) -> None:
    """1e20 everywhere: its mean is finite, its square and the network's output are not; a moment would never recover."""
    strategy = {"use": use, **STRATEGIES[use]}
    run = trained(tmp_path / "hostile", {2: filled(value)}, strategy=strategy)
    alone = trained(tmp_path / "alone", {2: absent}, strategy=strategy)
    assert identical(model(run), model(alone))
    assert refused(run).keys() == refused(alone).keys() == {(2, HOSTILE)}
    assert "out of all proportion" in refused(run)[2, HOSTILE]
    with run.ledger() as ledger:
        assert all(row["loss"] is not None and row["loss"] < 20 for row in ledger.rounds())


def test_who_spoils_every_round_does_not_stop_the_training(tmp_path: Path) -> None:
    run = trained(tmp_path / "hostile", dict.fromkeys(range(1, 5), filled(-1e19)))
    alone = trained(tmp_path / "alone", dict.fromkeys(range(1, 5), absent))
    assert identical(model(run), model(alone))
    assert refused(run).keys() == {(round, HOSTILE) for round in range(1, 5)}


def test_a_training_that_was_interrupted_judges_norms_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", {4: filled(1e20)}, strategy={"use": "FedAdam"})

    def killed(reply: Message) -> Message:
        raise KeyboardInterrupt

    scenario = Scenario.from_tables(TABLES | {"strategy": {"use": "FedAdam"}})
    run = create_run(scenario, tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        federate(run, Poisoned(scenario.protocol, {3: killed}))
    kept = Checkpoint.read(run.folder)
    assert kept is not None and kept.round == 2 and kept.usual_norm > 0
    federate(run, Poisoned(scenario.protocol, {4: filled(1e20)}))
    assert identical(model(run), model(whole))
    assert refused(run) == refused(whole)


class AloneAtFirst(Poisoned):
    """Only the hostile client answers in the first round."""

    def _answer(self, message: Message) -> Message:
        reply, client = super()._answer(message), self.clients[message.metadata.dst_node_id]
        config = message.content.config_records.get("config")
        return absent(reply) if config and config["server-round"] == 1 and client != HOSTILE else reply


@pytest.mark.parametrize(
    "use",
    ["FedAdam", *(pytest.param(u, marks=pytest.mark.full) for u in ("FedAvg", "FedAvgM", "FedYogi", "FedAdagrad"))],
)
def test_what_an_undone_round_brought_is_no_measure_for_later_ones(tmp_path: Path, use: str) -> None:
    """Nor in a run that is started again after it: an update of 1e20 would make one of 1e10 usual."""
    scenario = Scenario.from_tables(TABLES | {"strategy": {"use": use, **STRATEGIES[use]}})
    runs = {name: create_run(scenario, tmp_path / name) for name in ("alone", "hostile", "killed")}
    federate(runs["alone"], AloneAtFirst(scenario.protocol, {1: absent, 2: absent}))
    federate(runs["hostile"], AloneAtFirst(scenario.protocol, {1: filled(1e20), 2: filled(1e10)}))

    def killed(reply: Message) -> Message:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federate(runs["killed"], AloneAtFirst(scenario.protocol, {1: filled(1e20), 2: killed}))
    kept = Checkpoint.read(runs["killed"].folder)
    assert kept is not None and (kept.round, kept.usual_norm) == (1, 0.0)
    federate(runs["killed"], AloneAtFirst(scenario.protocol, {2: filled(1e10)}))
    for run in (runs["hostile"], runs["killed"]):
        assert "out of all proportion" in refused(run)[2, HOSTILE]
        assert identical(model(run), model(runs["alone"]))


def test_who_spoils_a_secure_sum_gets_no_other_member_blamed(tmp_path: Path) -> None:
    """The server sees sums alone, each under its first member's number."""
    tables = TABLES | {"secure_sum": {"group": 2, "threshold": 2}}
    scenario = Scenario.from_tables(tables)
    run = create_run(scenario, tmp_path / "run")
    federate(run, Poisoned(scenario.protocol, {2: filled(1e20)}))
    (where, reason), *more = refused(run).items()
    assert where == (2, HOSTILE - 1) and not more
    assert reason.startswith(f"it is the mean of clients {HOSTILE - 1}, {HOSTILE}, not one client's update: ")
    with run.ledger() as ledger:
        assert f"it is the mean of clients {HOSTILE - 1}, {HOSTILE}" in ledger.meta()[f"{ROUND_NOTE}2"]


def test_of_a_deployments_sum_no_single_member_is_blamed() -> None:
    validator = UpdateValidator(
        FedAvg(min_available_nodes=1), clients={1: 0}, groups=lambda round: [[0, 3, 4], [1, 2]], strict=True
    )
    found = validator._as_group(1, Participation(0, "rejected", "its update's norm is 9"))
    assert found.reason == "it is the mean of clients 0, 3, 4, not one client's update: its update's norm is 9"
    assert validator._as_group(1, Participation(7, "rejected", "why")).reason == "why"


def test_what_went_wrong_and_a_bound_that_would_prevent_it_are_shown(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", {2: filled(1e20)}, rounds=2)
    reading = Reading(run)
    with reading.now():
        words = " ".join(sentence for sentence, _ in notices(reading))
        usual = float(reading.meta[USUAL_NORM])
    assert f"round 2: client {HOSTILE}: its update's norm" in words
    assert f"consider [validator] max_norm = {3 * usual:.2g}." in words
    assert "out of all proportion" in write_report(run).read_text()


def test_an_operators_bound_refuses_what_is_above_it(tmp_path: Path) -> None:
    bounded = {"max_norm": 5.0}
    run = trained(tmp_path / "run", {2: filled(1.0)}, rounds=2, validator=bounded)
    alone = trained(tmp_path / "alone", {2: absent}, rounds=2, validator=bounded)
    assert "above [validator] max_norm = 5" in refused(run)[2, HOSTILE]
    assert identical(model(run), model(alone))


# ---------------------------------------------------------------------------------------------------- the aggregation


def reply(client: int, value: float, examples: int = 1) -> tuple[AcceptedReply, Message]:
    update = {"w": torch.full((3,), value)}
    message = Message(dst_node_id=client, message_type="train", content=_content(update, examples))
    return AcceptedReply(client, update, examples, {}), message


def _content(update: Mapping[str, Tensor], examples: int) -> RecordDict:

    weights = ArrayRecord({k: t + 1.0 for k, t in update.items()})
    return RecordDict({"arrays": weights, "metrics": MetricRecord({"num-examples": examples})})


def aggregation(strategy: Strategy, **options: Any) -> Aggregation:
    params = {"w": torch.ones(3)}
    usable = options.pop("usable", lambda params, buffers: "")
    return Aggregation(strategy, 1, params, {}, usable, lambda round, client: True)


def small(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> str:
    return "the model's loss is not finite" if float(params["w"].abs().max()) > 10 else ""


def test_replies_that_spoil_a_round_together_are_found_and_the_harmless_ones_stay() -> None:
    passed = [reply(c, v) for c, v in enumerate([0.1, 400.0, 0.2, -0.1, 500.0, 25.0, 0.3])]
    result, left_out, notes = aggregation(FedAvg(fraction_evaluate=0.0), usable=small).of(passed)
    assert sorted(left_out) == [1, 4]
    assert result.arrays is not None and not result.fault
    kept = [0.1, 0.2, -0.1, 25.0, 0.3]
    torch.testing.assert_close(result.arrays["w"].numpy(), np.full(3, 1 + sum(kept) / 5, np.float32))
    assert notes == ["round 1: the model's loss is not finite with the updates of clients 1, 4, which were left out"]


@pytest.mark.parametrize("clients", [2, 3, 20, 41])
def test_who_spoils_a_round_by_a_small_update_is_left_out_alone(clients: int) -> None:
    sizes = [float(clients - i) for i in range(clients)]
    for guilty in ([clients - 1], [clients // 2], [0, clients - 1], [clients // 3, clients - 2, clients - 1]):
        if len(set(guilty)) == clients:
            continue
        found = round_checks.spoilers(sizes, lambda kept, guilty=guilty: not set(guilty) & set(kept))  # type: ignore[misc]
        assert found == sorted(set(guilty))
    tried: list[int] = []
    assert round_checks.spoilers(sizes, lambda kept: bool(tried.append(len(kept)))) == []
    assert len(tried) < 100 and 0 not in tried, "nobody's reply at all makes no sound round"


def test_a_round_that_nobody_alone_spoils_is_undone_and_charged_to_nobody() -> None:
    strategy = FedAvgM(fraction_evaluate=0.0, server_momentum=0.9, server_learning_rate=1e38)
    strategy.current_arrays = ArrayRecord({"w": torch.ones(3)})
    strategy.momentum_vector = momentum = [np.zeros(3, np.float32)]
    result, left_out, notes = aggregation(strategy).of([reply(c, 100.0 + c) for c in range(3)])
    assert (result.arrays, left_out) == (None, {})
    assert "the next w is not finite whoever is left out, so the round was undone" in notes[0]
    assert strategy.momentum_vector is momentum and not momentum[0].any()
    assert strategy.current_arrays["w"].numpy().tolist() == [1, 1, 1]


def test_a_model_that_was_broken_before_is_not_charged_to_anybody() -> None:
    passed = [reply(0, 0.1), reply(1, 0.2)]
    result, left_out, notes = aggregation(FedAvg(fraction_evaluate=0.0), usable=lambda p, b: "broken").of(passed)
    assert result.arrays is not None and not left_out and not notes


def test_moments_that_become_infinite_are_seen_though_the_weights_stay_finite() -> None:
    strategy = FedAdam(fraction_evaluate=0.0)
    strategy.current_arrays = {"w": np.ones(3, np.float32)}
    result, left_out, _ = aggregation(strategy).of([reply(0, 0.1), reply(1, 1e30), reply(2, 0.2)])
    assert list(left_out) == [1] and result.arrays is not None
    assert left_out[1].reason == "left out, as with its update the strategy's state is not finite"
    assert not not_finite(strategy)


class Nested(FedAvg):
    """A user's strategy with state of every kind, all of it changed in place."""

    def __init__(self, inner: Strategy | None = None) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.inner = inner
        self.layers = {"a": [np.zeros(2)], "b": (torch.zeros(2),)}
        self.seen = {1}
        self.network = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.alias = self.layers
        self.count = 0
        self.itself = self

    def spoil(self) -> None:
        self.layers["a"][0] += math.inf
        self.layers["a"].append(np.ones(1))
        self.layers["b"][0].fill_(math.nan)
        self.layers["c"] = []
        self.seen.clear()
        self.network.weight.data.fill_(math.nan)
        self.network(torch.ones(2)).backward()
        self.optimizer.step()
        self.count += 1
        if isinstance(self.inner, Nested):
            self.inner.spoil()


@pytest.mark.parametrize(
    "part", [torch.tensor([complex(0, math.inf)]), np.array([complex(math.nan)]), complex(0, math.nan)]
)
def test_complex_state_that_is_not_finite_is_seen(part: object) -> None:
    strategy = FedAvg()
    strategy.kept = part  # type: ignore[attr-defined]
    assert not_finite(strategy) == {"kept"}


def test_a_strategys_state_is_put_back_at_any_depth_and_shared_objects_stay_shared() -> None:
    strategy = Nested(Nested())
    weight, layers, array = strategy.network.weight.detach().clone(), strategy.layers, strategy.layers["a"][0]
    snapshot = StateSnapshot(strategy)
    for _ in range(2):
        strategy.spoil()
        own = {"layers.a.0", "layers.b.0", "network"}
        assert not_finite(strategy) == own | {f"inner.{name}" for name in own}
        snapshot.restore()
        for at in (strategy, strategy.inner):
            assert isinstance(at, Nested)
            assert at.count == 0 and at.seen == {1} and list(at.layers) == ["a", "b"] and at.alias is at.layers
            assert len(at.layers["a"]) == 1 and not at.layers["a"][0].any() and not at.layers["b"][0].any()
            assert not at.optimizer.state_dict()["state"]
        assert not not_finite(strategy)
    assert torch.equal(strategy.network.weight, weight)
    assert strategy.layers is layers and strategy.layers["a"][0] is array


def test_a_networks_loss_and_gradient_are_tried_and_the_network_stays_as_it_was() -> None:
    federation = Federation(Scenario.from_tables(TABLES).protocol)
    params, buffers = federation.initial()
    before, state = {k: t.clone() for k, t in federation.model.state_dict().items()}, torch.random.get_rng_state()
    check = ModelCheck(federation)
    assert check(params, buffers) == ""
    assert check({k: torch.full_like(t, 1e30) for k, t in params.items()}, buffers).startswith("the model's loss")
    assert identical(before, federation.model.state_dict()) and torch.equal(state, torch.random.get_rng_state())


# ------------------------------------------------------------------------------------------- statistics and counters


BATCHNORM = {"model": {"use": "convnet", "width": 1, "norm": "batch", "mode": "train"}, "rounds": 2}


@pytest.mark.parametrize(
    ("value", "name", "words"),
    [
        (-100.0, "running_var", "is negative, and it is a variance"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (-1e-3, "running_var", "is negative, and it is a variance"),
                (1e20, "running_mean", "out of all proportion"),
                (math.nan, "running_mean", "has entries that are not finite"),
            )
        ),
    ],
)
def test_statistics_that_no_training_brings_cost_only_their_client(
    tmp_path: Path, value: float, name: str, words: str
) -> None:
    run = trained(tmp_path / "run", {1: filled(value, "buffers", name)}, **BATCHNORM)
    alone = trained(tmp_path / "alone", {1: absent}, **BATCHNORM)
    assert identical(model(run), model(alone))
    assert refused(run).keys() == {(1, HOSTILE)} and words in refused(run)[1, HOSTILE]


def test_negative_variances_are_one_clients_fault_or_how_the_app_is() -> None:
    sent = {"n.running_var": torch.ones(2), "w": torch.zeros(2)}

    def found(*values: float) -> list[int]:
        updates = [{"n.running_var": torch.tensor([v, 1.0]) - 1, "w": torch.zeros(2)} for v in values]
        return list(round_checks.negative_variances(updates, [sent] * len(values), [1] * len(values)))

    assert found(1, 1, -100, 1) == [2]
    assert found(1, 1, -0.1, 1) == [], "their average is a variance"
    assert found(-0.3, -0.2, -0.4, 1) == [], "noise on every array: nobody is to blame"
    assert found() == []


# --------------------------------------------------------------------------------------------------- claimed examples


@pytest.mark.parametrize("claimed", [2**53, 10**9, 5, 0, -1, 0.5, math.nan])
def test_in_a_simulation_a_client_claims_what_it_trains_on(tmp_path: Path, claimed: float) -> None:
    run = trained(tmp_path / "run", {1: claiming(claimed)}, rounds=1)
    assert "num-examples must be a whole number from 1 to 4" in refused(run)[1, HOSTILE]


def test_one_client_that_is_nearly_the_whole_average_is_named() -> None:
    assert round_checks.large_share([0, 1, 2], [5, 5, 10]) == {}
    assert round_checks.large_share([4], [10**9]) == {}, "it is alone"
    words = "client 7 said 1000000000 examples, which makes it 99.9 % of an average by examples"
    assert round_checks.large_share([0, 7], [1, 10**9]) == {7: words}


@pytest.mark.parametrize("examples", [2**53, 5 * 10**7])
def test_no_view_takes_memory_by_a_number_that_a_client_said(tmp_path: Path, examples: int) -> None:
    """A run written before there was a bound: an attack came to nothing on the update of a client that claims so many."""
    run = trained(tmp_path / "run", {}, rounds=1)
    with run.ledger() as ledger:
        ledger.set_meta(mode=DEPLOYMENT, **{f"{STARTED}1": "1", f"{ROUND_NOTE}1": "x" * 10**6})
        while (lease := ledger.lease()) is not None:
            ledger.fail(lease, "came to nothing")
        with ledger._transaction() as db:
            db.execute("UPDATE observations SET examples = ?", (examples,))
    tracemalloc.start()
    try:
        assert write_report(run).stat().st_size < 10**7
        assert tracemalloc.get_traced_memory()[1] < 300_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("w", np.zeros(3, ">f4"), "w cannot be decoded"),  # torch reads neither of these two
        ("w", np.zeros(3, np.longdouble), "w cannot be decoded"),
        ("n.num_batches_tracked", np.array(-5), "is negative, and it counts batches"),
        ("n.num_batches_tracked", np.array(2**62), "must be from -9007199254740992 to 9007199254740992"),
        ("n.num_batches_tracked", np.array(1e300), "must be from -9007199254740992 to 9007199254740992"),
    ],
)
def test_odd_arrays_of_a_users_own_app_are_refused_in_words(name: str, array: Any, words: str) -> None:
    sent = {"w": torch.zeros(3), "n.num_batches_tracked": torch.tensor(0)}
    record = ArrayRecord({**ArrayRecord(sent), name: Array(array)})
    with pytest.raises(ReplyRejected, match=words):
        tensors_of(record, sent, loose=True)
