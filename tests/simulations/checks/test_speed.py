"""The speed of searches: arithmetic on paper with a clock of the test's own, and a whole command."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.attacks.grading.audit import Auditor
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks import attack_trial
from fedgauge.simulations.cli.main import main
from tests.small_runs import SMALLEST

SEARCHES = {
    "data": {"use": "mnist5k", "batch_size": 1},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "inverting_gradients", "iterations": 100, "restarts": 2}, {"use": "analytic"}],
    "audit": {"devices": "cpu", "wave": 4},
}


@pytest.mark.parametrize(("each", "shared", "words"), [(0.01, 0.0, "arithmetic"), (0.001, 0.01, "raise [audit] wave")])
def test_the_rate_is_that_of_iterations_alone(
    monkeypatch: pytest.MonkeyPatch, each: float, shared: float, words: str
) -> None:
    """Whatever is done once costs 5 seconds here; an iteration costs `shared`, and `each` for each update."""
    now = 0.0

    def attack(self: Auditor, planned: Any, wave: Any, members: int) -> None:
        nonlocal now
        now += 5 + planned.budget.iterations * (shared + each * len(wave)) * (planned.name != "analytic")

    monkeypatch.setattr(Auditor, "attack", attack)
    monkeypatch.setattr(attack_trial.time, "perf_counter", lambda: now)
    searched, read = attack_trial.speeds(Scenario.from_tables(SMALLEST | SEARCHES))
    expected = 3600 * 4 / ((shared + 4 * each) * 200)
    assert searched.message.startswith(f"{expected:,.0f} updates an hour") and words in searched.message
    assert read.message == "under a second for 4 updates"


def test_the_doctor_measures_a_scenario_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attack_trial, "ENOUGH", 0.02)
    (tmp_path / "a.toml").write_text(tomli_w.dumps(SMALLEST | SEARCHES))
    assert main(["doctor", str(tmp_path / "a.toml"), "--speed"]) == 0
    told = capsys.readouterr().out
    assert "speed of inverting_gradients" in told and "speed of analytic" in told
    assert main(["doctor", "--speed"]) == 2
