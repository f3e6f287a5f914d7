"""A client whose replies are of another form than the others', or whose figures spoil everybody's: a real FedAvg trains on."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Krum, Result, Strategy

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import MORE_NOTED, ROUND_NOTE
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario, ValidatorOptions
from fedgauge.server.strategy.curious_strategy import CuriousStrategy, UpdateRecorder
from fedgauge.server.strategy.validator import UpdateValidator
from fedgauge.server.views.notices import notices
from fedgauge.server.views.reading import Reading
from fedgauge.simulations.run.create import create_run
from tests.server.conftest import MemoryGrid

pytestmark = pytest.mark.usefixtures("identity")
CLIENTS, HOSTILE = 4, 2
START = {"w": torch.zeros(3), "v": torch.zeros(2)}
Said = dict[str, Any]


def honest(client: int) -> Said:
    """Figures whose average rounds, so that its bits depend on who is in it."""
    return {"loss": 1.1 + 0.3 * client, "per-class": [0.1 * client, 0.7], "num-examples": 5 + client}


def federation(evaluation: RecordDict | None = None, training: str = "") -> MemoryGrid:
    """Clients of a user's own app, one of which answers its evaluation with anything, or its training in an odd form."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        sent = message.content.array_records["arrays"].to_torch_state_dict()
        arrays = ArrayRecord({k: t + 0.1 * (client + 1) for k, t in sent.items()})
        metrics, names = MetricRecord({"num-examples": 5 + client}), ["arrays", "metrics"]
        if client == HOSTILE:
            if training == "silent":
                raise RuntimeError("no answer")
            if training == "part":
                del arrays["v"]
            names = [name + "!" if training == name else name for name in names]
        return Message(RecordDict(dict(zip(names, [arrays, metrics], strict=True))), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if client == HOSTILE and evaluation is not None:
            return Message(evaluation, reply_to=message)
        return Message(RecordDict({"metrics": MetricRecord(honest(client))}), reply_to=message)

    return MemoryGrid("", CLIENTS, app=app)


def trained(grid: MemoryGrid, inner: Strategy, rounds: int = 2, **options: Any) -> Result:
    strategy = CuriousStrategy(inner, clients=grid.nodes, replies="weights", **options)
    return strategy.start(grid, ArrayRecord(START), num_rounds=rounds)


def mean(clients: list[int]) -> Said:
    """As FedAvg sums it."""
    total = sum(honest(c)["num-examples"] for c in clients)
    loss, classes = 0.0, [0.0, 0.0]
    for c in clients:
        share = honest(c)["num-examples"] / total
        loss += honest(c)["loss"] * share
        classes = [a + b * share for a, b in zip(classes, honest(c)["per-class"], strict=True)]
    return {"loss": loss, "per-class": classes}


def metrics(**changed: Any) -> RecordDict:
    return RecordDict({"metrics": MetricRecord({**honest(HOSTILE), **changed})})


def only(**said: Any) -> RecordDict:
    return RecordDict({"metrics": MetricRecord(said)})


OTHERS = [c for c in range(CLIENTS) if c != HOSTILE]
UNLIKE = "its metrics have other names, or lists of other lengths, than the other clients'"
HARMFUL: dict[str, tuple[RecordDict, str]] = {
    "other name": (only(other=1), UNLIKE),
    "no loss": (only(**{"num-examples": 5, "per-class": [0.1, 0.2]}), UNLIKE),
    "no weight": (only(loss=1.0), UNLIKE),
    "list": (metrics(loss=[1.0, 2.0]), UNLIKE),
    "longer list": (metrics(**{"per-class": [0.1] * 3}), UNLIKE),
    "more": (metrics(**{"x" * 10_000: 1.0}), UNLIKE),
    "no record": (RecordDict(), UNLIKE),
    "two records": (RecordDict({**metrics(), "more": MetricRecord({"a": 1})}), UNLIKE),
    "another record": (RecordDict({"m": metrics()["metrics"]}), UNLIKE),
    "of another kind": (RecordDict({"metrics": ConfigRecord({"loss": "1"}), "m": metrics()["metrics"]}), UNLIKE),
    "negative weight": (metrics(**{"num-examples": -10}), "num-examples must be a number from 0 to 1000000000, got -10"),
    "nan weight": (metrics(**{"num-examples": math.nan}), "num-examples must be a number from 0 to 1000000000, got nan"),
    "list of weights": (metrics(**{"num-examples": [5]}), "num-examples must be a number from 0 to 1000000000, got [5]"),
    "much": (metrics(**{"num-examples": 2**62}), f"num-examples must be a number from 0 to 1000000000, got {2**62}"),
    "nan": (metrics(loss=math.nan), "its loss is not finite"),
    "inf in a list": (metrics(**{"per-class": [0.1, -math.inf]}), "its per-class is not finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", HARMFUL)
def test_an_evaluation_that_spoils_everybodys_is_left_out_by_name(case: str) -> None:
    said, reason = HARMFUL[case]
    result = trained(federation(said), strategy := FedAvg(min_available_nodes=CLIENTS))
    assert strategy.fraction_evaluate == 1
    assert {r: dict(m) for r, m in result.evaluate_metrics_clientapp.items()} == {1: mean(OTHERS), 2: mean(OTHERS)}
    alone = trained(federation(), FedAvg(min_available_nodes=CLIENTS))
    assert all(result.arrays[k].data == alone.arrays[k].data for k in START)
    assert {r: dict(m) for r, m in alone.evaluate_metrics_clientapp.items()} == dict.fromkeys(
        (1, 2), mean(list(range(CLIENTS)))
    )
    validator, replies = evaluation_of(federation(said), FedAvg(min_available_nodes=CLIENTS))
    assert dict(validator.aggregate_evaluate(1, replies) or {}) == mean(OTHERS)
    assert validator.evaluation_notes == [f"round 1: client {HOSTILE} was left out of the evaluation: {reason}"]


def evaluation_of(grid: MemoryGrid, inner: Strategy, **options: Any) -> tuple[UpdateValidator, list[Message]]:
    validator = UpdateValidator(inner, clients=grid.nodes, replies="weights", **options)
    asked = validator.configure_evaluate(1, ArrayRecord(START), ConfigRecord(), grid)
    return validator, list(grid.send_and_receive(asked))


def test_an_evaluation_that_was_not_asked_for_or_came_twice_does_not_count() -> None:
    grid = federation()
    validator, replies = evaluation_of(grid, FedAvg(min_available_nodes=CLIENTS))
    of = {grid.nodes[m.metadata.src_node_id]: m for m in replies}
    metrics = validator.aggregate_evaluate(1, [*replies, of[HOSTILE]])
    assert dict(metrics or {}) == mean(OTHERS)
    assert validator.evaluation_notes == [
        f"round 1: client {HOSTILE} was left out of the evaluation: it answered 2 times"
    ]
    few = FedAvg(fraction_evaluate=0.5, min_available_nodes=CLIENTS)
    validator, some = evaluation_of(grid, few)
    asked = sorted(grid.nodes[m.metadata.src_node_id] for m in some)
    assert len(asked) == 2
    stranger = next(c for c in of if c not in asked)
    assert dict(validator.aggregate_evaluate(1, [of[stranger], *some]) or {}) == mean(asked)
    assert validator.evaluation_notes == [
        f"round 1: client {stranger} was left out of the evaluation: it was not asked"
    ]


def test_an_operators_bound_on_examples_holds_in_an_evaluation_and_none_at_all_are_no_fault() -> None:
    options = ValidatorOptions(max_examples=8)
    validator, replies = evaluation_of(federation(metrics(**{"num-examples": 9})), FedAvg(), options=options)
    assert dict(validator.aggregate_evaluate(1, replies) or {}) == mean(OTHERS)
    validator, replies = evaluation_of(federation(metrics(**{"num-examples": 0})), FedAvg())
    assert dict(validator.aggregate_evaluate(1, replies) or {}) == mean(OTHERS)
    assert validator.evaluation_notes == []


def test_a_model_that_has_diverged_for_most_is_nobodys_fault() -> None:
    grid = federation(metrics(loss=2.0))
    validator, replies = evaluation_of(grid, FedAvg(min_available_nodes=CLIENTS))
    for message in replies:
        if grid.nodes[message.metadata.src_node_id] != HOSTILE:
            message.content.metric_records["metrics"]["loss"] = math.nan
    found = validator.aggregate_evaluate(1, replies)
    assert found is not None and math.isnan(float(str(found["loss"])))
    assert validator.evaluation_notes == []


class Tolerant(FedAvg):
    """A user's own strategy that takes whatever metrics there are; its evaluation may also fail altogether."""

    broken = False

    def aggregate_evaluate(self, server_round: int, replies: Any) -> MetricRecord | None:
        if self.broken:
            raise KeyError("accuracy\n")
        names = {name for m in replies for record in m.content.metric_records.values() for name in record}
        return MetricRecord({name: 1.0 for name in names})


def test_a_strategy_that_takes_several_forms_gets_them_and_one_that_fails_ends_no_training() -> None:
    validator, replies = evaluation_of(federation(only(other=1.0)), tolerant := Tolerant(min_available_nodes=CLIENTS))
    assert set(validator.aggregate_evaluate(1, replies) or {}) == {*honest(0), "other"}
    assert validator.evaluation_notes == []
    tolerant.broken = True
    assert validator.aggregate_evaluate(1, replies) is None
    assert validator.evaluation_notes[0].startswith(f"round 1: client {HOSTILE} was left out of the evaluation")
    failed = "round 1: the strategy failed over the clients' evaluation, which has no figures: KeyError: 'accuracy"
    assert validator.evaluation_notes[1].startswith(failed)
    result = trained(federation(), tolerant)
    assert result.evaluate_metrics_clientapp == {} and sorted(result.train_metrics_clientapp) == [1, 2]


class Counting(FedAvg):
    """A user's own strategy that keeps what it has read of each reply, and takes more metrics than it reads."""

    def __init__(self) -> None:
        super().__init__(min_available_nodes=CLIENTS)
        self.history: list[float] = []

    def aggregate_evaluate(self, server_round: int, replies: Any) -> MetricRecord | None:
        for message in replies:
            self.history.append(message.content.metric_records["metrics"].pop("num-examples"))
            message.content.metric_records["metrics"]["loss"]
        return MetricRecord({"mean": sum(self.history) / len(self.history)})


@pytest.mark.parametrize("all_fail", [False, True])
def test_an_evaluation_that_is_tried_again_begins_with_the_strategys_state_and_leaves_out_as_few_as_can_be(
    all_fail: bool,
) -> None:
    grid, strategy = federation(only(**{"num-examples": 5})), Counting()
    validator, replies = evaluation_of(grid, strategy)
    of = {grid.nodes[m.metadata.src_node_id]: m for m in replies}
    of[0].content.metric_records["metrics"]["more"] = 1.0
    for client in OTHERS if all_fail else ():
        del of[client].content.metric_records["metrics"]["loss"]
    found = validator.aggregate_evaluate(1, replies)
    if all_fail:
        assert found is None and strategy.history == []
        return
    assert strategy.history == [honest(c)["num-examples"] for c in sorted(OTHERS)] and found is not None
    assert validator.evaluation_notes == [f"round 1: client {HOSTILE} was left out of the evaluation: {UNLIKE}"]


def test_who_was_left_out_of_evaluations_stands_in_the_run(tmp_path: Path) -> None:
    grid, rounds = federation(metrics(loss=math.nan)), 12
    run = user_run(tmp_path / "run", rounds)
    with run.ledger() as ledger:
        ledger.set_meta(**{f"{ROUND_NOTE}1": "left by an earlier training"})
        trained(grid, FedAvg(min_available_nodes=CLIENTS), rounds, record=UpdateRecorder(ledger, run.tape(), None))
        facts = ledger.meta()
        noted = f"client {HOSTILE} was left out of the evaluation: its loss is not finite"
        assert facts[f"{ROUND_NOTE}1"] == f"left by an earlier training; round 1: {noted}"
        assert facts[f"{ROUND_NOTE}2"] == f"round 2: {noted}"
        assert (facts[MORE_NOTED], facts["state"]) == ("2", "trained")
        assert {row["loss"] for row in ledger.rounds()} == {mean(OTHERS)["loss"]}
    reading = Reading(run)
    with reading.now():
        assert any(noted in sentence for sentence, _ in notices(reading))


def user_run(folder: Path, rounds: int) -> Run:
    tables = {
        "clients": CLIENTS,
        "rounds": rounds,
        "data": {"use": "mnist5k", "batch_size": 4},
        "model": {"use": "mlp", "hidden": [8]},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
    }
    run = create_run(Scenario.from_tables(tables), folder)
    assert isinstance(run.ledger(), Ledger)
    return run


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("use", [FedAvg, FedAdam, FedMedian, Krum])
@pytest.mark.parametrize("odd", ["arrays", "metrics", "part"])
def test_a_training_reply_of_another_form_costs_its_client_the_round(use: type[FedAvg], odd: str) -> None:
    intakes: list[Any] = []
    strategy = use(min_available_nodes=CLIENTS, fraction_evaluate=0.0)
    result = trained(federation(training=odd), strategy, record=intakes.append)
    silent = use(min_available_nodes=CLIENTS, fraction_evaluate=0.0)
    alone = trained(federation(training="silent"), silent)
    assert all(result.arrays[k].data == alone.arrays[k].data for k in START)
    for intake in intakes:
        assert {p.client: p.reason for p in intake.refused} == {
            HOSTILE: "its records or arrays have other names than the other clients', and the strategy takes one form only"
        }
        assert [reply.client for reply in intake.accepted] == OTHERS


def test_of_replies_of_which_no_form_is_the_commonest_those_named_as_sent_count() -> None:
    grid, seen = federation(training="part"), list[Any]()
    validator = UpdateValidator(FedAvg(min_available_nodes=CLIENTS), seen.append, clients=grid.nodes, replies="weights")
    asked = validator.configure_train(1, ArrayRecord(START), ConfigRecord(), grid)
    two = [m for m in grid.send_and_receive(asked) if grid.nodes[m.metadata.src_node_id] in (0, HOSTILE)]
    arrays, _ = validator.aggregate_train(1, two)
    assert arrays is not None and torch.equal(arrays.to_torch_state_dict()["w"], START["w"] + 0.1)
    assert [p.client for p in seen[0].refused if p.status == "rejected"] == [HOSTILE]
