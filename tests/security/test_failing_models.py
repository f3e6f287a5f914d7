"""One client's well-formed update over which the server's model, loss or server attack raises: the training goes on for all."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message

from fedgauge.attacks.malicious.fishing import feature_fishing
from fedgauge.client.components import allowing
from fedgauge.client.federation import Federation
from fedgauge.client.update import Params
from fedgauge.server import app
from fedgauge.server.app import federate
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.notices import notices
from fedgauge.server.views.reading import Reading
from fedgauge.simulations.reports.report import write_report
from fedgauge.simulations.run.create import create_run
from fedgauge.simulations.run.in_memory import MemoryGrid
from tests.security.test_poisoned_rounds import HOSTILE, TABLES, absent, identical, model, refused, trained

pytestmark = pytest.mark.usefixtures("identity")
DEEP: dict[str, Any] = {"use": "mlp", "hidden": [32] * 24}
STRICT: dict[str, dict[str, Any]] = {
    "a loss": {"model": DEEP, "loss": {"use": "strict_parts:bce"}},
    "a network": {"model": {"use": "strict_parts:net"}},
}
FISHING: dict[str, Any] = {
    "model": {"use": "mlp", "hidden": [8, 8, 8]},
    "server": "malicious",
    "attack": [{"use": "lone_example", "iterations": 1}],
    "server_attack": [{"use": "feature_fishing", "target": 3, "clients": [0], "rounds": [2]}],
}


@pytest.fixture
def strict_parts() -> Iterator[None]:
    with allowing(["strict_parts"], [Path(__file__).parent]):
        yield


def steep(reply: Message) -> Message:
    """An update of norm 3000 whose layers multiply what they get, until the logits are infinities of both signs."""
    tensors = reply.content.array_records["update"].to_torch_state_dict()
    changed = {k: torch.ones_like(t) if t.dim() == 2 else torch.zeros_like(t) for k, t in tensors.items()}
    for weight in [t for t in changed.values() if t.dim() == 2][-2:]:
        weight[:, ::2] = -1
    size = sum(float(t.square().sum()) for t in changed.values()) ** 0.5
    reply.content["update"] = ArrayRecord({k: t * (3000 / size) for k, t in changed.items()})
    return reply


@pytest.mark.usefixtures("strict_parts")
@pytest.mark.parametrize("what", STRICT)
def test_what_raises_over_one_clients_update_costs_that_client_the_round(tmp_path: Path, what: str) -> None:
    strict = STRICT[what] | {"rounds": 3}
    run = trained(tmp_path / "hostile", {2: steep}, **strict)
    alone = trained(tmp_path / "alone", {2: absent}, **strict)
    assert identical(model(run), model(alone))
    assert refused(run).keys() == {(2, HOSTILE)}
    assert "the model fails with them (" in refused(run)[2, HOSTILE]


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
    with Reading(run).now() as reading:
        said = str(notices(reading))
    assert (
        "round 2: the test figures are missing, as the model fails with the round's weights (RuntimeError: all" in said
    )
    assert "\\x1b" not in said and "round 2: the test figures are missing" in write_report(run).read_text()


def test_a_training_goes_on_behind_a_round_without_figures(tmp_path: Path) -> None:
    usual = trained(tmp_path / "usual", {}, rounds=3)
    failing, record = Failing(2), app._Record.__call__

    def kill(self: Any, counted: int, arrays: ArrayRecord) -> Any:
        found = record(self, counted, arrays)
        if counted == 2:
            raise KeyboardInterrupt
        return found

    scenario = Scenario.from_tables(TABLES | {"rounds": 3})
    run = create_run(scenario, tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "evaluate", lambda *given: failing(*given))
        patch.setattr(app._Record, "__call__", kill)
        with pytest.raises(KeyboardInterrupt):
            federate(run, MemoryGrid(scenario.protocol))
    federate(run, MemoryGrid(scenario.protocol))
    assert identical(model(run), model(usual))
    with run.ledger() as ledger:
        assert [r["accuracy"] is None for r in ledger.rounds()] == [False, False, True, False]


@pytest.mark.parametrize(("at", "error"), [(0, RuntimeError("wrong shape")), (1, MemoryError("no memory"))])
def test_what_no_client_has_caused_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, error: Exception
) -> None:
    """The first weights are the scenario's, and no client makes the server's memory end."""
    failing = Failing(at, error)
    monkeypatch.setattr(Federation, "evaluate", lambda *given: failing(*given))
    with pytest.raises(type(error)):
        trained(tmp_path / "run", {}, rounds=1)


# ------------------------------------------------------------------------------------------------- a malicious server


def closing(reply: Message) -> Message:
    """Weights and biases far below zero, after which no unit is active."""
    tensors = reply.content.array_records["update"].to_torch_state_dict()
    reply.content["update"] = ArrayRecord({k: torch.full_like(t, -5.0) for k, t in tensors.items()})
    return reply


def trouble(run: Run) -> str:
    with run.ledger() as ledger:
        return ledger.meta().get("server_attack", "")


def test_an_update_after_which_all_images_score_the_same_ends_no_fishing(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", {1: closing}, rounds=3, **FISHING)
    assert trouble(run).startswith(
        "round 2, client 0: honest weights were sent: feature_fishing: the weights give all public examples one"
    )
    with run.ledger() as ledger:
        assert len(ledger.rounds()) == 4 and not refused(run)
    assert not trouble(trained(tmp_path / "honest", {}, rounds=3, **FISHING))


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
    reason = (
        "ZeroDivisionError: float division"
        if isinstance(value, Exception)
        else "feature_fishing: the crafted weights are not finite"
    )
    assert trouble(run).startswith(f"round 2, client 0: honest weights were sent: {reason}")
    assert identical(model(run), model(trained(tmp_path / "honest", {}, rounds=3, model=FISHING["model"])))
    assert not refused(run)
