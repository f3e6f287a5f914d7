"""A client over whose reply a strategy fails, weighs by or takes by position: the others train on as if it had not answered."""

import gc
import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    QFedAvg,
    Result,
    Strategy,
)

from fedgauge.server.strategy.curious_strategy import CuriousStrategy
from fedgauge.server.strategy.reply_checks import odd_figures, oddness
from fedgauge.server.strategy.validator import RoundReplies, UpdateValidator
from tests.server.conftest import MemoryGrid

pytestmark = pytest.mark.usefixtures("identity")
CLIENTS = 4
START = {"w": torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), "v": torch.zeros(2)}
Reply = dict[str, Any]  # arrays and metrics
Spoil = Callable[[Reply], Reply]


@pytest.fixture(autouse=True)
def quick() -> None:
    """QFedAvg collects garbage after every array: it need not look each time at what was imported since the collection of tests."""
    gc.freeze()


def silent(reply: Reply) -> Reply:
    raise RuntimeError("no answer")


def reversed_order(reply: Reply) -> Reply:
    return {**reply, "arrays": ArrayRecord(dict(reversed(reply["arrays"].items())))}


def in_half(reply: Reply) -> Reply:
    return {**reply, "arrays": ArrayRecord({k: Array(a.numpy().astype("f2")) for k, a in reply["arrays"].items()})}


def once_in_half(reply: Reply) -> Reply:
    halves = in_half(reply)["arrays"]
    return {**reply, "arrays": ArrayRecord({k: Array(a.numpy().astype("f4")) for k, a in halves.items()})}


def part(reply: Reply) -> Reply:
    return {**reply, "arrays": ArrayRecord({"v": reply["arrays"]["v"]})}


def another_record(reply: Reply) -> Reply:
    return {"arrays": reply["arrays"], "m": reply["metrics"]}


def saying(**said: Any) -> Spoil:
    """Other metrics; None: left out."""

    def spoil(reply: Reply) -> Reply:
        metrics = {**reply["metrics"], **{k.replace("_", "-", k == "num_examples"): v for k, v in said.items()}}
        return {**reply, "metrics": MetricRecord({k: v for k, v in metrics.items() if v is not None})}

    return spoil


def federation(hostile: int | Collection[int] | None, spoil: Spoil, clients: int = CLIENTS) -> MemoryGrid:
    """Clients of which some replies are spoiled; None: everybody's."""
    app = ClientApp()
    spoiled = range(clients) if hostile is None else [hostile] if isinstance(hostile, int) else hostile

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        sent = message.content.array_records["arrays"].to_torch_state_dict()
        arrays = ArrayRecord({k: Array((t + 0.01 * (client + 1)).numpy()) for k, t in sent.items()})
        metrics = {"num-examples": 5, "train_loss": 1.0 + client, "norm_bit": 1.0}
        reply: Reply = {"arrays": arrays, "metrics": MetricRecord(metrics)}
        return Message(RecordDict(spoil(reply) if client in spoiled else reply), reply_to=message)

    return MemoryGrid("", clients, app=app)


def options(clients: int = CLIENTS) -> Any:
    return {"fraction_evaluate": 0.0, "min_available_nodes": clients}


def own_figures(contents: list[RecordDict], key: str) -> MetricRecord:
    return MetricRecord({"inverse": sum(1 / c.metric_records["metrics"]["train_loss"] for c in contents)})


def accounted(clients: int = CLIENTS) -> Strategy:
    """Flower's, which takes no round in which a client is missing, or says another number of examples than the others."""
    pytest.importorskip("dp_accounting")
    from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

    relation = next(iter(NeighboringRelation))
    config = PrivacyConfig(1e-5, clients, relation, SamplingMethod.NO_AMPLIFICATION)
    inner = FedAvg(**options(clients))
    return DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1.0, clients, accountant=RdpAccountant(config))


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(**options()),
    "FedAvgM": lambda: FedAvgM(server_momentum=0.5, **options()),
    "QFedAvg": lambda: QFedAvg(client_learning_rate=0.1, **options()),
    "own figures": lambda: FedAvg(train_metrics_aggr_fn=own_figures, **options()),
    "DP fixed": lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(**options()), 0.1, 1.0, CLIENTS),
    "DP adaptive": lambda: DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(**options()), 0.1, CLIENTS),
    "DP at clients": lambda: DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(**options()), 0.1, CLIENTS),
    "accounted": accounted,
}


def trained(
    strategy: Strategy, hostile: int | Collection[int], spoil: Spoil, clients: int = CLIENTS
) -> tuple[Result, list[RoundReplies]]:
    np.random.seed(0)  # of Flower's noise
    grid, seen = federation(hostile, spoil, clients), list[RoundReplies]()
    curious = CuriousStrategy(strategy, clients=grid.nodes, replies="weights", record=seen.append)
    return curious.start(grid, ArrayRecord(START), num_rounds=2), seen


def rejected(seen: list[RoundReplies]) -> list[set[int]]:
    return [{p.client for p in intake.refused if p.status == "rejected"} for intake in seen]


def same_model(a: Result, b: Result) -> bool:
    return [(k, v.data) for k, v in (a.arrays or {}).items()] == [(k, v.data) for k, v in (b.arrays or {}).items()]


@pytest.mark.parametrize("hostile", [0, 2])
@pytest.mark.parametrize(
    ("use", "spoil"),
    [
        ("QFedAvg", saying(train_loss=None)),
        ("QFedAvg", saying(train_loss=[1.0])),
        ("QFedAvg", part),
        ("QFedAvg", another_record),
        ("own figures", saying(train_loss=0.0)),
        ("DP fixed", part),
        ("DP adaptive", part),
        ("DP at clients", saying(norm_bit=None)),
        ("accounted", saying(num_examples=6)),
    ],
)
def test_a_reply_over_which_the_strategy_fails_costs_its_client_the_round_and_nobody_else_a_bit(
    use: str, spoil: Spoil, hostile: int
) -> None:
    """Noise, too, is drawn as if it had not answered."""
    result, seen = trained(STRATEGIES[use](), hostile, spoil)
    alone, _ = trained(STRATEGIES[use](), hostile, silent)
    assert rejected(seen) == [{hostile}, {hostile}]
    assert same_model(result, alone)
    assert (not result.arrays) == (use == "accounted"), "it takes no round in which a client is missing"
    assert result.train_metrics_clientapp == alone.train_metrics_clientapp


@pytest.mark.parametrize("hostile", [0, 2])
@pytest.mark.parametrize("use", STRATEGIES)
def test_arrays_in_another_order_or_precision_change_nothing_for_the_others(use: str, hostile: int) -> None:
    usual, _ = trained(STRATEGIES[use](), hostile, lambda reply: reply)
    turned, seen = trained(STRATEGIES[use](), hostile, reversed_order)
    assert same_model(usual, turned) and rejected(seen) == [set(), set()]
    halves, seen = trained(STRATEGIES[use](), hostile, in_half)
    rounded, _ = trained(STRATEGIES[use](), hostile, once_in_half)
    assert same_model(halves, rounded) and rejected(seen) == [set(), set()]


@pytest.mark.parametrize("use", ["FedAvg", "DP fixed"])
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"train_loss": math.nan}, "its train_loss is not finite"),
        ({"train_loss": None}, "its metrics lack train_loss, or have it in another form than most"),
    ],
)
def test_figures_that_would_spoil_everybodys_are_left_out_by_name_and_the_update_counts(
    use: str, said: Reply, reason: str
) -> None:
    result, seen = trained(STRATEGIES[use](), 2, saying(**said))
    usual, _ = trained(STRATEGIES[use](), 2, lambda reply: reply)
    assert same_model(result, usual) and rejected(seen) == [set(), set()]
    others = sum(1.0 + c for c in range(CLIENTS) if c != 2) / (CLIENTS - 1)
    assert {r: m["train_loss"] for r, m in result.train_metrics_clientapp.items()} == {
        r: pytest.approx(others) for r in (1, 2)
    }
    assert [intake.notes for intake in seen] == [
        (f"round {r}: client 2 was left out of the training's figures: {reason}",) for r in (1, 2)
    ]


def test_figures_that_differ_among_most_are_nobodys_fault() -> None:
    """Clients that hold some of the classes each report on those; an AUC of one class alone is not a number."""
    classes = [MetricRecord({"n": 1, f"class {c % 3}": 0.5, f"class {(c + 1) % 3}": 0.5}) for c in range(6)]
    assert odd_figures(classes) == {}
    assert odd_figures([MetricRecord({"n": 1, "auc": math.nan if c < 4 else 0.5}) for c in range(6)]) == {}
    assert odd_figures([MetricRecord({"n": 1, **({"more": math.nan} if c == 0 else {})}) for c in range(6)]) == {}
    assert odd_figures([]) == {}


def test_a_release_that_was_tried_twice_is_accounted_once() -> None:
    strategy = accounted()
    trained(strategy, 2, saying(train_loss=math.nan))
    assert strategy.accountant.num_releases == 2  # type: ignore[attr-defined]


def test_flowers_q_fedavg_is_refused_whole_numbers_before_anybody_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fail over every reply, the honest ones included."""
    monkeypatch.setitem(START, "norm.num_batches_tracked", torch.tensor(7))
    with pytest.raises(ValueError, match=r"fails for whole numbers: norm.num_batches_tracked is of torch.int64\. Let"):
        trained(STRATEGIES["QFedAvg"](), 2, lambda reply: pytest.fail("a client trains"))
    result, _ = trained(FedAvg(**options()), 2, lambda reply: reply)
    assert result.arrays


def test_complex_weights_are_refused_before_anybody_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm over real arrays alone would let one client's complex entries of any size into the mean of all."""
    monkeypatch.setitem(START, "fourier", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"complex, as fourier is: let server and clients send torch\.view_as_real"):
        trained(FedAvg(**options()), 2, lambda reply: pytest.fail("a client trains"))


@pytest.mark.parametrize("loss", [-1e-10, 0.0, 1e9])
def test_a_loss_by_which_the_others_hardly_count_is_named_once(loss: float) -> None:
    _, seen = trained(STRATEGIES["QFedAvg"](), 2, saying(train_loss=loss))
    words = f"round 1: client 2 said a train_loss of {loss:.3g}, where 1 is usual, and the strategy weighs by it"
    assert [note.replace("where 2 is", "where 1 is") for intake in seen for note in intake.notes] == [words]


@pytest.mark.parametrize("spoil", [part, another_record])
def test_of_two_clients_none_ends_the_training_by_another_form(spoil: Spoil) -> None:
    """The names that were sent are the usual ones; how the metrics' record is called tells nothing."""
    result, seen = trained(FedAvg(**options(2)), 1, spoil, clients=2)
    other, _ = trained(FedAvg(**options(2)), 1, silent if spoil is part else lambda reply: reply, clients=2)
    assert same_model(result, other)
    assert rejected(seen) == [{1} if spoil is part else set()] * 2


def test_of_two_clients_that_do_not_fit_together_none_is_blamed_and_the_round_is_undone() -> None:
    result, seen = trained(accounted(2), 1, saying(num_examples=6), clients=2)
    assert not result.arrays and rejected(seen) == [set(), set()]
    assert "Accounted aggregation requires equal client weights.) whoever is left out, so the round" in seen[0].notes[0]


class InverseLoss(FedAvg):
    """A user's strategy that sums in its own way, by the inverse of the loss, and needs every client."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        contents = [m.content for m in replies if not m.has_error()]
        if len(contents) < self.min_available_nodes:
            return None, None
        weights = [1 / np.float64(c.metric_records["metrics"]["train_loss"]) for c in contents]
        arrays = [c.array_records["arrays"] for c in contents]
        mean = {k: sum(w * a[k].numpy() for w, a in zip(weights, arrays, strict=True)) / sum(weights) for k in START}
        return ArrayRecord({k: Array(v.astype("f4")) for k, v in mean.items()}), None


class AdamOfAll(FedAdam):
    """FedAdam that needs every client, and moves by the mean of the losses."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        received = list(replies)
        losses = [m.content.metric_records["metrics"]["train_loss"] for m in received if not m.has_error()]
        if len(losses) < self.min_available_nodes:
            return None, None
        self.eta = 0.1 / np.prod(np.sign(losses))
        return super().aggregate_train(server_round, received)


MANY = 64
NEED_ALL: dict[str, tuple[Callable[[], Strategy], Spoil]] = {
    "FedAvg": (lambda: accounted(MANY), saying(num_examples=6)),
    "FedAdam": (lambda: AdamOfAll(**options(MANY)), saying(train_loss=0.0)),
    "own": (lambda: InverseLoss(**options(MANY)), saying(train_loss=0.0)),
}


@pytest.mark.product
@pytest.mark.parametrize("culprits", [{17}, {0}, {5, 40}, {62, 63}], ids=str)
@pytest.mark.parametrize("use", NEED_ALL)
def test_of_many_clients_those_are_named_with_whom_a_strategy_that_needs_all_has_no_result(
    use: str, culprits: set[int]
) -> None:
    """And no other; the round is then as if they had not answered."""
    make, spoil = NEED_ALL[use]
    result, seen = trained(make(), culprits, spoil, clients=MANY)
    assert rejected(seen) == [culprits, culprits] and not result.arrays
    assert all("left out, as with its update" in p.reason for intake in seen for p in intake.refused)


@pytest.mark.parametrize("culprits", [{0, 1}, {2, 3}])
def test_of_two_halves_that_do_not_fit_together_none_is_blamed(culprits: set[int]) -> None:
    _, seen = trained(accounted(), culprits, saying(num_examples=6))
    assert rejected(seen) == [set(), set()]


class NeedsMost(FedAvg):
    """A strategy that takes no round of fewer than seven replies, as Bulyan does, and fails over a negative loss."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        losses = [m.content.metric_records["metrics"]["train_loss"] for m in replies]
        if len(losses) < 7:
            return None, None
        if min(losses) < 0:
            raise ValueError("a loss is negative")
        return super().aggregate_train(server_round, replies)


@pytest.mark.parametrize("hostile", [0, 3, 7])
def test_a_strategy_that_needs_nearly_all_replies_costs_only_the_client_that_makes_it_fail(hostile: int) -> None:
    result, seen = trained(NeedsMost(**options(8)), hostile, saying(train_loss=-1.0), clients=8)
    alone, _ = trained(NeedsMost(**options(8)), hostile, silent, clients=8)
    assert rejected(seen) == [{hostile}, {hostile}] and result.arrays and same_model(result, alone)


@pytest.mark.parametrize(("use", "key"), [("QFedAvg", "train_loss"), ("DP at clients", "norm_bit")])
@pytest.mark.parametrize("accuracy", [math.nan, [0.5]])
def test_an_odd_reply_over_which_the_strategy_does_not_fail_stays_beside_one_over_which_it_does(
    use: str, key: str, accuracy: Any
) -> None:
    def run(hostile: Spoil) -> tuple[Result, list[RoundReplies]]:
        def spoil(reply: Reply) -> Reply:
            client = round(reply["metrics"]["train_loss"]) - 1
            return hostile(reply) if client == 4 else saying(accuracy=accuracy if client == 2 else 0.5)(reply)

        np.random.seed(0)
        grid, seen = federation(None, spoil, 5), list[RoundReplies]()
        curious = CuriousStrategy(STRATEGIES[use](), clients=grid.nodes, replies="weights", record=seen.append)
        return curious.start(grid, ArrayRecord(START), num_rounds=2), seen

    result, seen = run(saying(**{key: None}))
    assert rejected(seen) == [{4}, {4}] and same_model(result, run(silent)[0])


class Smoothed(FedAvg):
    """A user's strategy that keeps a mean of the loss, as a number or an array, and moves less where it is large."""

    def __init__(self, keeps: str, best: float = math.inf) -> None:
        super().__init__(**options())
        self.keeps, self.best, self.worst, self.history = keeps, best, -math.inf, list[float]()
        self.loss: Any = np.ones(1) if keeps == "array" else 1.0
        self.said = MetricRecord({"loss": 1.0})

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        self.sent = {k: a.numpy() for k, a in arrays.items()}
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        received = list(replies)
        if not received:
            return None, None
        rate = 1 / (1 + float(np.sum(self.loss)))
        loss = float(np.mean([m.content.metric_records["metrics"]["train_loss"] for m in received]))
        arrays, metrics = super().aggregate_train(server_round, received)
        if self.keeps == "list":
            self.history.append(loss)
        elif self.keeps == "record":
            self.said = MetricRecord({"loss": loss})
        else:
            self.loss = 0.9 * self.loss + 0.1 * loss
        moved = {k: (s + rate * (arrays[k].numpy() - s)).astype("f4") for k, s in self.sent.items()}
        return ArrayRecord({k: Array(v) for k, v in moved.items()}), metrics


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("keeps", ["number", "array", "list", "record"])
def test_a_metric_that_is_not_finite_stays_in_no_state_of_the_strategy(keeps: str, loss: float) -> None:
    result, seen = trained(strategy := Smoothed(keeps), 2, saying(train_loss=loss))
    alone, _ = trained(other := Smoothed(keeps), 2, silent)
    assert rejected(seen) == [{2}, {2}] and same_model(result, alone)
    assert (strategy.loss, strategy.history, dict(strategy.said)) == (other.loss, other.history, dict(other.said))
    assert math.isinf(strategy.best) and math.isinf(strategy.worst), "its own"


def test_numbers_of_a_strategys_own_that_are_infinite_refuse_nobody() -> None:
    usual, seen = trained(Smoothed("number"), 2, lambda reply: reply)
    finite, _ = trained(Smoothed("number", best=1.0), 2, lambda reply: reply)
    assert rejected(seen) == [set(), set()] and same_model(usual, finite) and not any(intake.notes for intake in seen)


def test_a_metric_that_is_not_finite_for_most_refuses_nobody() -> None:
    nan = saying(train_loss=math.nan)
    grid, seen = (
        federation(None, lambda reply: nan(reply) if reply["metrics"]["train_loss"] > 1 else reply),
        list[RoundReplies](),
    )
    strategy = CuriousStrategy(Smoothed("list"), clients=grid.nodes, replies="weights", record=seen.append)
    result = strategy.start(grid, ArrayRecord(START), num_rounds=2)
    assert result.arrays and rejected(seen) == [set(), set()]
    words = "the strategy's state (history.0) is not finite whichever few clients are left out; the training goes on"
    assert [note for intake in seen for note in intake.notes] == [f"round 1: {words}"]


def test_the_only_reply_of_a_round_leaves_no_nan_in_a_number() -> None:
    grid, seen = federation(0, saying(train_loss=math.nan), 1), list[RoundReplies]()
    smoothed = Smoothed("number")
    smoothed.min_available_nodes = smoothed.min_train_nodes = 1
    strategy = CuriousStrategy(smoothed, clients=grid.nodes, replies="weights", record=seen.append)
    strategy.start(grid, ArrayRecord(START), num_rounds=1)
    assert smoothed.loss == 1.0 and "the round was undone" in seen[0].notes[0]


class Broken(FedAvg):
    """A user's strategy that fails, whatever clients say."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        raise KeyError("accuracy")


def test_a_strategy_that_fails_over_any_replies_ends_the_training_with_its_own_error() -> None:
    grid, seen = federation(2, lambda reply: reply), list[RoundReplies]()
    validator = UpdateValidator(Broken(**options()), seen.append, clients=grid.nodes, replies="weights")
    asked = validator.configure_train(1, ArrayRecord(START), ConfigRecord(), grid)
    with pytest.raises(KeyError, match="accuracy"):
        validator.aggregate_train(1, list(grid.send_and_receive(asked)))
    assert rejected(seen) == [set()]


# --------------------------------------------------------------------------------------- replies that do not fit together


class Spread(FedAvg):
    """It takes no round whose losses are too far apart, nor, where it needs all, one in which a client is missing."""

    def __init__(self, clients: int, needs_all: bool) -> None:
        super().__init__(**options(clients))
        self.least = clients if needs_all else 1

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        own = list(replies)
        losses = [m.content.metric_records["metrics"]["train_loss"] for m in own]
        if len(own) < self.least or max(losses) - min(losses) > 10:
            raise ValueError("the losses are too far apart")
        return super().aggregate_train(server_round, own)


@pytest.mark.parametrize("needs_all", [False, True])
@pytest.mark.parametrize("step", [0.01, 0.5], ids=["small step", "large step"])
@pytest.mark.parametrize("losses", [[0.0, 3.0, 6.0, 11.0], [0.0, 3.0, 6.0, 4.0, 5.0, 2.0, 11.0]], ids=len)
def test_of_two_that_do_not_fit_together_one_goes_and_neither_is_blamed(
    losses: list[float], step: float, needs_all: bool
) -> None:
    """The last one lies. The first, whose step is larger or smaller than the lie's, is as near a cause."""
    clients, lie = len(losses), len(losses) - 1

    def saying_own(reply: Reply) -> Reply:
        client = round(float(reply["arrays"]["v"].numpy()[0]) / 0.01) - 1
        arrays = reply["arrays"]
        if client == lie:
            arrays = ArrayRecord({"w": Array(START["w"].numpy() + step), "v": Array(START["v"].numpy() + step)})
        elif client == 0:
            arrays = ArrayRecord({"w": Array(START["w"].numpy() + 0.1), "v": Array(START["v"].numpy() + 0.1)})
        return saying(train_loss=losses[client])({**reply, "arrays": arrays})

    seen = list[RoundReplies]()
    grid = federation(None, saying_own, clients)
    curious = CuriousStrategy(Spread(clients, needs_all), clients=grid.nodes, replies="weights", record=seen.append)
    curious.start(grid, ArrayRecord(START), num_rounds=1)
    assert rejected(seen) == [{lie}], "whose loss is farther from the median's"
    (reason,) = (p.reason for p in seen[0].refused)
    words = f"leaving out client 0 instead helps, too: it is one of clients {lie} and 0, not known which"
    assert reason.endswith(words) and seen[0].notes[0].endswith(words)


def test_a_single_cause_is_named_without_doubt() -> None:
    _, seen = trained(STRATEGIES["own figures"](), 2, saying(train_loss=0.0))
    assert rejected(seen) == [{2}, {2}] and "one of" not in seen[0].notes[0]


def test_the_odd_one_is_farthest_from_the_median_whatever_the_metrics_units() -> None:
    said = [{"loss": v, "bits": b, "n": 5} for v, b in [(1.0, 1000), (1.1, 1010), (0.9, 990), (1.0, 1000), (9.0, 1000)]]
    found = oddness([MetricRecord(own) for own in said])
    assert max(range(5), key=found.__getitem__) == 4 and found[0] == found[3] == 0
    assert oddness([MetricRecord({"n": n}) for n in (5, 5, 5, 6)]) == [0, 0, 0, 4]
    assert oddness([MetricRecord({"n": n}) for n in (1e308, -1e308, 0.0)])[2] == 0
    assert oddness([MetricRecord({"n": 1.0}), MetricRecord({"n": math.nan}), MetricRecord({})]) == [
        0,
        math.inf,
        math.inf,
    ]
