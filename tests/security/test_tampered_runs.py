"""Runs from elsewhere whose files were changed with regard to what they mean: a reader answers, or refuses in a sentence."""

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from fedgauge.client.components import SpecError
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.checkpoint import Checkpoint
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import NotResumable, Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import write_tensors
from fedgauge.server.views.snapshot import RunLine, tables_of
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.create import resume
from fedgauge.simulations.run.environment import environment

ATTACKS: list[dict[str, Any]] = [{"use": "dlg", "iterations": 2}, {"use": "analytic"}]
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


def test_a_report_of_scores_without_clients_is_written(theirs: Run) -> None:
    changed(theirs, "DELETE FROM observations")
    assert main(["report", str(theirs.folder)]) == 0


def test_an_update_of_another_form_ends_no_audit(
    make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_taped(tmp_path / "run", make_scenario(attack=[{"use": "dlg", "iterations": 1}]), rounds=1)
    digest = run.tape().write_update(1, 1, {"w": torch.zeros(2)})
    with run.ledger() as ledger:
        ledger.record_intake(1, [Participation(1, "accepted", "", 2, digest)])
    serve(run, LocalExecutor())
    with run.ledger() as ledger:
        assert {row["client"]: row["status"] for row in ledger.fates()} == {0: "attacked", 1: "not applicable"}


@pytest.mark.parametrize("key", ["audit", "server_attack"])
def test_a_number_in_place_of_a_table_is_no_scenario(key: str, tmp_path: Path) -> None:
    tables = {
        "rounds": 1,
        "clients": 1,
        "data": DATA,
        "model": {"use": "mlp"},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
    }
    (tmp_path / "scenario.toml").write_text(tomli_w.dumps(tables))
    assert tables_of(Run(tmp_path))["data"] == DATA
    (tmp_path / "scenario.toml").write_text(tomli_w.dumps({**tables, key: 5}))
    with pytest.raises(LedgerError):
        tables_of(Run(tmp_path))


@pytest.mark.parametrize("size", [0, "8"])
def test_a_chains_batch_size_that_is_no_count_is_no_scenario(size: object, tmp_path: Path) -> None:
    chain = [{"use": "local_sgd", "rate": 0.1, "batch_size": size}]
    tables = {"rounds": 1, "clients": 1, "data": DATA, "model": {"use": "mlp"}, "chain": chain}
    (tmp_path / "scenario.toml").write_text(tomli_w.dumps(tables))
    with pytest.raises(LedgerError):
        tables_of(Run(tmp_path))


def test_nodes_that_are_no_numbers_are_damage(theirs: Run) -> None:
    changed(theirs, "INSERT INTO meta VALUES ('nodes', '{\"0\": Infinity}')")
    assert main(["report", str(theirs.folder)]) == 2


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize(
    "script",
    [
        f"ALTER TABLE meta RENAME TO m; CREATE VIEW meta AS {ENDLESS} SELECT 'k' key, i value FROM n",
        "CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM scores; END",
        "CREATE TABLE more (x)",
        "DROP TABLE rounds",
        "ALTER TABLE jobs ADD COLUMN more TEXT",
        "DROP INDEX jobs_by_state",
    ],
)
def test_a_ledger_with_another_schema_is_refused_before_anything_of_it_runs(
    theirs: Run, script: str, readonly: bool
) -> None:
    changed(theirs, script)
    with pytest.raises(LedgerError):
        theirs.ledger(readonly)


@pytest.mark.parametrize(
    ("script", "named"),
    {
        "UPDATE rounds SET accuracy = 'high'": "rounds.accuracy",
        "UPDATE observations SET client = 4194304 WHERE client = 0": "failed in observations",
        "UPDATE scores SET status = x'ff'": "scores.status",
        "UPDATE attacks SET planned = '[1]'": "planned attack",
        "UPDATE attacks SET role = 'judge'": "constraint failed in attacks",
        "INSERT OR REPLACE INTO meta VALUES ('rounds', 'many')": "rounds, got 'many'",
    }.items(),
)
def test_a_value_of_another_kind_is_named_with_its_table(theirs: Run, script: str, named: str) -> None:
    rewrite = "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = replace(sql, '{}', '{}')"
    changed(theirs, rewrite.format("STRICT", "/*free*/"))  # SQLite itself would refuse to write these
    changed(theirs, f"PRAGMA ignore_check_constraints = ON; {script}")
    changed(theirs, rewrite.format("/*free*/", "STRICT"))
    with pytest.raises(LedgerError, match=re.escape(named)), theirs.ledger(readonly=True) as ledger:
        _ = ledger.meta(), ledger.planned()


def test_scores_under_another_attacks_name_are_not_read(theirs: Run) -> None:
    with theirs.ledger(readonly=True) as ledger:
        before = len(list(ledger.score_rows()))
    changed(theirs, "UPDATE scores SET attack = 'other' WHERE example = 0")
    with theirs.ledger(readonly=True) as ledger:
        rows = list(ledger.score_rows())
    assert 0 < len(rows) < before and not any(row[2] == "other" for row in rows)


def test_a_long_list_is_not_read_for_a_line_in_the_list_of_runs(theirs: Run) -> None:
    (theirs.folder / "environment.json").write_text("[" + "[]," * 500_000 + "[]]")
    assert RunLine(theirs).state
    assert main(["report", str(theirs.folder)]) == 0
    assert "more than 1048576" in (theirs.folder / "report.html").read_text()


CODES = "char(27) || ']0;owned' || char(7)"


def test_a_report_holds_no_control_code(theirs: Run) -> None:
    words = ("UPDATE attacks SET knowledge = {0}, training = {0}, grading = {0}; UPDATE observations SET reason = {0}, "
             "status = 'rejected' WHERE client = 0; UPDATE jobs SET error = {0}, state = 'failed' WHERE id = 1; "
             "UPDATE jobs SET computed_on = {0}; INSERT OR REPLACE INTO meta VALUES ('replay', 'mismatch'), "
             "('replay_detail', {0}), ('note_on_round_1', {0})")  # fmt: skip
    changed(theirs, words.format(CODES))
    (theirs.folder / "environment.json").write_text(json.dumps({"packages": {"torch": "\x1b[2J"}}))
    assert main(["report", str(theirs.folder)]) == 0
    page = (theirs.folder / "report.html").read_text()
    assert "]0;owned" in page and not set("\x1b\x07") & set(page)


def test_one_array_of_a_checkpoint_is_taken_once(theirs: Run) -> None:
    """A small file could name one array, or a parameter, as often as memory lasts."""
    path = theirs.folder / "checkpoint.json"
    facts = json.loads(path.read_text())
    own = write_tensors(theirs.folder / facts["tensors"], {"state/0": torch.ones(9), "param/w": torch.ones(9)})
    facts |= {"params": ["w"], "digest": own}
    for named in ({"list": [{"array": "state/0"}] * 2}, {"array": "param/w"}):
        path.write_text(json.dumps({**facts, "strategy": {"momentum": named}}))
        with pytest.raises(NotResumable):
            Checkpoint.read(theirs.folder)
    path.write_bytes(b" " * (33 << 20))
    with pytest.raises(NotResumable, match="33554432"):
        Checkpoint.read(theirs.folder)


@pytest.mark.parametrize("client", [{}, "x", 2**70, None])
def test_a_checkpoint_whose_clients_are_no_numbers_is_damaged(theirs: Run, client: object) -> None:
    path = theirs.folder / "checkpoint.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "seen": [{**facts["seen"][0], "client": client}]}))
    with pytest.raises(NotResumable):
        Checkpoint.read(theirs.folder)


def test_a_checkpoint_of_another_network_is_refused(theirs: Run) -> None:
    path = theirs.folder / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "params": []}))
    with pytest.raises(NotResumable):
        resume(theirs)


def test_a_scenario_of_a_billion_rounds_or_clients_is_refused(theirs: Run) -> None:
    path = theirs.folder / "scenario.toml"
    text = path.read_text()
    for key, most in (("rounds", 1_000_000), ("clients", 100_000)):
        path.write_text(re.sub(rf"^{key} = \d+$", f"{key} = 1000000000", text, flags=re.M))
        with pytest.raises(SpecError, match=f"{key} .*{most}.* 1000000000"):
            theirs.scenario()
        with pytest.raises(LedgerError):
            RunLine(theirs)


def test_one_run_that_cannot_be_read_is_a_line_with_its_reason(
    theirs: Run, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(theirs, f"DROP TABLE scores; CREATE VIEW scores AS {ENDLESS} SELECT i job_id FROM n")
    shutil.copytree(base / "run", theirs.folder.parent / "good")
    assert main(["runs", "--runs", str(theirs.folder.parent)]) == 0
    listed, said = capsys.readouterr()
    assert re.search(r"theirs +unreadable", listed) and "good" in listed and "makes a ledger" in said
