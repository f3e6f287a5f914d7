"""Clients whose guards refuse suspicious weights: one update must not make all of them refuse for good, nor blame the honest."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from fedgauge.client.deployment.guard import WITHHELD
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.update import Params
from fedgauge.server.app import federate
from fedgauge.server.store.ledger_types import ROUND_NOTE
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.strategy.curious_strategy import CuriousStrategy
from fedgauge.server.strategy.guard_check import GuardCheck
from fedgauge.server.strategy.validator import RoundReplies
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
    named = f"with the updates of clients {HOSTILE}, which were left out"
    assert named in notes(run)[0] and (craft is swapped_rows or notes(run)[0].endswith(named))


def test_weights_that_turn_most_clients_away_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server finds nothing itself, as in a user's own app; moments are those of before, too."""
    monkeypatch.setattr("fedgauge.server.app._guard_check", lambda *_: None)
    momentum = {"strategy": {"use": "FedAvgM", "server_momentum": 0.9}}
    run = crafted(tmp_path / "hostile", noise, rounds=5, **momentum)
    calm = crafted(tmp_path / "calm", None, silent=(2, 3), rounds=5, **momentum)
    assert refused(run).keys() == {(3, c) for c in range(4)}
    assert (
        "round 3: most clients answered before and withhold now, so the weights are again those before" in notes(run)[0]
    )
    assert identical(model(run), model(calm))


def test_the_server_becomes_stricter_where_clients_saw_what_it_did_not() -> None:
    federation = Federation(Scenario.from_tables(TABLES).protocol)
    check, (sent, _) = GuardCheck(federation.model, 0), federation.initial()
    further = {k: t * 2.9 for k, t in sent.items()}  # 1.9 times its size: an alarm from 2.5 on
    assert check.alarms(sent, further) == check.alarms(further, further, near=True) == ""
    assert "it moved by 190% of its size" in check.alarms(sent, further, near=True)
    check.limit /= 2
    assert "it moved by 190% of its size" in check.alarms(sent, further)


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


def rounds_of(grid: AppGrid, clients: int, rounds: int) -> tuple[Tensor, list[RoundReplies]]:
    seen = list[RoundReplies]()
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients, min_train_nodes=1)
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
