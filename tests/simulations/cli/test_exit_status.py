"""Exit statuses that can be trusted: what failed is no success, says why, and is tried again once its cause is mended."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.client.components import allowing
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.create import new_run
from fedgauge.simulations.run.exit_status import exit_status
from tests.simulations.cli.conftest import TABLES, taped_run

# a user's attack, whose author edits it: what it does stands in a file beside it
OWN = """
from dataclasses import dataclass
from pathlib import Path

import torch
from fedgauge.attacks.base import Attack, Reconstruction, not_applicable


@dataclass(frozen=True)
class Guess(Attack):
    def reconstruct(self, wave, known, budget, streams):
        how = Path(__file__).with_name("how").read_text()
        if how == "faulty" or (how == "faulty with client 1" and 1 in wave.clients):
            raise RuntimeError("view size is not compatible")
        if how == "faulty after the trial":
            Path(__file__).with_name("how").write_text("faulty")
        if how == "shy":
            return not_applicable(wave, "the layer Odd has no second derivative")
        return [Reconstruction(torch.rand(1, 1, 28, 28, generator=s("guess")), None, 0.5, 1, 0.1, "converged", "")
                for s in streams]
"""
USE = {"use": "ownattacks:Guess", "name": "guess"}
OWN_MEASURE = """
from dataclasses import dataclass

from fedgauge.attacks.measure import Measure


@dataclass(frozen=True)
class Odd(Measure):
    value: str = "much"
    times: int = 1
    metric = "mse"

    def measure(self, case):
        return {client: self.times * case.rows(client, {"mse": [self.value]}, [0]) for client in case.wave.clients}, {}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """The folder of a user's attack, whose file `how` says what it does."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "ownattacks.py").write_text(OWN)
    (folder / "how").write_text("faulty")
    with allowing(["ownattacks"], [folder]):
        yield folder
    sys.modules.pop("ownattacks", None)


def taped_with(folder: Path, *attacks: dict[str, Any]) -> Run:
    return taped_run(folder / "runs", {**TABLES, "attack": list(attacks)})


def table(told: str, attack: str) -> list[list[str]]:
    return [
        line.replace("\u00a0%", "%").split()
        for line in told.splitlines()
        if f" {attack} " in f"{line} " and "%" in line
    ]


def all_rows(run: Run) -> list[tuple[Any, ...]]:
    with run.ledger() as ledger:
        return [tuple(row[k] for k in ("round", "client", "attack", "example", "metric", "value", "status"))
                for row in ledger.scores()]  # fmt: skip


def waves(run: Run) -> list[tuple[Any, ...]]:
    with run.ledger() as ledger:
        return [
            tuple(row) for row in ledger._db.execute("SELECT key, round, client, wave, state FROM jobs ORDER BY id")
        ]


def test_attacks_that_all_failed_are_a_failure_that_says_why(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = taped_with(tmp_path, USE)
    assert main(["audit", str(run.folder)]) == 1
    told = capsys.readouterr().out
    words = " ".join(told.split())
    assert "guess (4 x): RuntimeError: " in words
    assert f"audit {run.folder} --allow ownattacks --retry failed" in words
    cells = table(told, "guess")
    assert [row[-3:] for row in cells] == [["2", "x", "failed"]] * 2, "a cell is not left empty"
    assert main(["audit", str(run.folder), "--log", "quiet"]) == 1, "asking again does not make it a success"
    assert "guess (4 x)" in capsys.readouterr().err
    assert main(["runs", "--runs", str(run.folder.parent)]) == 0
    listed = capsys.readouterr().out
    assert "attacks failed" in listed and "12/16, 4 failed" in listed and "complete" not in listed


def test_failed_attacks_are_retried_and_end_as_without_the_failure(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = taped_with(tmp_path, USE, {"use": "analytic"})
    assert main(["audit", str(run.folder)]) == 1
    assert "4 of 20 attacks" in capsys.readouterr().out
    (mine / "how").write_text("mended")
    assert main(["audit", str(run.folder)]) == 1, "nobody asked to try again"
    assert main(["audit", str(run.folder), "--retry", "failed"]) == 0
    assert "4 attacks (failed)" in capsys.readouterr().err
    never_failed = taped_with(tmp_path, USE, {"use": "analytic"})
    assert main(["audit", str(never_failed.folder)]) == 0
    assert all_rows(run) == all_rows(never_failed) and waves(run) == waves(never_failed)
    before = all_rows(run)
    assert main(["audit", str(run.folder), "--retry", "failed"]) == 0, "nothing is left to try"
    assert "0 attacks (failed)" in capsys.readouterr().err and all_rows(run) == before
    assert main(["runs", "--runs", str(run.folder.parent)]) == 0
    assert capsys.readouterr().out.count("complete") == 2


@pytest.mark.parametrize("odd", [{"value": "much"}, {"value": "1", "times": 2}])
def test_scores_that_cannot_be_kept_are_a_failure_of_their_attack_alone(
    tmp_path: Path, mine: Path, odd: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "ownattacks.py").write_text(OWN_MEASURE)
    run = taped_with(tmp_path, {"use": "ownattacks:Odd", **odd}, {"use": "analytic"})
    assert main(["audit", str(run.folder)]) == 1
    assert "4 of 20 attacks failed: Odd (4 x)" in " ".join(capsys.readouterr().out.split())
    with run.ledger() as ledger:
        assert {row["attack"] for row in ledger.scores() if row["status"] != "failed"} >= {"analytic", "mean_image"}


def test_one_update_that_cannot_be_attacked_is_reported_and_the_others_have_their_numbers(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "how").write_text("faulty with client 1")
    run = taped_with(tmp_path, USE)
    assert main(["audit", str(run.folder)]) == 1
    told = capsys.readouterr().out
    assert "2 of 16 attacks" in told and "guess (2 x)" in told
    assert [row[-3:] for row in table(told, "guess")] == [["1", "x", "failed"]] * 2
    assert main(["audit", str(run.folder), "--attack", "analytic"]) == 0, "another attack is judged by itself"


def test_attacks_of_which_none_applies_have_a_status_of_their_own(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "how").write_text("shy")
    run = taped_with(tmp_path, USE)
    assert main(["audit", str(run.folder)]) == 3
    told = " ".join(capsys.readouterr().out.split())
    assert "guess (4 x): the" in told and "Odd" in told and "2 x not applicable" in told
    assert main(["audit", str(run.folder), "--attack", "analytic"]) == 0
    assert exit_status(run) == 0, "one that applies is enough"
    (mine / "how").write_text("mended")
    assert main(["audit", str(run.folder), "--retry", "failed"]) == 0
    assert main(["audit", str(run.folder), "--retry", "not-applicable"]) == 0
    assert "4 attacks (not-applicable)" in capsys.readouterr().err
    with run.ledger() as ledger:
        assert {(row["attack"], row["status"]) for row in ledger.outcomes()} >= {("guess", "converged")}
        assert ledger.reasons() == []


def test_updates_of_which_none_was_accepted_are_a_failure(tmp_path: Path) -> None:
    scenario = Scenario.from_tables(TABLES)
    run = new_run(scenario, "refused", tmp_path / "runs")
    assert exit_status(run) == 4, "no planned round was trained"
    with run.ledger() as ledger:
        ledger.record_intake(1, [Participation(c, "rejected", "not finite") for c in range(2)], scenario.plan)
    assert exit_status(run) == 1


@pytest.mark.full
def test_a_sweep_whose_attacks_failed_is_a_failure(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {key: TABLES[key] for key in ("rounds", "clients", "data", "model")}
    sweep = {
        "scenario": {**shared, "rounds": 1, "audit": TABLES["audit"]},
        "defense": [{"name": "none", "chain": TABLES["chain"]}],
        "attack": [USE],
    }
    (tmp_path / "grid.toml").write_text(tomli_w.dumps(sweep))
    command = ["sweep", str(tmp_path / "grid.toml"), "-o", str(tmp_path / "grid")]
    assert main(command) == 2, (
        "an attack that fails on an update of the first scenario is told before anything is trained"
    )
    assert "attack guess: RuntimeError" in " ".join(capsys.readouterr().err.split())
    (mine / "how").write_text("faulty after the trial")
    assert main(command) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert f"fedgauge audit {tmp_path / 'grid' / 'none-seed0'} --retry failed" in told
    (mine / "how").write_text("mended")
    assert main(["audit", str(tmp_path / "grid" / "none-seed0"), "--retry", "failed"]) == 0
    assert main(command) == 0
    assert "guess" in (tmp_path / "grid" / "sweep.csv").read_text()
