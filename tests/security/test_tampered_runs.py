"""Runs from elsewhere whose files were changed with regard to what they mean: a reader answers, or refuses in a sentence."""

import json
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.attacks.plan import MOST_ATTACKS, AttackPlan, PlannedAttack
from fedgauge.client.components import SpecError
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.checkpoint import Checkpoint
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import NotResumable, Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import write_tensors
from fedgauge.server.views.reading import run_summary
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.create import resume
from fedgauge.simulations.run.environment import environment
from tests.server.dashboard.pages import Http

ATTACKS: list[dict[str, Any]] = [{"use": "dlg", "iterations": 2, "trace": 2}, {"use": "analytic"}]
DATA = {"use": "mnist5k", "batch_size": 2, "auxiliary": 64}


@pytest.fixture(scope="module")
def base(
    tmp_path_factory: pytest.TempPathFactory, make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run]
) -> Path:
    """A folder with one run of attacks that reconstruct, with a checkpoint, and its ledger as one file."""
    run = make_taped(tmp_path_factory.mktemp("tampered") / "run", make_scenario(attack=ATTACKS, data=DATA))
    serve(run, LocalExecutor())
    params, buffers = run.scenario().federation.initial()
    seen = tuple(Participation(c, "accepted", "", 2, "a:b") for c in (0, 1))
    (run.folder / "environment.json").write_text(json.dumps(environment()))
    Checkpoint(2, params, buffers, {"momentum": [1.0], "by_name": {"a": 1}, "none": None}, seen).write(run.folder)
    with sqlite3.connect(run.folder / "ledger.sqlite") as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("VACUUM")
        db.execute("PRAGMA journal_mode = WAL")
    db.close()
    return run.folder.parent


@pytest.fixture
def theirs(base: Path, tmp_path: Path) -> Run:
    """A copy, to be changed."""
    return Run(Path(shutil.copytree(base / "run", tmp_path / "theirs")))


def changed(run: Run, script: str) -> None:
    db = sqlite3.connect(run.folder / "ledger.sqlite")
    db.executescript(script)
    db.close()


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize(
    ("script", "named"),
    {
        f"ALTER TABLE meta RENAME TO m; CREATE VIEW meta AS {ENDLESS} SELECT 'k' key, i value FROM n": "see its (table|view) m",
        "CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM scores; END": "see its trigger t",
        "CREATE TABLE more (x)": "see its table more",
        "DROP TABLE rounds": "see its table rounds",
        "ALTER TABLE jobs ADD COLUMN more": "see its table jobs",
        "DROP INDEX jobs_by_state": "see its index jobs_by_state",
    }.items(),
)
def test_a_ledger_with_another_schema_is_refused_before_anything_of_it_runs(
    theirs: Run, script: str, named: str, readonly: bool
) -> None:
    changed(theirs, script)
    with pytest.raises(LedgerError, match=f"is not as fedgauge makes a ledger: {named}"):
        theirs.ledger(readonly)


@pytest.mark.parametrize(
    ("script", "named"),
    {
        "UPDATE rounds SET accuracy = 'high'": "expected a number, or nothing as its accuracy, got 'high'",
        "UPDATE observations SET client = 4194304 WHERE client = 0": "as its client, got 4194304",
        "UPDATE scores SET status = x'ff'": "as its status, got b'",
        "UPDATE scores SET attack = 'other' WHERE example = 0": "as its attack, got None",
        "UPDATE attacks SET planned = '[1]'": "a planned attack must be a table",
        "INSERT OR REPLACE INTO meta VALUES ('rounds', 'many')": "expected a number of rounds, got 'many'",
    }.items(),
)
def test_a_value_of_another_kind_is_named_with_its_column(theirs: Run, script: str, named: str) -> None:
    changed(theirs, script)
    with pytest.raises(LedgerError, match=re.escape(named)), theirs.ledger(readonly=True) as ledger:
        _ = ledger.meta(), ledger.rounds(), ledger.observations(), ledger.planned(), list(ledger.scores_since(0))


@pytest.mark.parametrize("readonly", [True, False])
def test_pages_that_two_tables_share_are_refused(theirs: Run, readonly: bool) -> None:
    """A few inner pages, of which each has the next one as all its children, look like endless rows."""
    changed(
        theirs,
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET rootpage ="
        " (SELECT rootpage FROM sqlite_master WHERE name = 'rounds') WHERE name = 'numerics'",
    )
    with pytest.raises(LedgerError, match="is damaged: .*2nd reference to page"):
        theirs.ledger(readonly)


def test_a_plan_of_thousands_of_attacks_is_refused(theirs: Run) -> None:
    plan = AttackPlan(tuple(PlannedAttack(f"a{i}", {"use": "dlg"}) for i in range(MOST_ATTACKS)))
    with theirs.ledger() as ledger:
        before = ledger.attacks()
        with pytest.raises(LedgerError, match="attacks, and a run has at most 1000: make a new run"):
            ledger.add_attacks(plan, {planned.name: "" for planned in plan.attacks})
        assert ledger.attacks() == before
    with pytest.raises(SpecError, match=r"\[\[attack\]\]: a run has at most 1000 attacks, baselines included, got"):
        AttackPlan.from_tables([{"use": "dlg", "name": f"a{i}"} for i in range(MOST_ATTACKS)], {}, 1, 1)


@pytest.mark.parametrize("of", ["environment.json", "devices"])
def test_a_long_list_is_not_read_for_a_line_in_the_list_of_runs(theirs: Run, of: str) -> None:
    if of == "environment.json":
        (theirs.folder / of).write_text("[" + "[]," * 500_000 + "[]]")
        assert run_summary(theirs)["state"]
        assert main(["report", str(theirs.folder)]) == 0
        assert "no such file has more than 1048576" in (theirs.folder / "report.html").read_text()
    else:
        use = json.dumps({f"cuda:{i}": (1, 0, 1, 0.5) for i in range(5000)})
        changed(theirs, f"INSERT OR REPLACE INTO meta VALUES ('devices', '{use}')")
        with pytest.raises(LedgerError, match=rf"its devices fill {len(use)} letters, expected at most 65536"):
            run_summary(theirs)


def test_a_runs_version_is_short_whatever_the_run_says(theirs: Run) -> None:
    """It stands in a line of its own in what the page listens to."""
    changed(
        theirs,
        "INSERT OR REPLACE INTO meta VALUES ('replay', 'x' || char(10) || 'event: gone' || printf('%.*c', 999, 'x'))",
    )
    assert re.fullmatch("[0-9a-f]{16}", run_summary(theirs)["version"])


CODES = "char(27) || ']0;owned' || char(7)"


def test_a_report_holds_no_control_code(theirs: Run) -> None:
    words = ("UPDATE attacks SET knowledge = {0}, training = {0}, grading = {0}; UPDATE observations SET reason = {0}, "
             "status = 'rejected' WHERE client = 0; UPDATE jobs SET error = {0}, state = 'failed' WHERE id = 1; "
             "UPDATE numerics SET name = {0}; INSERT OR REPLACE INTO meta VALUES ('replay', 'mismatch'), "
             "('replay_detail', {0}), ('note_on_round_1', {0})")  # fmt: skip
    changed(theirs, words.format(CODES))
    (theirs.folder / "environment.json").write_text(json.dumps({"packages": {"torch": "\x1b[2J"}}))
    assert main(["report", str(theirs.folder)]) == 0
    page = (theirs.folder / "report.html").read_text()
    assert "]0;owned" in page and not set("\x1b\x07") & set(page)


def test_a_terminal_gets_no_control_code_of_an_export_and_a_pipe_gets_every_byte(
    theirs: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(theirs, f"UPDATE attacks SET knowledge = {CODES}")
    assert main(["export", str(theirs.folder)]) == 0
    assert "\x1b]0;owned\x07" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["export", str(theirs.folder)]) == 0
    shown = capsys.readouterr().out
    assert " ]0;owned " in shown and not set("\x1b\x07") & set(shown)


def test_one_array_of_a_checkpoint_is_taken_once(theirs: Run) -> None:
    """A small file could name one array, or a parameter, as often as memory lasts."""
    path = theirs.folder / "checkpoint.json"
    facts = json.loads(path.read_text())
    own = write_tensors(theirs.folder / facts["tensors"], {"state/0": torch.ones(9), "param/w": torch.ones(9)})
    facts |= {"params": ["w"], "digest": own}
    for named in ({"list": [{"array": "state/0"}] * 2}, {"tensor": "param/w"}):
        path.write_text(json.dumps({**facts, "strategy": {"momentum": named}}))
        with pytest.raises(NotResumable, match="is damaged: KeyError"):
            Checkpoint.read(theirs.folder)
    path.write_bytes(b" " * (33 << 20))
    with pytest.raises(NotResumable, match="no such file has more than 33554432"):
        Checkpoint.read(theirs.folder)


def test_half_a_pair_of_code_units_is_shown_as_a_question_mark(theirs: Run) -> None:
    """JSON can say what no text holds, and nobody can write it down."""
    half = {"packages": {"torch": "\ud800", "\udfff": "1"}}
    (theirs.folder / "environment.json").write_text(json.dumps(half))
    metrics = json.dumps({"clients": {"\ud800": 1.0, "\ud83d\ude00": 2.0}})
    changed(theirs, f"UPDATE rounds SET metrics = '{metrics}'")
    assert main(["report", str(theirs.folder)]) == 0
    assert "clients: ?" in (theirs.folder / "report.html").read_text()
    with Http(make_app(theirs.folder.parent), base_url="http://localhost") as http:
        shown = http.get("/api/runs/theirs/overview").json()
    assert shown["environment"] == {"packages": {"torch": "?", "?": "1"}}
    assert {"clients: ?", "clients: \U0001f600"} <= set(shown["app_rounds"]["heads"])


def test_an_attacks_name_is_no_markup(theirs: Run, capsys: pytest.CaptureFixture[str]) -> None:
    changed(theirs, "UPDATE attacks SET name = '[/x]' WHERE name = 'dlg'")
    assert main(["runs", "--runs", str(theirs.folder.parent)]) == 0
    assert "[/x], analytic" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"round": 10**9}, "expected a round up to 1000000, got 1000000000"),
        ({"round": True}, "expected a round"),
        ({"round": 900_000}, "its ledger lacks round 3, although its checkpoint is of round 900000"),
        ({"seen": [{"client": "a", "status": "accepted"}]}, "is damaged"),
        ({"params": []}, "its checkpoint is of another network"),
    ],
)
def test_a_checkpoint_of_another_kind_or_size_is_refused(theirs: Run, facts: dict[str, Any], named: str) -> None:
    path = theirs.folder / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    with pytest.raises(NotResumable, match=named):
        resume(theirs)


def test_a_scenario_of_a_billion_rounds_or_clients_is_refused(theirs: Run) -> None:
    path = theirs.folder / "scenario.toml"
    text = path.read_text()
    for key, most in (("rounds", 1_000_000), ("clients", 100_000)):
        path.write_text(re.sub(rf"^{key} = \d+$", f"{key} = 1000000000", text, flags=re.M))
        with pytest.raises(SpecError, match=f"{key} must be at most {most}, got 1000000000"):
            theirs.scenario()
        with pytest.raises(LedgerError, match=f"{key} must be at most {most}"):
            run_summary(theirs)


def test_one_run_that_cannot_be_read_is_a_line_with_its_reason(
    theirs: Run, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(theirs, f"DROP TABLE scores; CREATE VIEW scores AS {ENDLESS} SELECT i job_id FROM n")
    shutil.copytree(base / "run", theirs.folder.parent / "good")
    assert main(["runs", "--runs", str(theirs.folder.parent)]) == 0
    listed, said = capsys.readouterr()
    assert re.search(r"theirs +unreadable", listed) and "good" in listed and "is not as fedgauge makes a ledger" in said


def test_a_sweep_is_reported_without_the_cell_that_cannot_be_read(
    theirs: Run, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = theirs.folder.parent
    (sweep / "sweep.toml").touch()
    for name in ("good", "linked", "other"):
        shutil.copytree(base / "run", sweep / name)
    changed(theirs, "DROP TABLE scores")
    (sweep / "linked" / "note.json").symlink_to("/etc/hosts")
    assert main(["report", str(sweep)]) == 2
    printed, said = capsys.readouterr()
    assert printed.split() == [
        str(sweep / name) for name in ("good/report.html", "other/report.html", "comparison.html")
    ]
    assert [line.split(" is ")[0] for line in said.splitlines()] == [
        f"fedgauge: {sweep / 'linked' / 'note.json'}",
        f"fedgauge: {theirs.folder / 'ledger.sqlite'}",
    ]


def test_a_scenario_may_name_no_device_as_its_weights(theirs: Run) -> None:
    """/dev/zero has no end, and a pipe nobody who writes."""
    pipe = theirs.folder.parent / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/zero", str(pipe)):
        with pytest.raises(SpecError, match="is no file"):
            theirs.scenario([f"model.weights={json.dumps(path)}"])
