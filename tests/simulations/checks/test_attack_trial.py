"""A trial of the planned attacks: what fails is named before an audit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.components import allowing
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.attack_trial import check_attacks
from fedgauge.simulations.checks.check_result import CheckResult

LOCAL = {"use": "local_sgd", "rate": 0.1}
ATTACKS = '''
from dataclasses import dataclass
from fedgauge.attacks.base import Attack, Reconstruction

@dataclass(frozen=True)
class broken(Attack):
    """Fails on everything."""
    def reconstruct(self, wave, known, budget, streams):
        return [wave.update["no such parameter"]]

@dataclass(frozen=True)
class honest(Attack):
    """Asks for one iteration and a few public examples."""
    def reconstruct(self, wave, known, budget, streams):
        assert len(known.auxiliary.x) <= 64 and (budget.restarts, budget.iterations) == (1, 1)
        return [Reconstruction(None, None, 0.0, 1, 0.0, "converged")]

@dataclass(frozen=True)
class changing(Attack):
    """Takes the update's place for its own sums."""
    def reconstruct(self, wave, known, budget, streams):
        for t in wave.update.values():
            t.zero_()
        return [Reconstruction(None, None, 0.0, 1, 0.0, "converged")]
'''


@pytest.fixture
def own(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "own_attacks.py").write_text(ATTACKS)
    with allowing(["own_attacks"], [tmp_path]):
        yield


def scenario(*attacks: dict[str, Any], **changes: Any) -> Scenario:
    tables = {
        "rounds": 4,
        "clients": 3,
        "data": {"use": "mnist5k", "batch_size": 2, "auxiliary": 100},
        "model": {"use": "mlp", "hidden": [16]},
        "chain": [LOCAL],
        "attack": list(attacks),
    }
    return Scenario.from_tables(tables | changes)


def tried(planned: Scenario) -> dict[str, CheckResult]:
    return {result.name: result for result in check_attacks(planned)}


def test_failures_are_named_and_inapplicable_attacks_are_notes(own: None) -> None:
    found = tried(
        scenario(
            {"use": "own_attacks:broken"},
            {"use": "analytic"},
            {"use": "learning_to_invert"},
            {"use": "own_attacks:honest"},
            {"use": "own_attacks:changing"},
        )
    )
    broken, analytic = found["attack broken"], found["attack analytic"]
    assert (broken.code, broken.needed) == ("fails", True)
    assert "KeyError: 'no such" in broken.message
    assert (analytic.code, analytic.needed) == ("not applicable", False)
    assert (found["attack learning_to_invert"].works, found["attack learning_to_invert"].needed) == (None, False)
    assert found["attack honest"].works
    assert (found["attack changing"].code, found["attack changing"].needed) == ("changes input", True)


def test_membership_is_not_tried() -> None:
    asked = tried(scenario({"use": "membership"}))["attack membership"]
    assert asked.works is None


def test_an_attack_that_shares_its_iterations_out_is_not_called_inapplicable() -> None:
    """leave_layer_out tries each of the fully connected layers, and refuses fewer iterations than there are."""
    planned = scenario(
        {"use": "leave_layer_out", "iterations": 20}, model={"use": "mlp", "hidden": [8, 8, 8, 8]}, chain=[LOCAL]
    )
    assert tried(planned)["attack leave_layer_out"].works


def test_sentences_are_tried_too() -> None:
    planned = scenario(
        {"use": "tag", "iterations": 5},
        data={"use": "phrases", "batch_size": 1},
        model={"use": "tiny_bert"},
    )
    assert tried(planned)["attack tag"].works
