"""The check at the border: a bad reply costs its client the round, and nothing else."""

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.metadata import Metadata
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from fedgauge.server.strategy.reply_checks import CheckedStrategy, GuardReport, RoundReplies

PARAMS = {
    "conv.weight": torch.linspace(-1, 1, 12).reshape(3, 2, 2),
    "scale": torch.tensor(0.7),  # no dimensions: numpy likes to make scalars of these
    "linear.bias": torch.tensor([1e-3, -2.0, 3.0]),
}
BUFFERS = {"norm.running_mean": torch.tensor([0.5, -0.5])}
CLIENTS = 4


class Recorder(FedAvg):
    """FedAvg that keeps what the door hands it."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=CLIENTS)
        self.handed: list[dict[str, Tensor]] = []
        self.metrics: list[dict[str, Any]] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        self.handed = [dict(next(iter(m.content.array_records.values())).to_torch_state_dict()) for m in replies]
        self.metrics = [dict(next(iter(m.content.metric_records.values()))) for m in replies]
        return super().aggregate_train(server_round, replies)


class Round:
    """One round at the door: the messages that went out, and a way to answer them."""

    def __init__(self, kit: Any, buffers: dict[str, Tensor] | None = None, **options: Any) -> None:
        self.kit = kit
        self.intakes: list[RoundReplies] = []
        self.inner = Recorder()
        grid = kit.MemoryGrid("", CLIENTS)
        self.checked = CheckedStrategy(
            self.inner, self.intakes.append, buffers or {}, seed=1, clients=grid.nodes, **options
        )
        sent = self.checked.configure_train(1, ArrayRecord(PARAMS), ConfigRecord(), grid)
        by_client = sorted(sent, key=lambda m: grid.nodes[m.metadata.dst_node_id])
        self.asked: list[Message] = [kit.travel(m) for m in by_client]

    def update(self, client: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(client)
        return {k: 0.1 * torch.randn(t.shape, generator=generator) for k, t in PARAMS.items()}

    def good(self, client: int, examples: float = 2) -> Message:
        message: Message = self.kit.reply(self.asked[client], self.update(client), examples)
        return message

    def answer(self, replies: list[Message]) -> tuple[dict[str, Tensor] | None, RoundReplies]:
        arrays, _ = self.checked.aggregate_train(1, replies)
        return (dict(arrays.to_torch_state_dict()) if arrays else None), self.intakes[-1]


def reasons(intake: RoundReplies) -> dict[int, tuple[str, str]]:
    return {seen.client: (seen.status, seen.reason) for seen in intake.refused}


def identical(a: dict[str, Tensor] | None, b: dict[str, Tensor] | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# ------------------------------------------------------------------------------------------------------ good replies


def test_the_inner_strategy_gets_exactly_theta_plus_update_and_the_record_what_was_sent(kit: Any) -> None:
    at = Round(kit)
    _, intake = at.answer([at.good(c, examples=c + 1) for c in range(CLIENTS)])
    for client, handed in enumerate(at.inner.handed):
        assert list(handed) == list(PARAMS)
        assert identical(handed, {k: PARAMS[k] + u for k, u in at.update(client).items()})
    assert [(a.client, a.examples) for a in intake.accepted] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert all(identical(dict(a.update), at.update(a.client)) for a in intake.accepted)
    assert identical(dict(intake.params), PARAMS) and intake.refused == ()


def test_the_order_of_arrival_changes_no_bit(kit: Any) -> None:
    at = Round(kit)
    results = []
    for shuffle in range(6):
        replies = [at.good(c, examples=3 * c + 1) for c in range(CLIENTS)]
        random.Random(shuffle).shuffle(replies)
        results.append(at.answer(replies)[0])
    assert all(identical(results[0], other) for other in results[1:])


def test_the_order_of_a_replys_tensors_changes_no_bit(kit: Any) -> None:
    """Krum and FedAvgM read arrays by position."""
    at = Round(kit)
    straight, _ = at.answer([at.good(c) for c in range(CLIENTS)])
    turned = kit.reply(at.asked[1], dict(reversed(at.update(1).items())))
    again, intake = at.answer([at.good(0), turned, at.good(2), at.good(3)])
    assert identical(straight, again)
    assert [list(handed) for handed in at.inner.handed] == [list(PARAMS)] * CLIENTS
    assert intake.refused == ()


# ---------------------------------------------------------------------------------------------------------- the absent


def test_stragglers_and_errors_are_missing_with_their_reason(kit: Any) -> None:
    at = Round(kit)
    straggler = Message(Error(100, "straggler: too late"), reply_to=at.asked[1])
    traceback = "<class 'ClientAppException'>:<'\nException occurred. Message: cuda went away'>"
    crashed = Message(Error(2, traceback), reply_to=at.asked[2])
    trained, intake = at.answer([crashed, at.good(3), straggler, at.good(0)])
    assert reasons(intake) == {
        1: ("missing", "straggler: too late"),
        2: ("missing", "Exception occurred. Message: cuda went away'>"),
    }
    alone = Round(kit)
    assert identical(trained, alone.answer([alone.good(0), alone.good(3)])[0])


def test_a_dead_node_is_missing_though_the_superlink_answers_under_its_own_id(kit: Any) -> None:
    at = Round(kit)
    now = at.asked[0].metadata
    dead = Metadata(1, "id", 1, 1, now.message_id, "", now.created_at, now.ttl, "train")  # what SuperLink 1.41 sends
    message = Message(Error(5, "Node Unavailable\nits heartbeats lapsed"), metadata=dead)
    before = dict(at.checked.clients)
    _, intake = at.answer([message, at.good(0), at.good(1), at.good(3)])
    assert [(p.client, p.status, p.silent) for p in intake.refused] == [(2, "missing", True)]
    assert at.checked.clients == before, "the SuperLink is no client"


# ----------------------------------------------------------------------------------------------------------- bad replies

BIAS = "linear.bias"
BAD_TENSORS: dict[str, Tensor | Array] = {
    "nan": torch.tensor([0.0, math.nan, 0.0]),
    "-inf": torch.tensor([-math.inf, 0.0, 0.0]),
    "longer": torch.zeros(4),
    "broadcastable": torch.zeros(1),
    "more dimensions": torch.zeros(1, 3),
    "empty": torch.zeros(0),
    "float64": torch.zeros(3, dtype=torch.float64),
    "float16": torch.zeros(3, dtype=torch.float16),
    "int": torch.zeros(3, dtype=torch.int32),
    "complex": torch.zeros(3, dtype=torch.complex64),
    "no bytes": Array("float32", (3,), "numpy.ndarray", b""),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_bad_tensor_is_refused_by_name_without_effect_on_the_others(kit: Any, case: str) -> None:
    at = Round(kit)
    trained, intake = at.answer(
        [at.good(0), kit.reply(at.asked[1], at.update(1) | {BIAS: BAD_TENSORS[case]}), at.good(2), at.good(3)]
    )
    status, words = reasons(intake)[1]
    assert status == "rejected" and BIAS in words
    assert [a.client for a in intake.accepted] == [0, 2, 3]
    alone = Round(kit)
    assert identical(trained, alone.answer([alone.good(c) for c in (0, 2, 3)])[0])


def metrics_of(message: Message) -> MetricRecord:
    return message.content.metric_records["metrics"]


def without(name: str) -> Callable[[Message], None]:
    return lambda m: m.content.array_records["update"].pop(name) and None


def with_examples(value: Any) -> Callable[[Message], None]:
    return lambda m: metrics_of(m).update({"num-examples": value})


def put(name: str, record: Any) -> Callable[[Message], None]:
    return lambda m: m.content.update({name: record})


def drop(name: str) -> Callable[[Message], None]:
    return lambda m: m.content.pop(name) and None


COUNT = "num-examples"
BAD_REPLIES: dict[str, tuple[Callable[[Message], None], str]] = {
    "missing tensor": (without("scale"), "scale"),
    "extra tensor": (
        lambda m: m.content.array_records["update"].update({"backdoor": Array(np.zeros(1, np.float32))}),
        "backdoor",
    ),
    "no arrays": (drop("update"), "ArrayRecord"),
    "two ArrayRecords": (put("more", ArrayRecord(PARAMS)), "ArrayRecord"),
    "no MetricRecord": (drop("metrics"), COUNT),
    "two MetricRecords": (put("more", MetricRecord({"num-examples": 1})), COUNT),
    "no num-examples": (lambda m: metrics_of(m).pop("num-examples") and None, COUNT),
    **{f"{n} examples": (with_examples(n), COUNT) for n in (0, -4, 1.5, math.nan, math.inf, 2**63, 1e300)},
    "a list of examples": (with_examples([2, 2]), COUNT),
    "buffers nobody asked for": (put("buffers", ArrayRecord({"norm.mean": torch.zeros(2)})), "norm.mean"),
}


@pytest.mark.parametrize("case", BAD_REPLIES)
def test_a_bad_reply_is_refused_without_effect_on_the_others(kit: Any, case: str) -> None:
    spoil, reason = BAD_REPLIES[case]
    at = Round(kit)
    bad = at.good(1)
    spoil(bad)
    trained, intake = at.answer([kit.travel(bad), at.good(0), at.good(2), at.good(3)])
    status, words = reasons(intake)[1]
    assert status == "rejected" and reason in words
    alone = Round(kit)
    assert identical(trained, alone.answer([alone.good(c) for c in (0, 2, 3)])[0])


# ------------------------------------------------------------------------------------------------ sampling and buffers


def sampled(kit: Any, seed: int, draw: int, rounds: int = 8) -> list[list[int]]:
    """Which clients each round asks, in order, on a grid with node ids of its own."""
    grid = kit.MemoryGrid("", CLIENTS, draw)
    checked = CheckedStrategy(FedAvg(0.5, 0.0, 1, 0, CLIENTS), seed=seed, clients=grid.nodes)
    chosen = []
    for round in range(1, rounds + 1):
        random.seed(draw + round)  # whoever else draws from the global generator must not matter
        sent = checked.configure_train(round, ArrayRecord(PARAMS), ConfigRecord(), grid)
        chosen.append([grid.nodes[m.metadata.dst_node_id] for m in sent])
    return chosen


def test_partial_participation_depends_on_the_seed_and_not_on_node_ids(kit: Any) -> None:
    first = sampled(kit, seed=5, draw=0)
    assert all(sampled(kit, seed=5, draw=draw) == first for draw in (1, 2, 3))
    assert all(len(set(clients)) == 2 for clients in first)
    assert len({tuple(sorted(clients)) for clients in first}) > 1, "always the same two"
    assert sampled(kit, seed=6, draw=0) != first


def test_sampling_a_round_does_not_depend_on_the_rounds_before(kit: Any) -> None:
    """A resumed training asks the same clients."""
    grid = kit.MemoryGrid("", CLIENTS)
    checked = CheckedStrategy(FedAvg(0.5, 0.0, 1, 0, CLIENTS), seed=5, clients=grid.nodes)
    sent = checked.configure_train(6, ArrayRecord(PARAMS), ConfigRecord(), grid)
    assert [grid.nodes[m.metadata.dst_node_id] for m in sent] == sampled(kit, seed=5, draw=0)[5]


def test_an_unknown_node_takes_no_part(kit: Any) -> None:
    grid = kit.MemoryGrid("", CLIENTS)
    known = dict(list(grid.nodes.items())[:3])
    checked = CheckedStrategy(FedAvg(1.0, 0.0, 1, 0, 3), clients=known)
    sent = checked.configure_train(1, ArrayRecord(PARAMS), ConfigRecord(), grid)
    assert {m.metadata.dst_node_id for m in sent} == known.keys()


def with_buffers(kit: Any, message: Message, update: dict[str, Tensor], examples: int, mean: list[float]) -> Message:
    reply: Message = kit.reply(message, update, examples)
    reply.content["buffers"] = ArrayRecord({"norm.running_mean": torch.tensor(mean)})
    travelled: Message = kit.travel(reply)
    return travelled


def test_buffers_are_sent_separately_and_averaged_by_examples(kit: Any) -> None:
    at = Round(kit, BUFFERS)
    sent = at.asked[0].content.array_records["buffers"].to_torch_state_dict()
    assert identical(dict(sent), BUFFERS)
    _, intake = at.answer(
        [
            with_buffers(kit, at.asked[0], at.update(0), 1, [1.0, 0.0]),
            with_buffers(kit, at.asked[1], at.update(1), 3, [5.0, 8.0]),
        ]
    )
    assert identical(dict(intake.buffers), BUFFERS), "the tape keeps what was sent, not what came back"
    assert at.checked.buffers["norm.running_mean"].tolist() == [4.0, 6.0]
    assert "norm.running_mean" not in at.inner.handed[0]


def test_clients_without_buffers_leave_the_average_to_the_others(kit: Any) -> None:
    at = Round(kit, BUFFERS)
    at.answer([with_buffers(kit, at.asked[0], at.update(0), 1, [1.0, 0.0]), at.good(1, examples=99)])
    assert at.checked.buffers["norm.running_mean"].tolist() == [1.0, 0.0]
    at.answer([at.good(0), at.good(1)])
    assert at.checked.buffers["norm.running_mean"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("mean", [[math.nan, 0.0], [0.0], [0.0, 0.0, 0.0]])
def test_bad_buffers_refuse_the_reply(kit: Any, mean: list[float]) -> None:
    at = Round(kit, BUFFERS)
    _, intake = at.answer([with_buffers(kit, at.asked[0], at.update(0), 1, mean), at.good(1)])
    assert reasons(intake)[0][0] == "rejected" and "norm.running_mean" in reasons(intake)[0][1]
    assert identical(at.checked.buffers, BUFFERS)


# ------------------------------------------------------------------------------------------------------ guards


def report(**said: Any) -> GuardReport | None:
    message = Message(RecordDict({"guard": ConfigRecord(said)}), dst_node_id=1, message_type="train")
    return GuardReport.of(message)


@pytest.mark.usefixtures("identity")
def test_a_guards_report_is_typed() -> None:
    assert report(words="w", alarm=True) == GuardReport("guard: w", True)
    for wrong in ({"alarm": 1}, {"alarm": "yes"}, {"words": 3}):
        assert report(**{"words": "w", "alarm": True, **wrong}) is None
    assert report(found="alarm, suspicion 9") is None
    assert GuardReport.of(Message(RecordDict(), dst_node_id=1, message_type="train")) is None


def test_a_sum_is_alarmed_if_one_of_its_clients_is() -> None:
    one, other = GuardReport("guard: a", False), GuardReport("guard: b", True)
    assert GuardReport.together({}) is None
    assert GuardReport.together({4: one}) == GuardReport("client 4: guard: a", False)
    assert GuardReport.together({4: one, 7: other}) == GuardReport("client 4: guard: a; client 7: guard: b", True)
