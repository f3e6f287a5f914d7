"""Clients whose guards refuse suspicious weights: one update must not make all of them refuse for good, nor blame the honest."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from fedgauge.client.deployment.guard import WITHHELD
from fedgauge.client.protocol import Protocol
from fedgauge.client.update import Params
from fedgauge.server.app import federate
from fedgauge.server.store.ledger_types import ROUND_NOTE
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.strategy.curious_strategy import CuriousStrategy
from fedgauge.server.strategy.guard_check import GuardCheck
from fedgauge.server.strategy.validator import RoundReplies, UpdateValidator
from fedgauge.simulations.run.create import create_run
from fedgauge.simulations.run.in_memory import MemoryGrid
from tests.security.test_poisoned_rounds import HOSTILE, TABLES, absent, identical, model, refused, trained
from tests.server.conftest import MemoryGrid as AppGrid

REFUSE = {"guard": {"inspect": "refuse"}}
Craft = Callable[[Params], Params]


def noise(sent: Params) -> Params:
    """Large enough to move every layer by many times its size, too small to be out of all proportion."""
    draws = torch.Generator().manual_seed(0)
    return {k: 5 * torch.randn(t.shape, generator=draws) for k, t in sent.items()}


def swapped_rows(sent: Params) -> Params:
    """Two rows of the last layer change places in the average: no large step, but rows that are others'."""
    last = [k for k in sent if k.endswith("weight")][-1]
    swap = torch.zeros_like(sent[last])
    swap[0], swap[1] = sent[last][1] - sent[last][0], sent[last][0] - sent[last][1]
    return {k: 4 * swap if k == last else torch.zeros_like(t) for k, t in sent.items()}


class Crafting(MemoryGrid):
    """Real clients, of which one answers a round with what it crafts of the weights."""

    def __init__(self, protocol: Protocol, craft: Craft | None, at: int = 2, silent: Collection[int] = ()) -> None:
        super().__init__(protocol)
        self.craft, self.at, self.silent = craft, at, silent

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        if message.metadata.message_type != "train":
            return reply
        round = int(str(message.content.config_records["config"]["server-round"]))
        if round in self.silent:
            return absent(reply)
        if self.craft is not None and round == self.at and self.clients[message.metadata.dst_node_id] == HOSTILE:
            reply.content["update"] = ArrayRecord(
                self.craft(message.content.array_records["arrays"].to_torch_state_dict())
            )
        return reply


def crafted(folder: Path, craft: Craft | None, silent: Collection[int] = (), **changes: Any) -> Run:
    scenario = Scenario.from_tables(TABLES | REFUSE | changes)
    run = create_run(scenario, folder)
    federate(run, Crafting(scenario.protocol, craft, silent=silent))
    return run


def notes(run: Run) -> list[str]:
    with run.ledger() as ledger:
        return [words for key, words in ledger.meta().items() if key.startswith(ROUND_NOTE)]


# ------------------------------------------------------------------------------------------- one client against all others


@pytest.mark.parametrize("craft", [noise, swapped_rows])
@pytest.mark.parametrize("use", ["FedAvg", "FedAvgM"])
def test_an_update_over_which_all_guards_would_refuse_costs_its_client_the_round_alone(
    tmp_path: Path, craft: Craft, use: str
) -> None:
    run = crafted(tmp_path / "hostile", craft, strategy={"use": use})
    alone = trained(tmp_path / "alone", {2: absent}, strategy={"use": use}, **REFUSE)
    assert identical(model(run), model(alone))
    assert refused(run).keys() == {(2, HOSTILE)}
    assert refused(run)[2, HOSTILE].startswith(
        "left out, as with its update the clients' guards would refuse the next weights"
    )
    assert f"with the updates of clients {HOSTILE}, which were left out" in notes(run)[0]


def test_weights_that_turn_most_clients_away_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server finds nothing itself, as in a user's own app; moments are those of before, too."""
    monkeypatch.setattr("fedgauge.server.app._guard_check", lambda *_: None)
    momentum = {"strategy": {"use": "FedAvgM", "server_momentum": 0.9}}
    run = crafted(tmp_path / "hostile", noise, rounds=5, **momentum)
    calm = crafted(tmp_path / "calm", None, silent=(2, 3), rounds=5, **momentum)
    assert refused(run).keys() == {(3, c) for c in range(4)}
    back = "most clients withhold their updates, so the weights are again the latest on which most trained"
    assert notes(run)[0] == f"round 3: {back}, and no update of this round counts"
    assert identical(model(run), model(calm))


@pytest.mark.usefixtures("identity")
def test_an_honest_step_that_another_ones_few_percent_make_too_large_is_not_blamed() -> None:
    """Without it the others come nowhere near an alarm: that does not show that it was the cause."""
    steps = [0.05 * 2.5 * 6, 0.97 * 2.5 * 6, *[0.01] * 4]  # an alarm from 2.5 on, of the average
    seen = list[RoundReplies]()
    grid, everybody = moving(steps), FedAvg(fraction_evaluate=0.0, min_available_nodes=6, min_train_nodes=6)
    guards = GuardCheck(nn.Linear(3, 4), 0)
    UpdateValidator(everybody, seen.append, clients=grid.nodes, replies="weights", guards=guards).start(
        grid, ArrayRecord(START), num_rounds=1
    )
    ((client, reason),) = [(p.client, p.reason) for p in seen[0].refused]
    assert client == 1 and reason.endswith("honest training may come to that, too, so nobody is blamed")
    assert seen[0].notes[0].endswith("honest training may come to that, too, so nobody is blamed")


def test_the_server_looks_at_the_same_rows_all_round_and_at_others_in_the_next() -> None:
    """Otherwise what is found without one reply says nothing about that reply."""
    model = nn.Linear(16, 3000)
    sent = {"weight": model.weight.detach()}
    order = torch.cat([torch.tensor([1, 0]), torch.arange(2, 3000)])
    for seed in (None, 0):
        check = GuardCheck(model, seed)
        found = [
            [check.alarms(round, sent, {"weight": sent["weight"][order]}) for _ in range(2)] for round in range(40)
        ]
        assert all(len(set(same)) == 1 for same in found), "1024 of 3000 rows are looked at"
        assert len({bool(first) for first, *_ in found}) == 2


# ----------------------------------------------------------------------------------------------------- honest federations


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clients": 1},
        {"data": {"use": "mnist5k", "batch_size": 1, "auxiliary": 64}},
        {"clients": 1, "data": {"use": "mnist5k", "batch_size": 1, "auxiliary": 64}},
        {"model": {"use": "convnet", "width": 4, "norm": "batch", "mode": "train"}, "rounds": 2},
    ],
    ids=["four", "one client", "one example", "one of both", "statistics"],
)
def test_an_honest_federation_trains_as_it_does_without_guards(tmp_path: Path, changes: dict[str, Any]) -> None:
    guarded, plain = (trained(tmp_path / str(i), {}, **{**changes, **guard}) for i, guard in enumerate((REFUSE, {})))
    assert identical(model(guarded), model(plain))
    assert not refused(guarded) and not any("guards" in words for words in notes(guarded))


def test_nobody_is_blamed_where_honest_updates_alone_alarm(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", {}, chain=[{"use": "local_sgd", "rate": 40.0}], rounds=1, **REFUSE)
    assert not refused(run)
    assert (
        "whoever is left out, so the guards' setting alarms at this federation, and nobody was left out"
        in notes(run)[0]
    )


# --------------------------------------------------------------------------------------------------------- a user's own app

START = {"w": torch.ones(4, 3)}


def answering(clients: int, withholds: Callable[[int, Tensor], bool]) -> AppGrid:
    """Clients that add their number and one to the weights, and withhold where they like."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        sent = message.content.array_records["arrays"].to_torch_state_dict()
        if withholds(client, sent["w"]):
            return Message(Error(WITHHELD, "withheld by the client's guard"), reply_to=message)
        arrays = ArrayRecord({k: Array((t + client + 1).numpy()) for k, t in sent.items()})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 5})}), reply_to=message)

    return AppGrid("", clients, app=app)


def moving(steps: Sequence[float]) -> AppGrid:
    """Clients that add a number each to the weights."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        sent = message.content.array_records["arrays"].to_torch_state_dict()
        step = steps[int(context.node_config["partition-id"])]
        arrays = ArrayRecord({k: Array((t + step).numpy()) for k, t in sent.items()})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 5})}), reply_to=message)

    return AppGrid("", len(steps), app=app)


def poisoned(
    clients: int, at: Collection[int], away: Callable[[int, int], bool], bear: Callable[[int], float]
) -> AppGrid:
    """Clients that add 1, and withhold at weights above what they bear; the first adds 50 for each client in some rounds.

    Args:
        away: whether a client does not answer in a round.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        round = int(str(message.content.config_records["config"]["server-round"]))
        sent = message.content.array_records["arrays"].to_torch_state_dict()
        if away(client, round):
            return Message(Error(1, "away"), reply_to=message)
        if client and float(sent["w"].max()) > bear(client):
            return Message(Error(WITHHELD, "withheld by the client's guard"), reply_to=message)
        step = 50 * clients if client == 0 and round in at else 1
        arrays = ArrayRecord({k: Array((t + step).numpy()) for k, t in sent.items()})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 5})}), reply_to=message)

    return AppGrid("", clients, app=app)


def rounds_of(grid: AppGrid, clients: int, rounds: int, share: float = 1.0) -> tuple[Tensor, list[RoundReplies]]:
    seen = list[RoundReplies]()
    strategy = FedAvg(share, fraction_evaluate=0.0, min_available_nodes=clients, min_train_nodes=1)
    curious = CuriousStrategy(strategy, clients=grid.nodes, replies="weights", record=seen.append)
    result = curious.start(grid, ArrayRecord(START), num_rounds=rounds)
    return result.arrays.to_torch_state_dict()["w"], seen


@pytest.mark.usefixtures("identity")
def test_a_majority_that_withholds_in_every_round_takes_nothing_back() -> None:
    weights, seen = rounds_of(answering(4, lambda client, w: client > 0), 4, 3)
    assert torch.equal(weights, START["w"] + 3) and not any(intake.notes for intake in seen)


@pytest.mark.usefixtures("identity")
def test_a_client_alone_takes_nothing_back() -> None:
    weights, seen = rounds_of(answering(1, lambda client, w: bool(w.max() > 2)), 1, 4)
    assert torch.equal(weights, START["w"] + 2) and not any(intake.notes for intake in seen)


@pytest.mark.usefixtures("identity")
def test_a_minority_takes_nothing_back() -> None:
    weights, seen = rounds_of(answering(4, lambda client, w: client > 1 and bool(w.max() > 1)), 4, 2)
    assert torch.equal(weights, START["w"] + 2.5 + 1.5) and not any(intake.notes for intake in seen)


@pytest.mark.parametrize(
    ("clients", "share", "at", "away", "bear"),
    [
        (10, 1.0, {2}, lambda client, round: client >= 5, lambda client: 40.0),
        (10, 1.0, {2}, lambda client, round: client >= 5 and round == 3, lambda client: 40.0),
        (10, 1.0, {2}, lambda client, round: round in (3, 4), lambda client: 40.0),
        (9, 1 / 3, {4}, lambda client, round: False, lambda client: 40.0),
        (5, 1.0, {1, 3}, lambda client, round: False, lambda client: 40.0 if client < 3 else 80.0),
    ],
    ids=["half are away", "half are away afterwards", "all are away", "others are asked", "two steps"],
)
@pytest.mark.usefixtures("identity")
def test_one_update_over_which_most_of_those_withhold_who_answer_is_taken_back(
    clients: int, share: float, at: set[int], away: Callable[[int, int], bool], bear: Callable[[int], float]
) -> None:
    """Whoever is away, was asked for the first time, or has withheld for long, does not count for the poison."""
    _, seen = rounds_of(poisoned(clients, at, away, bear), clients, 9, share)
    back = [intake for intake in seen if any("the latest on which most trained" in words for words in intake.notes)]
    assert back and not any(intake.accepted for intake in back), "none of these updates counts"
    assert len(seen[-1].accepted) > 1, "others than the one that poisons train again"


@pytest.mark.usefixtures("identity")
def test_of_two_clients_neither_is_a_majority() -> None:
    weights, seen = rounds_of(poisoned(2, {1}, lambda client, round: False, lambda client: 40.0), 2, 3)
    assert weights.max() > 40 and not any(intake.notes for intake in seen)


@pytest.mark.usefixtures("identity")
def test_clients_that_always_withhold_cost_a_few_rounds_where_a_few_are_asked_at_a_time() -> None:
    _, seen = rounds_of(answering(9, lambda client, w: client > 2), 9, 40, 1 / 3)
    assert 0 < sum(bool(intake.notes) for intake in seen) < 6


@pytest.mark.usefixtures("identity")
def test_one_client_that_withholds_now_and_then_takes_nothing_back() -> None:
    """Beside two whose own audit always withholds, too."""
    asked = [0]

    def withholds(client: int, w: Tensor) -> bool:
        asked[0] += client == 0
        return client in (1, 2) or (client == 0 and asked[0] % 2 == 0)

    _, seen = rounds_of(answering(5, withholds), 5, 6)
    assert not any(intake.notes for intake in seen)
