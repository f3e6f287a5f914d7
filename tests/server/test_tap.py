"""The tap: nothing that an app sends, receives or computes differs by a bit because somebody watches."""

import ast
import asyncio
import copy
import errno
import gc
import inspect
import io
import itertools
import json
import logging
import os
import pickle
import random
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _global_shutdown_lock  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.server import strategy as older
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Result,
    Strategy,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedgauge.server import tap as tapping
from fedgauge.server import tap_recorder
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import Tape
from fedgauge.server.store.tape_source import as_the_model_has_it, names_of, replies_of
from fedgauge.server.tap import curious
from fedgauge.server.tap_recorder import AppRecorder
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run import foreign_app
from fedgauge.simulations.run.exit_status import INAPPLICABLE
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("identity")

NODES = 4
AUDIT = """
rounds = 2
clients = 4
data = { use = "mnist5k", batch_size = 4, auxiliary = 60 }
model = { use = "mlp", hidden = [8] }
chain = [{ use = "local_sgd", rate = 0.1 }]
attack = [{ use = "analytic" }]
audit = { executor = "local" }
"""
Reply = Callable[[nn.Module, int], RecordDict]


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    (tmp_path / "audit.toml").write_text(AUDIT)
    return tmp_path / "audit.toml"


@pytest.fixture
def log(identity: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Flower's log, which does not propagate to the root logger."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("flwr"), "level", logging.INFO)
    logging.getLogger("flwr")._cache.clear()  # type: ignore[attr-defined]  # of levels
    return caplog


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10))
    for p in net.parameters():
        p.data = 0.1 * torch.randn(p.shape, generator=generator)
    return net


def weights(net: nn.Module, node: int) -> RecordDict:
    metrics = MetricRecord({"num-examples": 4 + node, "train_loss": 0.5 + node, "acc": 0.25 * node})
    return RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})


def client_app(reply: Reply = weights) -> ClientApp:
    """A client that knows nothing of fedgauge: one step of SGD on four made-up images."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        record = message.content.array_records[next(iter(message.content.array_records))]
        node = context.node_id - 1
        net = model()
        if len(record) == 4:
            net.load_state_dict(dict(zip(net.state_dict(), record.to_torch_state_dict().values(), strict=True)))
        generator = torch.Generator().manual_seed(node)
        x, y = torch.rand(4, 784, generator=generator), torch.randint(10, (4,), generator=generator)
        nn.functional.cross_entropy(net(x), y).backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        return Message(reply(net, node), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 2, "accuracy": 0.25 * (context.node_id - 1)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord([np.ones((2, 3))])}), reply_to=message)

    return app


class Nodes(Grid):
    """A grid in one process that keeps the message objects that it was given and that it returned."""

    run = property(lambda self: None)

    def __init__(self, app: ClientApp | None = None, asks: Callable[[Message], Message] | None = None) -> None:
        self.contexts = {n: Context(1, n, {"partition-id": n - 1}, RecordDict(), {}) for n in range(1, NODES + 1)}
        self.app = app or client_app()
        self.asks = asks or self.answer
        self.seen: list[Message] = []
        self.given: list[Message] = []
        self.waiting: dict[str, Message] = {}
        self.ids = itertools.count(1)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def answer(self, message: Message) -> Message:
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            return Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        self.seen += sent
        replies = [self.asks(message) for message in sent]
        self.given += replies
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{next(self.ids)}"
            self.seen.append(message)
            self.waiting[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = [self.asks(self.waiting.pop(i)) for i in message_ids if i in self.waiting]
        self.given += replies
        return iter(replies)


def start(strategy: Strategy, grid: Any, rounds: int = 3, arrays: ArrayRecord | None = None) -> Result:
    """Train, every global generator seeded: a tap that draws from one of them changes what comes out."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = ArrayRecord(model().state_dict()) if arrays is None else arrays
    return strategy.start(grid=grid, initial_arrays=first, num_rounds=rounds)


def bits(result: Result) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {k: (a.dtype, tuple(a.shape), a.data) for k, a in result.arrays.items()}


RECORDERS: "weakref.WeakSet[AppRecorder]" = weakref.WeakSet()


def tap(*args: Any) -> Any:
    """The tap, whose recorder `opened` can wait for: it writes in a thread of its own."""
    tapped: Any = tapping.tap(*args)
    if "_fedgauge_recorder" in vars(tapped):
        RECORDERS.add(tapped._fedgauge_recorder)
    return tapped


def opened(folder: Path) -> tuple[Run, list[Any], list[Any]]:
    for recorder in list(RECORDERS):
        recorder.later("a round", recorder._flush)
        recorder.later("a wait", (done := threading.Event()).set)
        while recorder._writer.is_alive() and not done.wait(0.1):
            pass
    run = Run.open(folder)
    with run.ledger() as ledger:
        return run, ledger.observations(), ledger.problems()


# ---------------------------------------------------------------------------------------------- bits, in every strategy


class Attributes(FedAvg):
    """Methods and attributes of its own, and its own `start` by keyword (case 02, 04, 21)."""

    def start(self, grid: Any, initial_arrays: Any, **options: Any) -> Result:
        self.hello = [id(grid.get_node_ids)]
        return super().start(grid, initial_arrays, **options)


class PerClient(FedAvg):
    """Different weights for every second client (case 05)."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages[1::2]:
            own = ArrayRecord({k: 2 * t for k, t in arrays.to_torch_state_dict().items()})
            message.content = RecordDict({"arrays": own, "config": config})
        return messages


class Own(FedAvg):
    """Averages the record 'arrays' of all replies, whatever else they have (case 03); empties the replies (case 19)."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        states = []
        for reply in replies:
            states.append(
                {k.removeprefix("module."): t.float() for k, t in reply.content["arrays"].to_torch_state_dict().items()}
            )
            for name in list(reply.content):
                del reply.content[name]
        return ArrayRecord({k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]}), MetricRecord()


class Differences(FedAvg):
    """Adds the mean of uploaded differences to its weights."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Message]:
        self.at = arrays.to_torch_state_dict()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        moved = arrays.to_torch_state_dict()
        return ArrayRecord({k: t + moved[k] for k, t in self.at.items()}), metrics


def plus(record: Reply, **more: Any) -> Reply:
    return lambda net, node: RecordDict({**record(net, node), **{k: make(net) for k, make in more.items()}})


def renamed(net: nn.Module, node: int) -> RecordDict:
    arrays = ArrayRecord({f"module.{k}": t for k, t in net.state_dict().items()})
    return RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 4})})


def whole(net: nn.Module, node: int) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord({k: (100 * t).to(torch.int8) for k, t in net.state_dict().items()})})


def differences(net: nn.Module, node: int) -> RecordDict:
    """What the step added; sent with weights that change, so the client subtracts what it was sent by its gradient."""
    moved = {k: -0.1 * p.grad for k, p in net.named_parameters() if p.grad is not None}
    return RecordDict({"arrays": ArrayRecord(moved), "metrics": MetricRecord({"num-examples": 4 + node})})


def fractions(net: nn.Module, node: int) -> RecordDict:
    metrics = MetricRecord({"w": 0.37 + node})
    return RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})


def tree(net: nn.Module, node: int) -> RecordDict:
    param = {"num_trees": "1", "num_parallel_tree": "1"}
    trees = {
        "gbtree_model_param": param,
        "iteration_indptr": [0, 1],
        "trees": [{"id": 0, "node": node}],
        "tree_info": [0],
    }
    booster = json.dumps({"learner": {"gradient_booster": {"model": trees}}})
    grown = np.frombuffer(booster.encode(), dtype=np.uint8)
    return RecordDict({"arrays": ArrayRecord([grown]), "metrics": MetricRecord({"num-examples": 4, "auc": 0.5})})


class Trees(FedAvg):
    """The next model is made of the replies' bytes, whose number grows."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        got = [reply.content["arrays"] for reply in replies]
        return ArrayRecord([np.concatenate([next(iter(r.values())).numpy() for r in got])]), MetricRecord()


STRATEGIES: dict[str, tuple[Callable[[], Strategy], Reply]] = {
    "FedAvg": (lambda: FedAvg(0.5), weights),
    "FedAvgM": (lambda: FedAvgM(server_learning_rate=0.9, server_momentum=0.5), weights),
    "FedAdam": (lambda: FedAdam(eta=0.01), weights),
    "FedAdagrad": (lambda: FedAdagrad(eta=0.01), weights),
    "FedYogi": (lambda: FedYogi(eta=0.01), weights),
    "FedProx": (lambda: FedProx(proximal_mu=0.1), weights),
    "FedMedian": (FedMedian, weights),
    "FedTrimmedAvg": (lambda: FedTrimmedAvg(beta=0.25), weights),
    "Krum": (lambda: Krum(num_malicious_nodes=1), weights),
    "MultiKrum": (lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2), weights),
    "Bulyan": (lambda: Bulyan(num_malicious_nodes=0), weights),
    "QFedAvg": (lambda: QFedAvg(client_learning_rate=0.1, q=0.2), weights),
    "XGBoost bagging": (lambda: FedXgbBagging(fraction_train=1.0), tree),
    "XGBoost cyclic": (lambda: FedXgbCyclic(), tree),
    "server-side DP, fixed": (lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 0.5, NODES), weights),
    "server-side DP, adaptive": (lambda: DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.1, NODES), weights),
    "client-side DP": (lambda: DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 0.5, NODES), weights),
    "own attributes and start": (lambda: Attributes(), weights),
    "per-client weights": (lambda: PerClient(), weights),
    "emptied replies": (lambda: Own(), weights),
    "a second ArrayRecord": (lambda: Own(), plus(weights, control=lambda net: ArrayRecord({"c": torch.ones(3)}))),
    "a second MetricRecord": (lambda: Own(), plus(weights, timing=lambda net: MetricRecord({"s": 1.0}))),
    "renamed arrays": (lambda: Own(), renamed),
    "int8, no MetricRecord": (lambda: Own(), whole),
    "a fractional weight": (lambda: FedAvg(fraction_evaluate=0.0, weighted_by_key="w"), fractions),
    "differences": (lambda: Differences(), differences),
    "trees": (lambda: Trees(fraction_evaluate=0.0), tree),
}  # fmt: skip
# what others do as well, as far as a tap can see
ALIKE = ("FedAdagrad", "FedYogi", "FedProx", "FedTrimmedAvg", "MultiKrum", "Bulyan", "QFedAvg", "server-side DP, fixed")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(pytest.param(name, "curious", marks=[pytest.mark.full] * (name in ALIKE)) for name in STRATEGIES),
        ("FedAvg", "tap"),
        ("trees", "tap"),
    ],
)
def test_three_rounds_end_in_the_same_bits_with_and_without_the_tap(audit: Path, name: str, how: str) -> None:
    make, reply = STRATEGIES[name]
    first = ArrayRecord([np.frombuffer(b"", dtype=np.uint8)]) if reply is tree else None
    alone = start(make(), Nodes(client_app(reply)), arrays=first)
    grid = Nodes(client_app(reply))
    if how == "curious":
        watched = start(curious(make(), audit, audit.parent / "run"), grid, arrays=first)
    else:
        watched = start(make(), tap(grid, audit, audit.parent / "run"), arrays=first)
    assert bits(alone) == bits(watched)
    assert repr(alone) == repr(watched), "and the metrics of all rounds"
    _, seen, _ = opened(audit.parent / "run")
    assert {o["round"] for o in seen if o["digest"]} == {1, 2, 3}, "and every round was recorded"


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_messages_and_replies_are_the_same_objects_in_the_same_order(tmp_path: Path, data: Any) -> None:
    """Whatever records they carry, and in whatever collection the app hands them over."""
    values = st.one_of(
        st.integers(-5, 5), st.floats(allow_nan=True), st.lists(st.integers(0, 3), min_size=1, max_size=3)
    )
    arrays = st.dictionaries(st.text(max_size=4), st.sampled_from(["f", "i1", "broken", "pickle", "empty"]), max_size=3)

    def record() -> ArrayRecord:
        made = {
            "f": lambda: Array(np.ones(2, np.float32)),
            "i1": lambda: Array(np.ones(2, np.int8)),
            "empty": lambda: Array(np.ones(0)),
            "broken": lambda: Array("float32", (9, 9), "numpy.ndarray", b"x"),
            "pickle": lambda: Array("object", (1,), "numpy.ndarray", pickle.dumps([1])),
        }  # fmt: skip
        return ArrayRecord({k: made[v]() for k, v in data.draw(arrays).items()})

    def content() -> RecordDict:
        records: dict[str, Any] = {f"a{i}": record() for i in range(data.draw(st.integers(0, 2)))}
        for i in range(data.draw(st.integers(0, 2))):
            records[f"m{i}"] = MetricRecord(data.draw(st.dictionaries(st.text(max_size=4), values, max_size=3)))
        if data.draw(st.booleans()):
            records["config"] = ConfigRecord({"server-round": data.draw(st.integers(-1, 3))})
        return RecordDict(records)

    kind: Any = data.draw(st.sampled_from([list, tuple, iter]))
    types = st.sampled_from(["train", "train.step", "evaluate", "query.more"])
    sent = [
        Message(
            content(),
            data.draw(st.integers(1, NODES)),
            data.draw(types),
            group_id=data.draw(st.sampled_from(["", "1", "x"])),
        )
        for _ in range(data.draw(st.integers(0, 4)))
    ]
    before = [copy.deepcopy(m.content) for m in sent]
    replies = [
        Message(Error(7, "no"), reply_to=m) if data.draw(st.booleans()) else Message(content(), reply_to=m)
        for m in sent
    ]
    answers = dict(zip(map(id, sent), replies, strict=True))
    came = [copy.deepcopy(m.content) for m in replies if not m.has_error()]
    grid = Nodes(asks=lambda m: answers[id(m)])
    (tmp_path / "audit.toml").write_text(AUDIT)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    tapped = tap(grid, tmp_path / "audit.toml", tmp_path / "run")
    given_back = list(tapped.send_and_receive(kind(sent), timeout=3.0))
    ids = list(tapped.push_messages(kind(sent)))
    pulled = list(tapped.pull_messages(ids))
    assert [id(m) for m in grid.seen] == [id(m) for m in sent] * 2
    assert [id(m) for m in given_back] == [id(m) for m in replies]
    assert sorted(id(m) for m in pulled) == sorted(id(m) for m in replies)
    assert [m.content for m in sent] == before
    assert [m.content for m in replies if not m.has_error()] == came or "nan" in repr(came)
    assert state == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_a_list_stays_that_list_and_everything_else_is_the_grids_own(audit: Path) -> None:
    class Special(Nodes):
        answers = 42

        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            self.came = messages
            self.back = super().send_and_receive(messages)
            return self.back

        def refuse(self) -> None:
            raise KeyError("mine")

    grid: Any = Special()
    tapped: Any = tap(grid, audit, audit.parent / "run")
    messages = [Message(RecordDict({"arrays": ArrayRecord(model().state_dict())}), 1, "train")]
    assert tapped.send_and_receive(messages=messages, timeout=1) is grid.back
    assert grid.came is messages
    assert isinstance(tapped, Special) and isinstance(tapped, Grid)
    tapped.note = 7
    assert grid.note == 7 and tapped.answers == 42 and tapped.get_node_ids() == grid.get_node_ids()
    with pytest.raises(KeyError):
        tapped.refuse()
    with pytest.raises(AttributeError):
        _ = tapped.nothing


def test_the_recorders_thread_never_parses_python(audit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads in ast.literal_eval at once can raise SystemError in the app's own: NumPy calls it for each array."""
    parse, threads = ast.literal_eval, set()

    def watched(text: Any) -> Any:
        threads.add(threading.current_thread())
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", watched)
    start(FedAvg(fraction_evaluate=0.0), tap(Nodes(client_app()), audit, audit.parent / "run"))
    assert len(opened(audit.parent / "run")[1]) == 3 * NODES
    assert threads == {threading.main_thread()}


def test_an_iterable_of_the_apps_own_is_passed_on_unread(audit: Path, log: pytest.LogCaptureFixture) -> None:
    """A grid may read it twice, as Flower's over HTTP does, or once: reading some changes them."""

    class Own:
        read = 0

        def __iter__(self) -> Iterator[Message]:
            self.read += 1
            return iter([train_message(1)])

    messages = Own()
    assert len(tap(Nodes(), audit, audit.parent / "run").send_and_receive(messages)) == messages.read == 1
    _, seen, problems = opened(audit.parent / "run")
    assert "Own" in log.text and [p.code for p in problems] == ["collection"] and not seen


def test_replies_in_an_unread_collection_are_not_missing(audit: Path) -> None:
    class Own(list[Message]):
        pass

    class Odd(Nodes):
        def send_and_receive(self, messages: Iterable[Message], **options: Any) -> Any:
            return Own(super().send_and_receive(messages, **options))

    assert type(tap(Odd(), audit, audit.parent / "run").send_and_receive([train_message(100)])) is Own
    gc.collect()  # the tap is gone, and what is open is entered
    _, seen, problems = opened(audit.parent / "run")
    assert [p.code for p in problems] == ["collection"]
    assert [(o["status"], bool(o["reason"])) for o in seen] == [("missing", True)]


class Waits(FedAvg):
    async def start(self, grid: Any, initial_arrays: Any, num_rounds: int = 3) -> Any:  # type: ignore[override]
        grid.send_and_receive([train_message(1)])
        await asyncio.sleep(0)  # a bare yield, which needs no loop


def sent(audit: Path) -> Any:
    tapped = tap(Nodes(), audit, audit.parent / "run")
    tapped.send_and_receive([train_message(1)])
    return tapped


def begun(audit: Path) -> Any:
    training: Any = start(curious(Waits(), audit, audit.parent / "run"), Nodes())
    training.send(None)
    return training


@pytest.mark.parametrize("tapped", [sent, begun])
def test_a_tap_that_a_garbage_collection_ends_waits_for_no_lock_of_the_app(
    audit: Path, tapped: Callable[[Path], Any]
) -> None:
    """A collection may run in any line, also within a call of logging or of a thread pool that holds a lock."""
    held, ended = [tapped(audit)], threading.Event()

    def collected() -> None:
        with _global_shutdown_lock:
            for handler in (handlers := logging.getLogger("flwr").handlers):
                handler.acquire()
            held.clear()
            for handler in handlers:
                handler.release()
        ended.set()

    threading.Thread(target=collected, daemon=True).start()
    assert ended.wait(30)
    assert opened(audit.parent / "run")[0].folder.exists()


def test_a_grid_may_be_wrapped_copied_and_asked_for_what_it_has(audit: Path) -> None:
    grid: Any = Nodes()
    tapped = tap(grid, audit, audit.parent / "run")
    asked, calls = tapped.send_and_receive, []
    tapped.send_and_receive = lambda *args, **options: (calls.append(1), asked(*args, **options))[1]
    assert len(tapped.send_and_receive([train_message(1)])) == len(calls) == 1
    assert "timeout" in inspect.signature(asked).parameters
    assert type(copy.copy(tapped)) is Nodes

    class Few:
        def send_and_receive(self, messages: Any) -> Any:
            return grid.send_and_receive(messages)

    assert not hasattr(tap(Few(), audit, audit.parent / "run"), "pull_messages")
    assert len(opened(audit.parent / "run")[1]) == 1


def test_a_forked_child_ends_no_recording(audit: Path) -> None:
    tapped = tap(Nodes(), audit, audit.parent / "run")
    tapped.send_and_receive([train_message(1, group="1")])
    opened(audit.parent / "run")
    if (child := os.fork()) == 0:
        try:
            tapped._fedgauge_recorder.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    tapped.send_and_receive([train_message(1, group="2")])
    run, seen, _ = opened(audit.parent / "run")
    assert [o["round"] for o in seen] == [1, 2] and run.at_work("training")


def test_a_log_that_raises_does_not_reach_the_app(audit: Path, log: pytest.LogCaptureFixture) -> None:
    class Strict(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("warnings are errors here")

    handler = Strict(logging.WARNING)
    logging.getLogger("flwr").addHandler(handler)
    try:
        reply = plus(weights, control=lambda net: ArrayRecord({"c": torch.ones(3)}))
        replies = tap(Nodes(client_app(reply)), audit, audit.parent / "run").send_and_receive([train_message(1)])
    finally:
        logging.getLogger("flwr").removeHandler(handler)
    assert len(list(replies)) == 1


def test_late_replies_are_recorded_with_the_weights_that_were_sent(audit: Path) -> None:
    """An asynchronous loop: two nodes get different weights in round 2, and one of them answers after round 3."""
    grid = Nodes()
    tapped = tap(grid, audit, audit.parent / "run")

    def sent(node: int, group: int, scale: float) -> Message:
        arrays = ArrayRecord({k: scale * t for k, t in model().state_dict().items()})
        return Message(RecordDict({"arrays": arrays}), node, "train", group_id=str(group))

    (a,) = tapped.push_messages([sent(1, 2, 1.0)])
    (c,) = tapped.push_messages([sent(3, 2, 2.0)])
    list(tapped.pull_messages([a]))
    for group in (3, 4, 5):
        list(tapped.pull_messages(list(tapped.push_messages([sent(1, group, 1.0)]))))
    list(tapped.pull_messages([c]))
    run, seen, _ = opened(audit.parent / "run")
    assert [(o["round"], o["client"]) for o in seen] == [(2, 0), (2, 1), (3, 0), (4, 0), (5, 0)]
    assert [(o["status"], o["reason"]) for o in seen] == [("accepted", "")] * 5
    for o in seen:
        taped = run.tape().read(o["round"], o["client"], o["digest"])
        scale = 2.0 if o["client"] == 1 else 1.0
        assert all(torch.equal(taped.params[k], scale * t) for k, t in model().state_dict().items())


def test_exceptions_of_the_grid_and_of_the_apps_iterables_are_the_apps_own(audit: Path) -> None:
    def broken() -> Iterator[Message]:
        yield Message(RecordDict({"arrays": ArrayRecord(model().state_dict())}), 1, "train")
        raise LookupError("the app's")

    tapped = tap(Nodes(asks=lambda m: 1 / 0), audit, audit.parent / "run")  # type: ignore[arg-type, return-value]
    with pytest.raises(LookupError):
        tapped.send_and_receive(broken())
    with pytest.raises(ZeroDivisionError):
        tapped.send_and_receive([Message(RecordDict(), 1, "train")])


def test_the_users_strategy_stays_as_it_is(audit: Path) -> None:
    """Its attributes, its signature, and copies of it, which are started as their own."""

    class Mine(FedAvg):
        def start(self, grid: Any, initial_arrays: Any, num_rounds: int = 3, **rest: Any) -> Any:
            self.ran = True
            return super().start(grid, initial_arrays, num_rounds, **rest)

    mine, signature = Mine(fraction_evaluate=0.0), inspect.signature(Mine.start)
    before = dict(vars(mine))
    strategy = curious(mine, audit, audit.parent / "run")
    assert strategy is mine and vars(mine) == before and inspect.signature(mine.start.__func__) == signature
    for other in (copy.copy(strategy), copy.deepcopy(strategy)):
        other.fraction_train = 0.25
        start(other, Nodes())
        assert other.ran and not hasattr(strategy, "ran") and strategy.fraction_train == 1.0
    assert not (audit.parent / "run").exists(), "copies are not curious"
    start(strategy, Nodes())
    assert len(opened(audit.parent / "run")[1]) == 3 * NODES, "and it was recorded once, not by its parent's start too"


def test_an_exception_in_training_is_the_apps_and_is_recorded(audit: Path) -> None:
    class Breaks(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            raise OverflowError("mine")

    with pytest.raises(OverflowError):
        start(curious(Breaks(), audit, audit.parent / "run"), Nodes())
    run, seen, _ = opened(audit.parent / "run")
    with run.ledger() as ledger:
        assert ledger.meta()["state"] == "failed"
    assert [bool(o["digest"]) for o in seen] == [True] * NODES


def state(audit: Path) -> str:
    with Run.open(audit.parent / "run").ledger() as ledger:
        return ledger.meta()["state"]


class InTurn(FedAvg):
    """Trains while its caller reads the rounds."""

    def start(self, grid: Any, initial_arrays: Any, num_rounds: int = 3) -> Any:
        for _ in range(num_rounds):
            yield (result := FedAvg.start(self, grid, initial_arrays, 1))
            initial_arrays = result.arrays


class Awaited(FedAvg):
    async def start(self, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        return FedAvg.start(self, *args, **options)


class Later(FedAvg):
    def start(self, *args: Any, **options: Any) -> Any:
        return ThreadPoolExecutor(1).submit(FedAvg.start, self, *args, **options)


class Aside(FedAvg):
    """Trains in a thread of its own, and returns nothing at once."""

    def start(self, grid: Any, initial_arrays: Any, num_rounds: int = 3) -> Any:
        self.may_train, values = threading.Event(), (self, grid, initial_arrays, num_rounds)
        self.training = threading.Thread(target=lambda: self.may_train.wait() and FedAvg.start(*values))
        self.training.start()


@pytest.mark.parametrize(
    ("kind", "wait"),
    [(InTurn, list), (Awaited, asyncio.run), (Later, lambda future: future.result()), (Aside, lambda nothing: None)],
)
def test_a_start_that_returns_before_the_training_is_recorded_to_its_end(
    audit: Path, kind: type[FedAvg], wait: Callable[[Any], Any]
) -> None:
    curious(FedAvg(), audit, audit.parent / "other")  # from now on FedAvg's own start is watched, too
    strategy = curious(kind(), audit, audit.parent / "run")
    assert inspect.iscoroutinefunction(strategy.start) == (kind is Awaited), "an app may ask before it awaits"
    wait(start(strategy, Nodes()))
    if isinstance(strategy, Aside):
        strategy.may_train.set()
        strategy.training.join()
        del strategy.training
    gc.collect()
    wait_for(lambda: state(audit) == "trained")
    assert [bool(o["digest"]) for o in opened(audit.parent / "run")[1]] == [True] * 3 * NODES
    assert not (audit.parent / "run-2").exists()


# -------------------------------------------------------------------------------------------------- what is recorded


def test_the_tape_holds_what_was_sent_and_what_came_back(audit: Path) -> None:
    grid = Nodes()
    start(PerClient(fraction_evaluate=0.0), tap(grid, audit, audit.parent / "run"), rounds=2)
    run, seen, problems = opened(audit.parent / "run")
    assert [(o["round"], o["client"], o["status"]) for o in seen] == [
        (r, c, "accepted") for r in (1, 2) for c in range(NODES)
    ]
    assert not problems
    with run.ledger() as ledger:  # clients are numbered in the order in which they are first asked
        clients = {int(node): client for client, node in ledger.nodes().items()}
    assert {o["client"]: o["examples"] for o in seen} == {client: 3 + node for node, client in clients.items()}
    for place, (m, reply) in enumerate(zip(grid.seen, grid.given, strict=True)):
        round, client = place // NODES + 1, clients[m.metadata.dst_node_id]
        (digest,) = (o["digest"] for o in seen if (o["round"], o["client"]) == (round, client))
        taped = run.tape().read(round, client, digest)
        for found, record in ((taped.params, m.content), (taped.update, reply.content)):
            expected = record["arrays"].to_torch_state_dict()
            assert found.keys() == expected.keys() and all(torch.equal(found[k], t) for k, t in expected.items())


def test_the_accuracy_is_the_mean_that_flower_computes(audit: Path) -> None:
    result = start(FedAvg(), tap(Nodes(), audit, audit.parent / "run"), rounds=2)
    run, *_ = opened(audit.parent / "run")
    with run.ledger() as ledger:
        rows = ledger.rounds()
    for row in rows:
        assert row["accuracy"] == pytest.approx(result.evaluate_metrics_clientapp[row["round"]]["accuracy"])


def test_the_servers_own_accuracy_comes_first(audit: Path) -> None:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": 0.5 + 0.1 * server_round})

    strategy = curious(FedAvg(), audit, audit.parent / "run")
    strategy.start(Nodes(), ArrayRecord(model().state_dict()), 2, evaluate_fn=evaluate)
    with Run.open(audit.parent / "run").ledger() as ledger:
        rows = ledger.rounds()
    assert [row["accuracy"] for row in rows] == pytest.approx([0.5 + 0.1 * row["round"] for row in rows])


def train_message(node: int, config: dict[str, Any] | None = None, group: str = "", kind: str = "train") -> Message:
    content = RecordDict({"arrays": ArrayRecord(model().state_dict()), "config": ConfigRecord(config or {})})
    return Message(content, node, kind, group_id=group)


@pytest.mark.parametrize(
    ("named", "rounds"),
    [
        ([{"config": {"server-round": r}} for r in (1, 2, 3)], [1, 2, 3]),
        ([{"config": {"server-round": r}} for r in (1, 2, 1, 2)], [1, 2, 3, 4]),  # the app trains twice
        ([{"config": {"server-round": 1}}] * 3, [1, 2, 3]),  # several exchanges in a round
        ([{"config": {"server-round": 51}}, {"config": {"server-round": 52}}], [51, 52]),
        ([{"group": "2"}, {"group": "5"}], [2, 5]),
        ([{"group": "a"}, {}, {"config": {"server-round": -1}}], [1, 2, 3]),
    ],
)
def test_rounds_are_the_apps_or_counted(audit: Path, named: list[dict[str, Any]], rounds: list[int]) -> None:
    tapped = tap(Nodes(), audit, audit.parent / "run")
    for name in named:
        tapped.send_and_receive([train_message(1, **name), train_message(2, **name)])
    _, seen, _ = opened(audit.parent / "run")
    assert sorted((o["round"], o["client"]) for o in seen) == [(r, c) for r in rounds for c in (0, 1)]


def test_pushed_messages_are_recorded_when_their_replies_are_pulled(audit: Path) -> None:
    tapped = tap(Nodes(), audit, audit.parent / "run")
    first = list(tapped.push_messages([train_message(1, group="1"), train_message(2, group="1")]))
    list(tapped.pull_messages(first[:1]))
    second = list(tapped.push_messages([train_message(1, group="2")]))
    list(tapped.pull_messages([*second, first[1]]))  # one of them is late
    _, seen, _ = opened(audit.parent / "run")
    assert [(o["round"], o["client"], bool(o["digest"])) for o in seen] == [(1, 0, True), (1, 1, True), (2, 0, True)]


def test_errors_and_silence_are_missing_with_their_reason(audit: Path) -> None:
    def asks(message: Message) -> Message:
        return (
            Message(Error(3, "out of memory"), reply_to=message)
            if message.metadata.dst_node_id == 2
            else Nodes().answer(message)
        )

    class Deaf(Nodes):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            return [self.asks(m) for m in messages if m.metadata.dst_node_id != 3]

    tapped = tap(Deaf(asks=asks), audit, audit.parent / "run")
    tapped.send_and_receive([train_message(n) for n in (1, 2, 3)])
    _, seen, _ = opened(audit.parent / "run")
    assert [(o["status"], o["reason"], o["silent"]) for o in seen] == [
        ("accepted", "", None), ("missing", "out of memory", 0), ("missing", "no reply", 1)
    ]  # fmt: skip


def test_uploads_that_cannot_be_attacked_are_recorded_and_reported_by_the_audit(
    audit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {name: lambda net: ArrayRecord({"c": torch.ones(3)}) for name in ("control", "momentum")}
    reply = plus(weights, **others)
    tapped = tap(Nodes(client_app(reply)), audit, audit.parent / "run")
    tapped.send_and_receive([train_message(1)])
    tapped.send_and_receive([Message(RecordDict(), 1, "query")])  # vertical: embeddings come back
    run, seen, problems = opened(audit.parent / "run")
    assert [p.code for p in problems] == ["records", "arrays:query"]
    assert all(name in problems[0].words for name in others)
    assert set(run.tape().read(1, 0, seen[0]["digest"]).update) == set(model().state_dict())
    del tapped
    assert main(["audit", str(run.folder)]) == INAPPLICABLE  # the mlp has other names: nothing can be attacked
    assert capsys.readouterr().err.count("fedgauge: recording:") == 2


@pytest.mark.parametrize(
    ("kind", "record", "reason"),
    [
        (
            "query",
            ArrayRecord([np.ones(3)]),
            "type train carried arrays (messages: query)",
        ),
        ("train", ConfigRecord({"pickled": b"x"}), "carried arrays (messages: train)"),
    ],
)
def test_a_training_whose_messages_carry_no_weights_says_which_did_not(
    audit: Path, capsys: pytest.CaptureFixture[str], kind: str, record: Any, reason: str
) -> None:
    tap(Nodes(), audit, audit.parent / "run").send_and_receive(deque([Message(RecordDict({"a": record}), 1, kind)]))
    gc.collect()  # the tap is gone
    opened(audit.parent / "run")
    assert main(["audit", str(audit.parent / "run")]) == 2
    assert reason in capsys.readouterr().err


def test_control_variates_of_the_weights_names_are_not_taken_for_weights(audit: Path) -> None:
    def records(factor: float) -> RecordDict:
        arrays = {name: by * factor for name, by in (("control", 0.0 if factor == 1 else 0.1), ("weights", 1.0))}
        return RecordDict(
            {k: ArrayRecord({n: by * t for n, t in model().state_dict().items()}) for k, by in arrays.items()}
        )

    tapped = tap(Nodes(asks=lambda m: Message(records(1.5), reply_to=m)), audit, audit.parent / "run")
    tapped.send_and_receive([Message(records(1.0), 1, "train")])
    run, seen, _ = opened(audit.parent / "run")
    taped = run.tape().read(1, 0, seen[0]["digest"])
    assert all(torch.equal(taped.params[k], t) for k, t in model().state_dict().items())


def test_a_further_record_that_cannot_be_read_does_not_hide_the_weights(audit: Path) -> None:
    weights = ArrayRecord(model().state_dict())
    sent = RecordDict({"names": ArrayRecord({"of": Array(np.array(["a"]))}), "weights": weights})
    tapped = tap(
        Nodes(asks=lambda m: Message(RecordDict({"weights": weights}), reply_to=m)), audit, audit.parent / "run"
    )
    tapped.send_and_receive([Message(sent, 1, "train")])
    _, seen, _ = opened(audit.parent / "run")
    assert seen[0]["digest"]


@pytest.mark.parametrize("sent", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["weights", "updates"])
def test_weights_and_differences_are_distinguished_and_give_the_same_observation(
    audit: Path, kind: str, sent: float
) -> None:
    """Replies to weights of zero are the same either way; from the second round on they are not."""

    def asks(message: Message) -> Message:
        start = message.content["arrays"].to_torch_state_dict()
        step = {k: 0.05 * torch.randn(t.shape, generator=torch.Generator().manual_seed(3)) for k, t in start.items()}
        came = step if kind == "updates" else {k: start[k] + step[k] for k in start}
        return Message(RecordDict({"arrays": ArrayRecord(came)}), reply_to=message)

    tapped = tap(Nodes(asks=asks), audit, audit.parent / "run")
    for round in (1, 2):
        scale = sent if round == 1 else 1.0
        arrays = ArrayRecord({k: scale * t for k, t in model().state_dict().items()})
        tapped.send_and_receive(
            [Message(RecordDict({"arrays": arrays}), n, "train", group_id=str(round)) for n in (1, 2)]
        )
    run, seen, _ = opened(audit.parent / "run")
    with run.ledger() as ledger:
        assert replies_of(run, ledger) == kind and ledger.meta()["replies"] == kind

    class Federation:
        model = globals()["model"]()
        chain = type("Chain", (), {"links": ()})

    raw = run.tape().read(2, 1, seen[-1]["digest"])
    update = as_the_model_has_it(raw, Federation(), kind).update  # type: ignore[arg-type]
    for t in update.values():
        expected = 0.05 * torch.randn(t.shape, generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(t, expected, atol=1e-6, rtol=0)
    if kind == "updates":
        gradients = as_the_model_has_it(raw, Federation(), "gradients").update  # type: ignore[arg-type]
        assert all(torch.equal(gradients[name], -t) for name, t in update.items())


def test_a_tied_weight_has_its_first_name() -> None:
    twins = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    twins["other"].weight = twins["one"].weight
    state = twins.state_dict()
    assert names_of(state, twins) == {name: name for name in state}
    del state["one.weight"]
    assert names_of(state, twins) == {name: name for name in state} | {"other.weight": "one.weight"}


def test_only_what_the_audit_file_asks_for_is_kept(audit: Path) -> None:
    audit.write_text(
        AUDIT.replace('executor = "local"', 'executor = "local", rounds = [2], clients = [1]')
        + 'tape = { keep = "attacked" }'
    )
    start(FedAvg(fraction_evaluate=0.0), tap(Nodes(), audit, audit.parent / "run"))
    _, seen, _ = opened(audit.parent / "run")
    assert {(o["round"], o["client"]) for o in seen if o["digest"]} == {(1, 0), (2, 1)}, "and one of the first round"
    assert len(seen) == 3 * NODES


def test_the_command_that_is_logged_allows_the_packages_that_the_audit_file_names(
    audit: Path, log: pytest.LogCaptureFixture
) -> None:
    audit.write_text(AUDIT.replace('use = "mlp", hidden = [8]', 'use = "theirs.net:Net"'))
    start(FedAvg(fraction_evaluate=0.0), tap(Nodes(), audit, audit.parent / "run", ["more"]))
    opened(audit.parent / "run")
    assert any(
        line.endswith(f"fedgauge audit {audit.parent / 'run'} --allow more --allow theirs") for line in log.messages
    )


# ---------------------------------------------------------------------------------------------------------- bad input


def test_paths_start_from_the_calling_file_and_else_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two apps of one SuperLink, whose working directory is the first app's (case 01)."""
    code = "from fedgauge.server.tap import tap\n\ndef main(grid):\n    return tap(grid, 'audit.toml', 'runs/theirs')\n"
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "app.py").write_text(code)
    for name, rate in (("one", 0.1), ("two", 0.2)):
        (tmp_path / name / "audit.toml").write_text(AUDIT.replace("rate = 0.1", f"rate = {rate}"))
    monkeypatch.chdir(tmp_path / "one")

    def call(name: str) -> Any:
        file = tmp_path / name / "app.py"
        scope: dict[str, Any] = {"__file__": str(file), "__name__": name}
        exec(compile(file.read_text(), str(file), "exec"), scope)
        return scope["main"](Nodes())

    for name, expected in (("one", "one/runs/theirs"), ("two", "two/runs/theirs"), ("three", "one/runs/theirs-2")):
        call(name).send_and_receive([train_message(1)])
        assert (tmp_path / expected / "ledger.sqlite").exists()
    assert "0.2" in (tmp_path / "two" / "runs" / "theirs" / "scenario.toml").read_text()
    # a package of the app, whose folder has the file
    (tmp_path / "two" / "pyproject.toml").write_text("")
    (tmp_path / "two" / "package").mkdir()
    (tmp_path / "two" / "package" / "app.py").write_text(code)
    call("two/package").send_and_receive([train_message(1)])
    assert (tmp_path / "two" / "runs" / "theirs-2" / "ledger.sqlite").exists()
    # an app in Flower's bundle folder: another's file is not taken
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "three"))
    tapped = call("three")
    tapped.send_and_receive([train_message(1)])
    tapped._fedgauge_recorder.close()
    run, seen, problems = opened(tmp_path / "three" / "runs" / "theirs")
    assert [p.code for p in problems] == ["scenario"] and seen[0]["digest"]


def test_relative_paths_in_the_audit_file_start_from_its_folder(audit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.arange(120 * 28 * 28).reshape(120, 28, 28).astype(np.uint8)
    np.savez(audit.parent / "mine.npz", x=images, y=np.arange(120) % 10)
    audit.write_text(AUDIT.replace('use = "mnist5k"', 'use = "npz", path = "mine.npz"'))
    start(FedAvg(fraction_evaluate=0.0), tap(Nodes(), audit, audit.parent / "run"), rounds=1)
    (audit.parent / "elsewhere").mkdir()
    monkeypatch.chdir(audit.parent / "elsewhere")
    assert Run.open(audit.parent / "run").scenario().federation.shards.dataset.x.shape[-1] == 28


@pytest.mark.parametrize("text", ["rounds = [", 'nonsense = 1\naudit = 3\ntape = "x"\nrounds = "many"', None])
def test_an_unusable_scenario_fails_only_the_audit(
    audit: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    audit.unlink() if text is None else audit.write_text(text)
    alone, grid = start(FedAvg(), Nodes()), Nodes()
    watched = start(FedAvg(), tap(grid, audit, audit.parent / "run"))
    assert bits(alone) == bits(watched)
    assert len(opened(audit.parent / "run")[1]) == 3 * NODES
    assert main(["audit", str(audit.parent / "run")]) == 2
    assert "scenario.toml" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_records_nothing_with_a_warning(
    audit: Path, log: pytest.LogCaptureFixture
) -> None:
    grid = Nodes()
    assert tap(grid, audit, audit / "run") is grid  # the audit file is no folder
    assert "records nothing" in log.text
    assert bits(start(curious(FedAvg(), audit, audit / "run"), Nodes())) == bits(start(FedAvg(), Nodes()))


def test_a_full_disk_loses_updates_and_no_round(audit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    alone = start(FedAvg(), Nodes())
    tapped = tap(Nodes(), audit, audit.parent / "run")
    monkeypatch.setattr(Tape, "write_update", full)
    assert bits(start(FedAvg(), tapped)) == bits(alone)
    _, seen, problems = opened(audit.parent / "run")
    assert {p.code for p in problems} == {"disk"}
    assert {(o["status"], o["digest"]) for o in seen} == {("accepted", None)} and len(seen) == 3 * NODES


def test_a_slow_disk_loses_updates_and_delays_no_message(
    audit: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tap_recorder, "MOST_WAITING", 0)
    grid = tap(Nodes(), audit, audit.parent / "run")
    written = threading.Event()
    grid._fedgauge_recorder.later("a write that takes long", written.wait)
    app = threading.Thread(target=start, args=(FedAvg(fraction_evaluate=0.0), grid), daemon=True)
    app.start()
    app.join(60)
    assert not app.is_alive()
    written.set()
    _, seen, problems = opened(audit.parent / "run")
    assert [o["status"] for o in seen] == ["accepted"] * 3 * NODES
    assert sum(bool(o["digest"]) for o in seen) == 1
    assert {p.code for p in problems} == {"crowded"}
    assert len([r for r in log.records if r.levelno == logging.WARNING and "not recorded" in r.message]) == 1
    grid._fedgauge_recorder.close()
    assert main(["audit", str(audit.parent / "run")]) == INAPPLICABLE
    assert problems[0].words in capsys.readouterr().err


@pytest.mark.parametrize("method", ["record_intake", "set_meta", "record_round", "add_problem"])
def test_a_ledger_that_fails_is_not_the_apps_concern(audit: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    alone = start(FedAvg(), Nodes())
    tapped = tap(
        Nodes(client_app(plus(weights, c=lambda net: ArrayRecord({"c": torch.ones(1)})))), audit, audit.parent / "run"
    )

    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("any")

    monkeypatch.setattr(Ledger, method, broken)
    assert start(Own(), tapped).arrays.keys() == alone.arrays.keys()


def test_unreadable_arrays_are_skipped_by_name(audit: Path) -> None:
    def odd(net: nn.Module, node: int) -> RecordDict:
        arrays = dict(ArrayRecord(net.state_dict()))
        arrays["sparse"] = Array("float32", (9,), "scipy.sparse.csr_matrix", b"1234")
        if node == 1:
            arrays = {"huge": Array("float32", (2**40,), "numpy.ndarray", np_header((2**40,)))}
        if node == 2:
            arrays = {"object": Array("object", (1,), "numpy.ndarray", b"\x80\x04N.")}
        return RecordDict({"arrays": ArrayRecord(arrays)})

    grid = Nodes(client_app(odd))
    replies = list(tap(grid, audit, audit.parent / "run").send_and_receive([train_message(n) for n in (1, 2, 3)]))
    assert [id(m) for m in replies] == [id(m) for m in grid.given]
    _, seen, problems = opened(audit.parent / "run")
    assert [(o["status"], o["digest"]) for o in seen] == [("accepted", None)] * 3
    assert [(p.code, p.round, p.client) for p in problems] == [("reply", 1, c) for c in range(3)]


def np_header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue()


def test_two_taps_on_one_grid_record_twice_and_change_nothing(audit: Path) -> None:
    alone = start(FedAvg(), Nodes())
    twice = tap(tap(Nodes(), audit, audit.parent / "run"), audit, audit.parent / "run")
    assert bits(start(FedAvg(), twice)) == bits(alone)
    assert len(opened(audit.parent / "run")[1]) == len(opened(audit.parent / "run-2")[1]) == 3 * NODES


def test_a_wrapped_strategy_that_is_never_started_gives_a_warning(audit: Path, log: pytest.LogCaptureFixture) -> None:
    wrapper = DifferentialPrivacyServerSideFixedClipping(
        curious(FedAvg(), audit, audit.parent / "run"), 1.0, 0.5, NODES
    )
    start(wrapper, Nodes())
    del wrapper
    gc.collect()
    assert "never called" in log.text and not (audit.parent / "run").exists()


@pytest.mark.parametrize(("allow", "flags"), [("mine", ["--allow", "mine"]), (None, [])])
def test_packages_may_be_one_name_or_none(
    audit: Path, log: pytest.LogCaptureFixture, allow: Any, flags: list[str]
) -> None:
    start(curious(FedAvg(), audit, audit.parent / "run", allow), Nodes(), rounds=1)
    (command,) = re.findall(r"with: fedgauge audit \S+(.*)", log.text)
    assert command.split() == flags


def test_a_strategy_of_flowers_older_api_is_named_by_its_module(audit: Path) -> None:
    with pytest.raises(TypeError, match=r"flwr\.server\.strategy\.fedavg\.FedAvg"):
        curious(older.FedAvg(), audit, audit.parent / "run")  # type: ignore[type-var]


@pytest.mark.parametrize("wrong", [FedAvg, "FedAvg", None])
def test_a_wrong_strategy_or_grid_is_a_type_error_before_training(audit: Path, wrong: Any) -> None:
    for wrap in (curious, tap):
        with pytest.raises(TypeError):
            wrap(wrong, audit, audit.parent / "run")
    assert not (audit.parent / "run").exists()


def test_the_name_that_apps_import_the_tap_by_is_kept() -> None:
    assert (foreign_app.tap, foreign_app.curious) == (tapping.tap, tapping.curious)
