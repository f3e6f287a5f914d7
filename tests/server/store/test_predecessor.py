"""Runs and scenarios of fedleak, as fedgauge was called before, are refused with one sentence that says what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.server.store import predecessor
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import main


@pytest.fixture
def former(write_former_run: Callable[[Path], Path], tmp_path: Path) -> Path:
    """A run folder as fedleak left it."""
    return write_former_run(tmp_path / "runs" / "20250101-000000-former")


@pytest.mark.parametrize("kept", ["scenario.toml", "environment.json"])
def test_a_run_of_fedleak_is_known_by_its_scenario_or_by_its_versions(former: Path, kept: str) -> None:
    if kept == "environment.json":
        (former / "scenario.toml").write_text('rounds = 1\n[data]\nuse = "mnist5k"\n')
    else:
        (former / "environment.json").unlink()
    with pytest.raises(LedgerError, match="20250101-000000-former is a run of fedleak.*run its scenario again"):
        Run.open(former)


def test_malice_alone_gives_a_run_of_fedleak_away(former: Path) -> None:
    (former / "environment.json").write_text("{")
    (former / "scenario.toml").write_text('rounds = 1\n[data]\nuse = "mnist5k"\n[[malice]]\nuse = "imprint"\n')
    with pytest.raises(LedgerError, match="fedleak"):
        Run.open(former)


def test_a_run_of_today_is_not_refused_even_with_a_users_package_called_client(former: Path) -> None:
    (former / "environment.json").write_text(json.dumps({"packages": {"fedgauge": "1.0"}}))
    text = (former / "scenario.toml").read_text()
    (former / "scenario.toml").write_text(text.replace("client.data:mnist5k", "mnist5k"))
    assert Run.open(former).folder == former


@pytest.mark.parametrize(
    "command",
    [
        ["report", "RUN"],
        ["watch", "RUN"],
        ["audit", "RUN"],
        ["export", "RUN"],
        ["run", "--resume", "RUN"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_that_opens_it_says_one_sentence_and_ends_with_2(
    former: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(former) if word == "RUN" else word for word in command]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(f"fedgauge: {former} is a run of fedleak")


def test_the_list_of_runs_shows_it(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs", str(former.parent)]) == 0
    assert former.name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"malice": [{"use": "imprint"}]}, r"^\[\[malice\]\] is called \[\[server_attack\]\] now$"),
        ({"tape": {"keep": "scored"}}, '"scored" is called keep = "attacked" now'),
        (
            {"attack": [{"use": "idlg"}, {"use": "dlg", "fit": 0.1}]},
            r"\[\[attack\]\] #2: fit is called restart_above now",
        ),
        ({"attack": [{"use": "dlg", "enough": 0.1}]}, "#1: enough is called tolerance now"),
        ({"data": {"use": "client.data:mnist5k"}}, "use = 'mnist5k' in place of 'client.data:mnist5k'"),
    ],
    ids=["malice", "scored", "fit", "enough", "dotted"],
)
def test_a_scenario_of_before_is_told_the_new_name(
    tables: Callable[..., dict[str, Any]], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SpecError, match=sentence):
        Scenario.from_tables(tables(**changes))


def test_a_key_of_another_attack_keeps_its_name(tables: Callable[..., dict[str, Any]]) -> None:
    assert predecessor.replaced(tables(attack=[{"use": "mine:attack", "fit": 1}])) == ""
