"""Retention: what can be inverted goes when it is old enough, and only then; scores stay."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.retention import DAY, private, prune


@pytest.fixture
def run(tmp_path: Path, make_taped: Callable[..., Run], make_scenario: Callable[..., Scenario]) -> Run:
    """An attacked run, whose newest private file is 1,000 seconds after 1970."""
    attack = {"use": "inverting_gradients", "iterations": 2}
    made = make_taped(tmp_path / "runs" / "old", make_scenario(attack=[attack], tape={"retention_days": 2}), rounds=1)
    serve(made, LocalExecutor())
    (made.folder / "report.html").write_text("pictures")
    (made.folder / "checkpoint-00001.safetensors").write_text("weights")
    for path in private(made):
        os.utime(path, (0, 500))
    os.utime(made.folder / "report.html", (0, 1000))
    return made


def scores(run: Run) -> list[tuple[Any, ...]]:
    with run.ledger() as ledger:
        return [tuple(row) for row in ledger.scores()]


def test_a_run_is_pruned_when_its_newest_file_is_old_enough_and_not_before(run: Run) -> None:
    before, files = scores(run), sorted(private(run))
    assert {p.parent.name for p in files} == {"tape", "reconstructions", "old"} and len(before) > 4
    assert prune(run, 2, now=1000 + 2 * DAY - 1) == 0
    assert sorted(private(run)) == files
    assert prune(run, 2, now=1000 + 2 * DAY) == len(files)
    assert list(private(run)) == []
    assert scores(run) == before
    with run.ledger() as ledger:
        assert all(o["digest"] is None for o in ledger.observations())
    assert prune(run, 2, now=1000 + 9 * DAY) == 0


def test_a_pruned_run_still_has_a_report_with_the_reason_for_no_attack(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(run.folder)]) == 0
    assert "files deleted" in capsys.readouterr().out
    assert main(["report", str(run.folder)]) == 0
    assert main(["audit", str(run.folder)]) == 2
    assert "fedgauge prune" in capsys.readouterr().err


@pytest.mark.parametrize("purpose", ["training", "server", "audit"])
def test_a_run_at_work_is_kept(run: Run, capsys: pytest.CaptureFixture[str], purpose: str) -> None:
    files = sorted(private(run))
    with run.lock(purpose):
        assert main(["prune", "--runs", str(run.folder.parent)]) == 0
    assert "old: kept" in capsys.readouterr().out
    assert sorted(private(run)) == files


def test_the_days_are_the_scenarios_unless_the_command_says_others(
    run: Run, capsys: pytest.CaptureFixture[str], make_taped: Callable[..., Run], make_scenario: Callable[..., Scenario]
) -> None:
    other = make_taped(run.folder.parent / "other", make_scenario(), rounds=1)
    everything = ["prune", "--runs", str(run.folder.parent)]
    assert main([*everything, "--days", "100000"]) == 0
    assert capsys.readouterr().out.count("100000.0 days") == 2
    assert main(everything) == 0
    told = capsys.readouterr().out
    assert "other: kept; set --days" in told and "old: 1" in told
    assert list(private(other)) and not list(private(run))


@pytest.mark.parametrize("days", [-1, "long", float("nan")])
def test_a_retention_that_is_none_is_refused(make_scenario: Callable[..., Scenario], days: object) -> None:
    with pytest.raises(SpecError):
        make_scenario(tape={"retention_days": days})
