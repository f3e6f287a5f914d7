"""fedgauge run and audit: what is attacked, what is refused, and with which exit status they end."""

import json
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from fedgauge.attacks.plan import MEMBERSHIP_LIMIT
from fedgauge.client.federation import Federation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.notices import notices
from fedgauge.server.views.snapshot import read_once
from fedgauge.server.views.verdict import CLOSED_FORM, verdict_of
from fedgauge.simulations.cli import run_commands
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.create import cards, new_run
from tests.simulations.cli.conftest import TABLES, scenario_file
from tests.small_runs import in_this_process


def test_the_audit_goes_on_where_it_stopped_and_adds_attacks(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(taped.folder)]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1] == str(taped.folder)
    with taped.ledger() as ledger:
        assert ledger.progress().done == 2 * 2 * 4  # rounds x clients x (analytic and three baselines)
    more = ["--attack", "inverting_gradients iterations=5 name=short", "--rounds", "2", "--clients", "1"]
    assert main(["audit", str(taped.folder), *more]) == 0
    with taped.ledger() as ledger:
        assert ledger.progress().done == 2 * 2 * 4 + 1
        assert [(r["round"], r["client"]) for r in ledger.scores("mse") if r["attack"] == "short"] == [(2, 1)]
    assert main(["audit", str(taped.folder), *more]) == 0, "asking again is free"
    with taped.ledger() as ledger:
        assert ledger.progress().done == 2 * 2 * 4 + 1
    assert main(["audit", str(taped.folder), "--attack", "inverting_gradients iterations=6 name=short"]) == 2
    assert "'short'" in capsys.readouterr().err
    assert main(["audit", str(taped.folder), "--attack", "magic"]) == 2
    assert "dlg" in capsys.readouterr().err


def test_an_attack_added_later_is_planned_as_the_scenario_plans_it() -> None:
    """With the limits that a known noise gives, tuned to it, and with the same baselines."""
    noisy = [{"use": "gaussian", "sigma": 0.1}, *TABLES["chain"]]
    asked = [{"use": "membership"}, {"use": "inverting_gradients"}]
    scenario = Scenario.from_tables({**TABLES, "chain": noisy, "attack": asked})
    options = Namespace(attack=["membership", "inverting_gradients"], rounds=None, clients=None)
    assert MEMBERSHIP_LIMIT in {planned.name for planned in scenario.plan.attacks}
    assert run_commands._extra_plan(options, scenario) == scenario.plan


def test_a_card_says_that_products_are_less_precise_on_a_gpu() -> None:
    tables = {**TABLES, "attack": [{"use": "inverting_gradients"}, {"use": "analytic"}]}
    told = {}
    for precision in ("ieee", "tf32"):
        scenario = Scenario.from_tables({**tables, "audit": {"executor": "local", "precision": precision}})
        told[precision] = cards(scenario, scenario.plan)
    changed = {name for name in told["ieee"] if told["ieee"][name] != told["tf32"][name]}
    assert changed == {"inverting_gradients"}, "the others compute on the CPU"
    assert told["tf32"]["inverting_gradients"].partition("; precision ")[2].startswith("tf32")


@pytest.fixture
def mismatched(taped: Run) -> Run:
    """A run whose scenario is not what its clients did."""
    (taped.folder / "scenario.toml").write_text((taped.folder / "scenario.toml").read_text().replace("0.1", "0.2"))
    return taped


def test_what_a_replay_does_not_explain_is_not_attacked(mismatched: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(mismatched.folder)]) == 1
    told = capsys.readouterr().out
    assert "the learning rate" in told
    assert "0 of 16 jobs" in told and f"fedgauge audit {mismatched.folder}" in told
    with mismatched.ledger() as ledger:
        assert (ledger.progress().queued, ledger.progress().total) == (16, 16)
    assert main(["audit", str(mismatched.folder), "--force"]) == 0
    with mismatched.ledger() as ledger:
        assert ledger.progress().done == 16


def test_a_run_whose_replay_fails_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter(["mismatch", "ok"])

    def trained(run: Run, *_: object) -> None:
        with run.ledger() as ledger:
            ledger.set_meta(replay=next(outcomes), replay_detail="told")

    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", trained)
    command = ["run", str(scenario_file(tmp_path)), "--runs", str(tmp_path / "runs")]
    assert [main(command), main(command)] == [1, 4], "nothing was trained, so nothing was attacked"


def test_a_second_ctrl_c_names_the_run_and_what_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", stopped)
    assert main(["run", str(scenario_file(tmp_path, clients=1, rounds=1)), "--runs", str(tmp_path / "runs")]) == 130
    (folder,) = (tmp_path / "runs").iterdir()
    printed = capsys.readouterr()
    assert f"fedgauge run --resume {folder}" in printed.out
    assert f"run {folder.name}: 1 client, 1 round\n" in printed.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rounds", "1"], "--attack"),
        (["--clients", "0"], "--attack"),
        (["--follow", "--attack", "dlg"], "--follow"),
        (["--attack", "dlg iterations"], "--attack iterations: expected KEY=VALUE"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    taped: Run, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["audit", str(taped.folder), *options]) == 2
    assert words in capsys.readouterr().err
    with taped.ledger() as ledger:
        assert ledger.progress().done == 0


def test_a_weak_attack_shows_nothing_where_a_closed_form_reads_simulated_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", in_this_process)
    path = scenario_file(tmp_path, attack=[{"use": "inverting_gradients", "iterations": 1}])
    assert main(["run", str(path), "--runs", str(tmp_path / "runs")]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    with read_once(Run(folder)) as reading:
        read = reading.meta[CLOSED_FORM]
        assert "analytic" in read and read in verdict_of(reading).sentence


def test_settings_reach_the_scenario_that_is_kept(tmp_path: Path) -> None:
    path = scenario_file(tmp_path)
    scenario = Scenario.load(path, ["data.batch_size=3", "chain.0.rate=0.5", "rounds=7"])
    run = new_run(scenario, path.stem, tmp_path / "runs")
    again = run.scenario()
    assert (again.protocol.rounds, again.protocol.data["batch_size"]) == (7, 3)
    assert Federation(again.protocol).chain.local.rate == 0.5
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["cores"] >= 1
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        assert environment["commit"].removesuffix("-dirty") == subprocess.check_output(command, text=True).strip()
    else:
        assert environment["commit"] is None


def test_a_server_that_was_not_curious_leaves_nothing_to_attack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(Scenario.from_tables({**TABLES, "audit": {"curious": False}}), "blind", tmp_path / "runs")
    with read_once(run) as reading:
        assert any("was not curious" in words for words, _ in notices(reading))
    assert main(["audit", str(run.folder)]) == 2
    assert "curious" in capsys.readouterr().err
