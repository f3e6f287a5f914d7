"""Well-formed messages that mean harm, over several rounds of real strategies: no crash, nobody else blamed, and training goes on.

FEDGAUGE_FUZZ sets how many federations are tried (a third of it); each has three clients, and the last one answers what it likes.
"""

import math
import random
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    Strategy,
)
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgauge.client.update import Params
from fedgauge.server.app import federate
from fedgauge.server.store.scenario import Scenario, ValidatorOptions
from fedgauge.server.store.tape import read_tensors
from fedgauge.server.strategy.build import build_strategy
from fedgauge.server.strategy.checked import CheckedStrategy, RoundReplies
from fedgauge.simulations.reports.report import write_report
from fedgauge.simulations.run.create import create_run
from fedgauge.simulations.run.in_memory import MemoryGrid

FUZZ = settings.get_profile("fuzz")
pytestmark = pytest.mark.slow
CLIENTS, HOSTILE, ROUNDS = 3, 2, 4
USES = ["FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "FedMedian", "FedTrimmedAvg", "Krum"]
USUAL = 0.5  # of an honest update's norm, about
START = {"a": 0.3 * torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), "b": 0.3 * torch.ones(2, 4)}
STATISTICS = {"n.running_mean": torch.zeros(4), "n.running_var": torch.ones(4)}

# what a client may send: harmless, or so far out that no training gets there; what lies between is for max_norm to refuse
SCALES = [0.0, 1e-45, -1e-40, 1e-3, 1.0, -1.0, 10.0]
EXTREMES = [1e8, -1e12, 1e19, 1.9e19, -1e20, 1e30, 3.4e38, -3.4e38]
BETWEEN = [30.0, -300.0, 3e3, 3e4]
COUNTS = [
    1,
    4,
    5,
    10**6,
    10**9,
    2**31,
    2**53,
    2**63 - 1,
    0,
    -1,
    0.5,
    math.nan,
    math.inf,
    -math.inf,
    1e300,
    [4.0],
    [4, 4],
]
WORDS = [
    "",
    "\x00",
    "\x1b[31m",
    "<script>alert(1)</script>",
    "' OR 1=1 --",
    "alarm, suspicion 1e999",
    "a" * 100_000,
    "\u202e{{7*7}}",
]
KINDS = ["arrays", "arrays", "arrays", "count", "metrics", "statistics", "dtype", "words", "twice", "replay",
         "another", "silent", "error", "honest"]  # fmt: skip


def loss_of(params: Params, client: int) -> Tensor:
    """A two-layer network's on the client's own numbers."""
    x = torch.linspace(-1, 1, 15).reshape(3, 5) * (1 + 0.2 * client)
    return (params["b"] @ (params["a"] @ x).relu() - 1).square().mean()


def honest(params: Params, client: int) -> dict[str, Tensor]:
    leaves = {k: params[k].clone().requires_grad_() for k in START}
    gradient = torch.autograd.grad(loss_of(leaves, client), list(leaves.values()))
    return {k: -0.1 * g for k, g in zip(leaves, gradient, strict=True)}


def strategy_of(use: str) -> Strategy:
    return build_strategy({"use": use, **({"server_momentum": 0.5} if use == "FedAvgM" else {})}, CLIENTS)


class Grid(MemoryGrid):
    """Only says who is there."""

    def __init__(self) -> None:
        self.clients = {node: node - 1 for node in range(1, CLIENTS + 1)}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.clients)


class Liar:
    """The hostile client; it sees what it was sent in every round, and what the others are."""

    def __init__(self, seed: int, values: list[float]) -> None:
        self.rng, self.values = random.Random(seed), values
        self.earlier: list[tuple[RecordDict, Message]] = []

    def arrays(self, sent: Params) -> dict[str, Tensor]:
        """Values far and near, everywhere or in one place, or another client's update times something."""
        update = honest(sent, self.rng.randrange(CLIENTS))
        value, how = self.rng.choice(self.values), self.rng.randrange(4)
        for k, t in update.items():
            if how == 0:
                update[k] = torch.full_like(t, value)
            elif how == 1:
                t.view(-1)[self.rng.randrange(t.numel())] = value
            elif how == 2:
                update[k] = (t * value).clamp(-3.4e38, 3.4e38)
            else:
                update[k] = torch.tensor(self.rng.choices([*self.values, 0.0, 1e-45], k=t.numel())).reshape(t.shape)
        return update

    def answer(self, asked: Message, sent: Params) -> list[Message]:
        kind = self.rng.choice(KINDS)
        if kind == "silent":
            return []
        if kind == "error":
            return [Message(Error(self.rng.choice([0, 2, 10**6]), self.rng.choice(WORDS)), reply_to=asked)]
        if kind == "replay" and self.earlier:
            content, before = self.rng.choice(self.earlier)
            return [Message(content, reply_to=before)]
        update = self.arrays(sent) if kind == "arrays" else honest(sent, HOSTILE)
        content = content_of(update)
        metrics, record = content.metric_records["metrics"], content.array_records["update"]
        if kind == "count":
            metrics["num-examples"] = self.rng.choice(COUNTS)
        elif kind == "metrics":
            more: list[Any] = [math.nan, -math.inf, 2**63 - 1, [math.nan] * 3, [0.0] * 10_000, []]
            metrics[self.rng.choice(["loss", "accuracy", "x" * 100_000, "<b>", ""])] = self.rng.choice(more)
        elif kind == "statistics":
            name = self.rng.choice(list(STATISTICS))
            value = self.rng.choice([-100.0, -1e-6, 1e20, 3e38, math.nan, math.inf, 0.0, -0.0])
            content.array_records["buffers"][name] = Array(np.full(4, value, np.float32))
        elif kind == "dtype":
            with np.errstate(invalid="ignore"):
                odd = record["a"].numpy().astype(self.rng.choice(["<f2", "<f8", ">f4", "<f16", "<i4", "|b1", "<c8"]))
            record["a"] = Array(odd)
        elif kind == "words":
            found = {"words": self.rng.choice(WORDS), "alarm": self.rng.choice([True, False, 1, "yes"])}
            suspicion = self.rng.choice([0.5, 1e300, -1.0, math.nan, math.inf, 2, "2", [2.0]])
            content["guard"] = ConfigRecord({**found, "suspicion": suspicion})
        elif kind == "another":
            content["who"] = MetricRecord({"client": 0})
        reply = Message(content, reply_to=asked)
        self.earlier.append((content, asked))
        return [reply, reply] if kind == "twice" else [reply]


def content_of(update: dict[str, Tensor]) -> RecordDict:
    """As fedgauge's client answers."""
    metrics = MetricRecord({"num-examples": 4, "loss": 0.5})
    return RecordDict({"update": ArrayRecord(update), "metrics": metrics, "buffers": ArrayRecord(STATISTICS)})


@settings(FUZZ, max_examples=max(1, FUZZ.max_examples // 3))  # each is four rounds
@given(
    seed=st.integers(0, 2**32),
    use=st.sampled_from(USES),
    bounded=st.booleans(),
)
def test_what_one_client_says_ends_nothing(seed: int, use: str, bounded: bool) -> None:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    options = ValidatorOptions(max_norm=5 * USUAL, max_examples=8) if bounded else ValidatorOptions()
    intakes: list[RoundReplies] = []
    grid, liar = Grid(), Liar(seed, [*SCALES, *EXTREMES, *(BETWEEN if bounded else [])])
    checked = CheckedStrategy(strategy_of(use), intakes.append, STATISTICS, 1, grid.clients, options=options)
    arrays = ArrayRecord(START)
    for round in range(1, ROUNDS + 1):
        sent = {k: t.clone() for k, t in arrays.to_torch_state_dict().items()}
        replies = []
        for asked in checked.configure_train(round, arrays, ConfigRecord(), grid):
            client = grid.clients[asked.metadata.dst_node_id]
            if client == HOSTILE:
                replies += liar.answer(asked, sent)
            else:
                replies.append(Message(content_of(honest(sent, client)), reply_to=asked))
        made, _ = checked.aggregate_train(round, replies)
        refused = {p.client: p for p in intakes[-1].refused}
        assert refused.keys() <= {HOSTILE}, "an honest client is blamed"
        assert all(p.reason.strip() for p in refused.values())
        assert made is not None or intakes[-1].undone, "an undone round is named"
        arrays = made or arrays
    final = arrays.to_torch_state_dict()
    assert all(torch.isfinite(t).all() for t in (*final.values(), *checked.buffers.values()))
    assert all((t >= 0).all() for k, t in checked.buffers.items() if k.endswith("running_var"))


# ------------------------------------------------------------------------------------------------ whole runs and reports


class LyingGrid(MemoryGrid):
    """Real clients, of which the last one lies."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario.protocol)
        self.rng = random.Random(seed)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [reply for m in messages for reply in self._spoiled(m, self._answer(m))]

    def _spoiled(self, asked: Message, reply: Message) -> list[Message]:
        if asked.metadata.message_type != "train" or self.clients[asked.metadata.dst_node_id] != HOSTILE:
            return [reply]
        kind, content = self.rng.choice(KINDS), reply.content
        if kind == "silent":
            return []
        if kind == "error":
            return [Message(Error(2, self.rng.choice(WORDS)), reply_to=asked)]
        if kind == "count":
            content.metric_records["metrics"]["num-examples"] = self.rng.choice(COUNTS)
        elif kind == "words":
            content["guard"] = ConfigRecord({"found": self.rng.choice(WORDS)})
        elif kind == "metrics":
            content.metric_records["metrics"]["x" * 100_000] = math.nan
        elif kind == "arrays":
            value = self.rng.choice([*SCALES, *EXTREMES])
            sent = content.array_records["update"].to_torch_state_dict()
            content["update"] = ArrayRecord({k: torch.full_like(t, value) for k, t in sent.items()})
        return [reply, reply] if kind == "twice" else [reply]


@pytest.mark.full
@settings(FUZZ, max_examples=max(2, FUZZ.max_examples // 30))
@given(seed=st.integers(0, 2**32), use=st.sampled_from(USES))
def test_the_report_of_a_run_with_a_lying_client_is_made(tmp_path_factory: Any, seed: int, use: str) -> None:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    scenario = Scenario.from_tables(
        {
            "seed": 3,
            "rounds": 3,
            "clients": CLIENTS,
            "data": {"use": "mnist5k", "batch_size": 2, "auxiliary": 64},
            "model": {"use": "mlp", "hidden": [4]},
            "chain": [{"use": "local_sgd", "rate": 0.1}],
            "strategy": {"use": use},
            "audit": {"executor": "local"},
        }
    )
    folder: Path = tmp_path_factory.mktemp("lying")
    run = create_run(scenario, folder / "run")
    federate(run, LyingGrid(scenario, seed))
    assert all(torch.isfinite(t).all() for t in read_tensors(run.model).values())
    with run.ledger() as ledger:
        seen, rounds = ledger.observations(), ledger.rounds()
    assert [row["round"] for row in rounds] == [0, 1, 2, 3] and all(row["loss"] is not None for row in rounds)
    assert {o["client"] for o in seen if o["status"] != "accepted"} <= {HOSTILE}
    page = write_report(run).read_text()
    assert "<script>alert" not in page and len(page) < 10**7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20, "4 GiB, in kilobytes"
