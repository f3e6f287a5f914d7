"""Runs that somebody changed who knows what they mean: every reader answers or refuses in a sentence, in bounded time and memory.

FEDGAUGE_FUZZ sets how many are tried, new ones each time, or those of FEDGAUGE_FUZZ_SEED, and FEDGAUGE_FUZZ_KINDS of which kinds;
tests/security/tampered_files.py makes them. With `pytest -s` it is said what was tried, and how long it took.
"""

import json
import os
import random
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from fedgauge.attacks.grading.one_run import EVIDENCE
from fedgauge.attacks.membership.measured import MEMBER
from fedgauge.attacks.plan import MOST_ATTACKS, AttackPlan, PlannedAttack
from fedgauge.client.components import SpecError
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.checkpoint import Checkpoint
from fedgauge.server.store.ledger_connection import LedgerError, LedgerFile
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import NotResumable, Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import write_tensors
from fedgauge.server.views.reading import run_summary
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.create import create_run, resume
from tests.server.dashboard.pages import Http

FUZZ = int(os.environ.get("FEDGAUGE_FUZZ", "60"))
# a case that fails is named by its seed and number
SEED = int(
    os.environ.get("FEDGAUGE_FUZZ_SEED", random.SystemRandom().getrandbits(32) if "FEDGAUGE_FUZZ" in os.environ else 1)
)
KINDS = [kind for kind in os.environ.get("FEDGAUGE_FUZZ_KINDS", "").split(",") if kind]  # none: of all kinds
ATTACKS: list[dict[str, Any]] = [{"use": "dlg", "iterations": 2, "trace": 2}, {"use": "analytic"}]
DATA = {"use": "mnist5k", "batch_size": 2, "auxiliary": 64}
OWNER = """client = 0
[data]
use = "mnist5k"
batch_size = 2
[[chain]]
use = "local_sgd"
rate = 0.1
"""
TERMS = {"chain": [{"use": "clip", "max_norm": 1.0}], "batch_size": 2, "secret": False, "records": 9}
EVENTS: list[dict[str, Any]] = [
    {"time": 1.0, "event": "sent", "run": 1, "round": 1, "norm": 0.5},
    {"time": 1.5, "event": "sent", "run": 1, "round": 2, "entries": 9, "terms": TERMS},
    {
        "time": 2.0,
        "event": "graded",
        "run": 1,
        "round": 1,
        "told": {"dlg": [10.0]},
        "exact": {"dlg": [10.1]},
        "refused": [],
    },
    {"time": 3.0, "event": "refused", "run": 1, "what": "train", "reason": "no"},
]


@pytest.fixture(scope="module")
def base(
    tmp_path_factory: pytest.TempPathFactory, make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run]
) -> Path:
    """A folder with one run of attacks that reconstruct, its ledger as one file, and an owner's file."""
    place = tmp_path_factory.mktemp("tampered")
    return furnished(make_taped(place / "run", make_scenario(attack=ATTACKS, data=DATA)))


@pytest.fixture(scope="module")
def protected(
    tmp_path_factory: pytest.TempPathFactory, make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run]
) -> Path:
    """The same, with noise and limits, a test of membership, and canary examples."""
    chain = [{"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 1.0}, {"use": "local_sgd", "rate": 0.1}]
    attacks = [{**ATTACKS[0], "tune": "off"}, ATTACKS[1], {"use": "membership", "held": 2, "strangers": 40}]
    planted = {"clients": 2, "examples": 3}
    run = make_taped(
        tmp_path_factory.mktemp("protected") / "run",
        make_scenario(attack=attacks, data={**DATA, "auxiliary": 400}, chain=chain, canaries=planted),
    )
    place = furnished(run)
    with run.ledger(readonly=True) as ledger:
        told = {row["metric"] for row in ledger.scores() if row["value"] is not None}
    assert {MEMBER, EVIDENCE} <= told, "too few public examples tell nothing"
    return place


def furnished(run: Run) -> Path:
    """The folder of a run, which is attacked, and gets a checkpoint, an owner's file and what a client noted."""
    serve(run, LocalExecutor())
    params, buffers = run.scenario().federation.initial()
    seen = tuple(Participation(c, "accepted", "", 2, "a:b") for c in (0, 1))
    Checkpoint(2, params, buffers, {"momentum": [1.0], "by_name": {"a": 1}, "none": None}, seen).write(run.folder)
    other = create_run(run.scenario(), run.folder.parent / "other")
    shutil.copy(other.folder / "environment.json", run.folder)
    shutil.rmtree(other.folder)
    (run.folder / "owner" / "state").mkdir(parents=True)
    (run.folder / "owner" / "client.toml").write_text(OWNER)
    (run.folder / "owner" / "state" / "log.jsonl").write_text("\n".join(map(json.dumps, EVENTS)))
    (run.folder / "owner" / "state" / "protocol.json").write_text(run.scenario().protocol.to_json())
    with sqlite3.connect(run.folder / "ledger.sqlite") as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("VACUUM")
        db.execute("PRAGMA journal_mode = WAL")
    db.close()
    return run.folder.parent


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.full)])
def test_every_reader_answers_or_refuses_in_a_sentence(protected: Path, times: int) -> None:
    number = FUZZ * times
    command = [sys.executable, "-m", "tests.security.tampering", str(protected), str(number), str(SEED * times), *KINDS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print({key: value for key, value in found.items() if key != "wrong"})
    assert found["wrong"] == []
    assert found["tried"] == number
    assert found["counts"]["answered"] and found["counts"]["refused"], "neither all nor nothing is refused"


# ------------------------------------------------------------------------------------------------- what a review found


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


MANY_ATTACKS = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000) "
    "INSERT INTO attacks (name, planned, knowledge, seed) SELECT 'a' || i, planned, knowledge, seed FROM attacks, n WHERE id = 1"
)


@pytest.mark.parametrize("readonly", [True, False])
def test_a_ledger_of_thousands_of_attacks_is_refused(theirs: Run, readonly: bool) -> None:
    """Each is compared with each: 3,000 in two megabytes cost a page ten seconds of the processor."""
    changed(theirs, MANY_ATTACKS)
    with pytest.raises(LedgerError, match="is damaged: a run has at most 1000 attacks, got 30[0-9]{2}"):
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


def test_a_few_pages_that_look_like_endless_rows_end_in_a_sentence(
    theirs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve inner pages, of which each has the next one as all its children: 80^11 copies of one page of rows."""
    path = theirs.folder / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'rounds'").fetchone()
    db.close()
    data = bytearray(path.read_bytes())
    size, pages = int.from_bytes(data[16:18], "big"), len(data) // int.from_bytes(data[16:18], "big")
    leaf = data[(root - 1) * size : root * size]
    assert leaf[0] == 13, "all rounds lie on one page"

    chain = [_inner(size, pages + 2 + i) for i in range(11)]
    data[(root - 1) * size : root * size] = _inner(size, pages + 1)
    data += b"".join(chain) + leaf
    data[28:32] = (len(data) // size).to_bytes(4, "big")
    path.write_bytes(data)
    with pytest.raises(LedgerError, match="is damaged: .*On tree page"):
        theirs.ledger(readonly=True)
    os.truncate(path, 1 << 40)  # a hole, which is no bytes on the disk, lets the file look large
    with pytest.raises(LedgerError, match="is damaged"):
        theirs.ledger(readonly=True)
    os.truncate(path, len(data))
    monkeypatch.setattr(
        LedgerFile, "_check_pages", lambda self: None
    )  # somebody may write them when the ledger is open
    with (
        pytest.raises(LedgerError, match="cannot be read as a ledger: interrupted"),
        theirs.ledger(readonly=True) as ledger,
    ):
        ledger.rounds()


def _inner(size: int, child: int) -> bytes:
    """An inner page of a table's tree with one page as each of its 80 children."""
    cells = [size - 5 * (i + 1) for i in range(80)]
    page = bytearray(size)
    page[:12] = (
        b"\5\0\0" + len(cells).to_bytes(2, "big") + cells[-1].to_bytes(2, "big") + b"\0" + child.to_bytes(4, "big")
    )
    for i, at in enumerate(cells):
        page[12 + 2 * i : 14 + 2 * i] = at.to_bytes(2, "big")
        page[at : at + 5] = child.to_bytes(4, "big") + bytes([i])
    return bytes(page)


def test_rows_that_share_one_text_end_in_a_sentence(theirs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 rows of a megabyte each on the same overflow pages: a file of one megabyte."""
    path = theirs.folder / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'rounds'").fetchone()
        empty = len(db.execute("PRAGMA table_info(rounds)").fetchall()) - 1  # metrics is the last
    db.close()
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    first, local = len(data) // size + 1, (size - 12) * 32 // 255 - 23  # bytes of a row that stay on its own page
    text = local - empty - 5 + 250 * (size - 4)  # letters, so that the rest fills 250 pages

    def number(value: int) -> bytes:
        return bytes([value >> 14 & 127 | 128, value >> 7 & 127 | 128, value & 127])

    # the length of the record's head, 0 (none) for each other column, the kind of the text, and the text
    record = bytes([empty + 5]) + bytes(empty) + b"\x80" + number(2 * text + 13) + b" " * text
    rest = record[local:]
    assert len(rest) == 250 * (size - 4)
    page = bytearray(size)
    end = size
    for row in range((size - 100) // (local + 10)):
        cell = number(len(record)) + bytes([row]) + record[:local] + first.to_bytes(4, "big")
        end -= len(cell)
        page[end : end + len(cell)] = cell
        page[8 + 2 * row : 10 + 2 * row] = end.to_bytes(2, "big")
        page[3:5] = (row + 1).to_bytes(2, "big")
    page[0], page[5:7] = 13, end.to_bytes(2, "big")
    data[(root - 1) * size : root * size] = _inner(size, first + 250)
    for i in range(250):
        following = first + i + 1 if i < 249 else 0
        data += following.to_bytes(4, "big") + rest[i * (size - 4) : (i + 1) * (size - 4)]
    data += page
    data[28:32] = (len(data) // size).to_bytes(4, "big")
    path.write_bytes(data)
    with pytest.raises(LedgerError, match="is damaged: .*2nd reference to page"):
        theirs.ledger(readonly=True)
    monkeypatch.setattr(
        LedgerFile, "_check_pages", lambda self: None
    )  # somebody may write them when the ledger is open
    with theirs.ledger(readonly=True) as ledger:
        rows = ledger._db.execute("SELECT metrics FROM rounds")
        assert len(rows.fetchone()["metrics"]) == text, "one row is read as any other"
    with (
        pytest.raises(LedgerError, match="its rows have more text than its .* bytes can hold"),
        theirs.ledger(readonly=True) as ledger,
    ):
        ledger.rounds()


def test_an_honest_run_of_many_scores_repeats_its_long_cards(theirs: Run) -> None:
    """The card of an attack comes with each of its scores: 60 MB of text from a file of three."""
    many = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)"
    values = "1, (SELECT attack FROM scores WHERE job_id = 1), 0, i, 'mse', 1, 0.5, 'converged', 0.1"
    changed(
        theirs,
        f"UPDATE attacks SET knowledge = printf('%.*c', 3000, 'x'); INSERT OR IGNORE INTO scores {many} SELECT {values} FROM n",
    )
    with theirs.ledger() as ledger:
        assert sum(len(row["knowledge"]) for row in ledger.scores()) > 6e7


@contextmanager
def short_files(most: int) -> Iterator[None]:
    """Nothing here can write a file of more bytes; SQLite sorts in temporary ones."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def crowded(run: Run, number: int, script: str) -> None:
    """Give a run so many jobs in each state with so many scores, and change it."""
    many = f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {number})"
    attack = "(SELECT attack_id FROM jobs WHERE id = 1), 1, 0, 0"
    jobs = "".join(
        f"INSERT INTO jobs (id, key, attack_id, round, client, wave, state, numerics_id, error, finished, ended) {many}"
        f" SELECT i + {first}, i + {first}, {attack}, '{state}', 1, {error}, i, i FROM n;"
        for first, state, error in ((10**6, "done", "NULL"), (2 * 10**6, "failed", "'e'"), (3 * 10**6, "done", "'e'"))
    )
    scores = f"INSERT OR IGNORE INTO scores {many} SELECT i + 1000000, '', 0, 0, 'objective', 1, 0.5, 'converged', 0.1 FROM n;"
    changed(run, jobs + scores + script)


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("UPDATE attacks SET name = LONG WHERE id = 1", "expected a text of at most 300 letters as its name"),
        ("UPDATE numerics SET torch = LONG", "expected a text of at most 300 letters as its torch"),
        ("UPDATE attacks SET knowledge = LONG", "its rows have more text than its [0-9]* bytes can hold"),
        ("UPDATE attacks SET grading = LONG", "its rows have more text than its [0-9]* bytes can hold"),
    ],
)
def test_a_long_text_is_not_sorted_with_every_row_that_belongs_to_it(theirs: Run, script: str, named: str) -> None:
    """300 MB or more of temporary files from a file of one, before any row was read."""
    crowded(theirs, 1500, script.replace("LONG", "printf('%.*c', 300000, 'x')"))
    with short_files(32 << 20), pytest.raises(LedgerError, match=named), theirs.ledger(readonly=True) as ledger:
        _ = ledger.reasons(), ledger.outcomes(), ledger.numerics(), ledger.ungraded(), list(ledger.scores())


def test_names_are_not_sorted_with_every_row_that_belongs_to_them(theirs: Run) -> None:
    """Of the length that a name may have: 24 MB of names from a file of six."""
    crowded(
        theirs, 20_000, "UPDATE attacks SET name = replace(printf('%.*c', 300, 'x'), 'x', char(128512)) WHERE id = 1"
    )
    with short_files(8 << 20), theirs.ledger(readonly=True) as ledger:
        assert max(row["jobs"] for row in ledger.outcomes()) > 20_000
        assert max(row["jobs"] for row in ledger.numerics()) > 60_000
        assert [row["jobs"] for state in ("failed", "done") for row in ledger.reasons(state)][:2] == [20_001, 20_001]
        assert len({job.attack for job in ledger.ungraded()}) == 1 and len(ledger.ungraded()) > 20_000
        assert sum(row["jobs"] for row in ledger.graded()) > 40_000


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
    assert {"clients: ?", "clients: \U0001f600"} <= shown["app_rounds"][0]["metrics"].keys()


def test_an_attacks_name_is_no_markup(theirs: Run, capsys: pytest.CaptureFixture[str]) -> None:
    changed(theirs, "UPDATE attacks SET name = '[/x]' WHERE name = 'dlg'")
    assert main(["runs", "--runs", str(theirs.folder.parent)]) == 0
    assert "[/x], analytic" in capsys.readouterr().out


def test_an_attack_that_has_its_scores_and_waits_is_carried_out_again(theirs: Run) -> None:
    changed(theirs, "UPDATE jobs SET state = 'queued', finished = NULL")
    serve(theirs, LocalExecutor())
    with theirs.ledger(readonly=True) as ledger:
        progress = ledger.progress()
    assert progress.done == progress.total


def test_rows_that_contradict_each_other_end_in_a_sentence(theirs: Run) -> None:
    with (
        pytest.raises(LedgerError, match="cannot be read as a ledger: UNIQUE constraint failed"),
        theirs.ledger() as ledger,
    ):
        ledger._db.execute("INSERT INTO attacks SELECT * FROM attacks")


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


@pytest.mark.parametrize("moment", [5, {"dict": [["w", 5]]}, "text"])
def test_a_strategys_state_that_is_no_state_of_it_is_refused_before_anything_starts(theirs: Run, moment: Any) -> None:
    """FedAdam has no moments before its first round, so that they were not compared with anything."""
    scenario, path = theirs.folder / "scenario.toml", theirs.folder / "checkpoint.json"
    scenario.write_text(tomli_w.dumps({**tomllib.loads(scenario.read_text()), "strategy": {"use": "FedAdam"}}))
    path.write_text(json.dumps({**json.loads(path.read_text()), "strategy": {"m_t": moment}}))
    with pytest.raises(NotResumable, match="expected the strategy's m_t as arrays of the model's shapes"):
        resume(theirs)


def test_a_scenario_of_a_billion_rounds_or_clients_is_refused(theirs: Run) -> None:
    path = theirs.folder / "scenario.toml"
    text = path.read_text()
    for key, most in (("rounds", 1_000_000), ("clients", 100_000)):
        path.write_text(re.sub(rf"^{key} = \d+$", f"{key} = 1000000000", text, flags=re.M))
        with pytest.raises(SpecError, match=f"{key} must be at most {most}, got 1000000000"):
            theirs.scenario()
        with pytest.raises(LedgerError, match=f"{key} must lie in 0..{most}"):
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
