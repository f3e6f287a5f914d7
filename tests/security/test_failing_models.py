"""A model or server attack that raises over one client's well-formed update: the training goes on for all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor

from fedgauge.attacks.malicious.fishing import feature_fishing
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.update import Params
from fedgauge.server.app import federate
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import read_tensors
from fedgauge.server.views.notices import notices
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.simulations.run.create import create_run
from fedgauge.simulations.run.in_memory import MemoryGrid
from tests.tensors import identical

pytestmark = pytest.mark.usefixtures("identity")
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
FISHING: dict[str, Any] = {
    "model": {"use": "mlp", "hidden": [8, 8, 8]},
    "server": "malicious",
    "attack": [{"use": "lone_example", "iterations": 1}],
    "server_attack": [{"use": "feature_fishing", "target": 3, "clients": [0], "rounds": [2]}],
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


def trained(folder: Path, spoil: Mapping[int, Spoil], **changes: Any) -> Run:
    scenario = Scenario.from_tables(TABLES | changes)
    run = create_run(scenario, folder)
    federate(run, Poisoned(scenario.protocol, spoil))
    return run


def refused(run: Run) -> dict[tuple[int, int], str]:
    with run.ledger() as ledger:
        seen = [o for o in ledger.observations() if o["status"] != "accepted"]
    return {(o["round"], o["client"]): o["reason"] for o in seen}


def model(run: Run) -> dict[str, Tensor]:
    return read_tensors(run.model)


# -------------------------------------------------------------------------------------------- the test after each round


@dataclass
class Failing:
    """A federation's evaluation that raises the n-th time, as a strict network does over the one example that is too much."""

    at: int
    error: Exception = field(
        default_factory=lambda: RuntimeError("all elements of input should be between 0 and 1\x1b")
    )
    evaluate: Callable[..., tuple[float, float]] = Federation.evaluate
    calls: list[int] = field(default_factory=list)

    def __call__(self, *given: Any) -> tuple[float, float]:
        self.calls.append(0)
        if len(self.calls) == self.at + 1:
            raise self.error
        return self.evaluate(*given)


def test_a_round_whose_weights_cannot_be_tested_has_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = trained(tmp_path / "usual", {}, rounds=3)
    failing = Failing(2)
    monkeypatch.setattr(Federation, "evaluate", lambda *given: failing(*given))
    run = trained(tmp_path / "run", {}, rounds=3)
    assert identical(model(run), model(usual))
    with run.ledger() as ledger, usual.ledger() as other:
        figures, expected = ([(r["accuracy"], r["loss"]) for r in one.rounds()] for one in (ledger, other))
    assert figures == [pair if round != 2 else (None, None) for round, pair in enumerate(expected)]
    with RunSnapshot(run).now() as reading:
        said = str(notices(reading))
    assert "Round 2: " in said and "\\x1b" not in said


# ------------------------------------------------------------------------------------------------- a malicious server


def trouble(run: Run) -> str:
    with run.ledger() as ledger:
        return ledger.meta().get("server_attack", "")


@pytest.mark.parametrize("value", [ZeroDivisionError("float division by zero"), torch.inf])
def test_whatever_a_server_attack_raises_or_makes_its_client_gets_honest_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    scenario = Scenario.from_tables(TABLES | {"rounds": 3} | FISHING)
    run, first, usual = create_run(scenario, tmp_path / "run"), scenario.federation.initial()[0], feature_fishing.craft

    def craft(self: feature_fishing, sent: Params, *given: Any, **named: Any) -> Params:
        if identical(sent, first):  # on which it is tried before the training
            return usual(self, sent, *given, **named)
        if isinstance(value, Exception):
            raise value
        return {k: torch.full_like(t, value) for k, t in sent.items()}

    monkeypatch.setattr(feature_fishing, "craft", craft)
    federate(run, MemoryGrid(scenario.protocol))
    assert trouble(run).startswith("round 2, client 0: ")
    assert ("ZeroDivisionError: " if isinstance(value, Exception) else "not finite") in trouble(run)
    assert identical(model(run), model(trained(tmp_path / "honest", {}, rounds=3, model=FISHING["model"])))
    assert not refused(run)
