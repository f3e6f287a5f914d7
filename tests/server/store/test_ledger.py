"""The ledger: every job is done once, every score is there once, whoever dies in between."""

import math
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fedgauge.attacks.base import Budget
from fedgauge.attacks.grading.scores import WHOLE_BATCH, ScoreRecord
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.server.store import ledger_file
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import APPLICATION, LedgerError
from fedgauge.server.store.ledger_rows import Lease, Participation, Progress

DLG = {"use": "dlg"}
FEEDBACK = {"use": "feedback_blending"}  # an attack with memory


def plan_of(*names: str, wave: int = 2, **options: Any) -> AttackPlan:
    """Attacks of these names; one whose name begins with m has memory."""
    attacks = tuple(PlannedAttack(name, FEEDBACK if name[0] == "m" else DLG, Budget(5)) for name in names)
    return AttackPlan(attacks, wave=wave, **options)


def accepted(*clients: int, round: int = 1) -> list[Participation]:
    return [Participation(c, "accepted", "", 4, f"weights{round}:update{round}.{c}") for c in clients]


def filled(path: Path, plan: AttackPlan, rounds: int = 1, clients: int = 4) -> Ledger:
    """A ledger with the plan's jobs for some rounds."""
    ledger = Ledger(path, create=True)
    ledger.add_attacks(plan, {p.name: f"card of {p.name}" for p in plan.attacks})
    for round in range(1, rounds + 1):
        ledger.record_intake(round, accepted(*range(clients), round=round), plan)
    return ledger


def rows_of(lease: Lease, examples: int = 2) -> dict[int, list[ScoreRecord]]:
    """Scores as an audit writes them: per example, and graded against another client's truth."""
    found: dict[int, list[ScoreRecord]] = {}
    for c in lease.clients:
        found[c] = [
            ScoreRecord(lease.round, c, lease.attack.name, WHOLE_BATCH, "label_accuracy", 1.0, "converged", 0.1)
        ]
        for e in range(examples):
            found[c].append(ScoreRecord(lease.round, c, lease.attack.name, e, "psnr", 20.0 + e, "converged", 0.1))
        if c in lease.others:
            wrong = f"wrong_client({lease.attack.name})"
            found[c].append(ScoreRecord(lease.round, lease.others[c], wrong, 0, "psnr", 9.0, "converged", 0.1))
    return found


def jobs(ledger: Ledger) -> list[dict[str, Any]]:
    query = "SELECT j.*, a.name FROM jobs j JOIN attacks a ON a.id = j.attack_id ORDER BY j.id"
    return [dict(row) for row in ledger._db.execute(query)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


# ----------------------------------------------------------------------------------------------------------- the file


def test_a_new_ledger_is_in_wal_mode_and_says_what_it_is(path: Path) -> None:
    Ledger(path, create=True).close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION == int.from_bytes(b"flek", "big")
        assert db.execute("PRAGMA user_version").fetchone()[0] == len(ledger_file.MIGRATIONS)
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.close()


def test_a_missing_ledger_is_named_and_not_made(path: Path) -> None:
    with pytest.raises(LedgerError, match=f"{path} is missing: {path.parent} is not a run folder"):
        Ledger(path)
    assert not path.exists()


def test_a_foreign_sqlite_file_is_named_and_left_alone(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mine (x)")
    db.commit()
    db.close()
    before = path.read_bytes()
    for create in (False, True):
        with pytest.raises(LedgerError, match=f"{path} is not a fedgauge ledger"):
            Ledger(path, create=create)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("data", [b"garbage" * 100, b"SQLite format 3\x00" + b"\xff" * 500])
def test_a_file_that_is_no_database_is_named_and_left_alone(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(LedgerError, match=f"{path} cannot be read as a ledger"):
        Ledger(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("data", [b"", b"x"])
def test_an_emptied_ledger_is_not_taken_for_a_new_one(path: Path, data: bytes) -> None:
    """A run whose ledger was lost must not look like one in which nothing happened."""
    path.write_bytes(data)
    with pytest.raises(LedgerError, match=f"{path} is not a fedgauge ledger: it is empty"):
        Ledger(path)
    assert path.read_bytes() == data


def test_a_folder_is_no_ledger(path: Path) -> None:
    path.mkdir()
    with pytest.raises(LedgerError, match=f"{path} cannot be read as a ledger"):
        Ledger(path)


def test_a_newer_ledger_is_refused_with_what_to_do(path: Path) -> None:
    Ledger(path, create=True).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(
        LedgerError, match=rf"{path} has ledger version 99; this fedgauge reads up to \d+: update fedgauge"
    ):
        Ledger(path)


MIGRATION = "ALTER TABLE rounds ADD COLUMN epsilon REAL; CREATE INDEX by_epsilon ON rounds (epsilon)"


def test_an_older_ledger_is_brought_up_to_date_and_keeps_its_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(path, plan_of("a")) as old:
        old.record_round(1, 0.5, 1.0, 2.0, 0.1)
        versions = len(ledger_file.MIGRATIONS)
        before = [dict(o) for o in old.observations()], jobs(old)
    monkeypatch.setattr(
        ledger_file, "MIGRATIONS", (*ledger_file.MIGRATIONS, MIGRATION)
    )
    for _ in range(2):  # the second finds nothing to do
        with Ledger(path) as ledger:
            assert ledger._db.execute("PRAGMA user_version").fetchone()[0] == versions + 1
            assert dict(ledger.rounds()[0])["epsilon"] is None
            assert dict(ledger.rounds()[0])["accuracy"] == 0.5
            assert ([dict(o) for o in ledger.observations()], jobs(ledger)) == before


def test_a_migration_that_fails_leaves_the_old_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, plan_of("a")).close()
    with monkeypatch.context() as patch:
        broken = (*ledger_file.MIGRATIONS, MIGRATION + "; CREATE TABLE rounds (twice)")
        patch.setattr(ledger_file, "MIGRATIONS", broken)
        with pytest.raises(LedgerError, match=f"{path} cannot be read as a ledger: table rounds already exists"):
            Ledger(path)
    with Ledger(path) as ledger:
        assert ledger._db.execute("PRAGMA user_version").fetchone()[0] == len(ledger_file.MIGRATIONS)
        assert "epsilon" not in [row[1] for row in ledger._db.execute("PRAGMA table_info(rounds)")]
        assert ledger.progress().queued == 4


def test_many_that_open_a_fresh_ledger_at_once_all_get_it(path: Path) -> None:
    errors: list[BaseException] = []

    def open_it() -> None:
        try:
            Ledger(path, create=True).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with Ledger(path) as ledger:
        assert ledger.progress() == Progress()


# ------------------------------------------------------------------------------------------------------- what happened


def test_rounds_and_facts_come_back(path: Path) -> None:
    with Ledger(path, create=True) as ledger:
        ledger.record_round(0, 0.1, 2.3, 1.5, 0.0)
        ledger.record_round(1, 0.2, 2.2, 1.6, 0.01)
        ledger.record_round(1, 0.3, 2.1, 1.7, 0.02)  # a round that was trained again
        ledger.set_meta(state="trained", replay="ok")
        ledger.set_meta(state="failed")
    with Ledger(path) as again:
        assert [tuple(r) for r in again.rounds()] == [(0, 0.1, 2.3, 1.5, 0.0), (1, 0.3, 2.1, 1.7, 0.02)]
        assert again.meta() == {"state": "failed", "replay": "ok"}


def test_a_diverged_rounds_loss_is_no_crash(path: Path) -> None:
    with Ledger(path, create=True) as ledger:
        ledger.record_round(1, 0.1, math.nan, 1.0, 0.0)
        ledger.record_round(2, 0.1, math.inf, 1.0, 0.0)
        assert [r["loss"] for r in ledger.rounds()] == [None, math.inf]


def test_intake_and_jobs_come_in_one_transaction(path: Path) -> None:
    """A plan whose attacks are unknown fails the jobs; the observations must not stay without them."""
    with Ledger(path, create=True) as ledger:
        with pytest.raises(KeyError, match="never added"):
            ledger.record_intake(1, accepted(0, 1), plan_of("never added"))
        assert ledger.observations() == []
        assert ledger.progress().total == 0


def test_only_what_is_accepted_and_on_the_tape_is_attacked(path: Path) -> None:
    plan = plan_of("a")
    with filled(path, plan, rounds=0) as ledger:
        seen = [
            *accepted(0),
            Participation(1, "rejected", "NaN", None, "kept by mistake"),
            Participation(2, "missing", "late"),
            Participation(3, "accepted", "", 4, None),
        ]
        ledger.record_intake(1, seen, plan)
        assert [j["client"] for j in jobs(ledger)] == [0]


# -------------------------------------------------------------------------------------------------------------- plans


def test_enqueueing_again_adds_nothing(path: Path) -> None:
    plan = plan_of("a", "b")
    with filled(path, plan, rounds=2) as ledger:
        before = jobs(ledger)
        assert len(before) == 2 * 2 * 4
        ledger.enqueue(plan)
        assert jobs(ledger) == before
        ledger.record_intake(2, accepted(*range(4), round=2), plan)
        assert jobs(ledger) == before
        assert len({j["key"] for j in before}) == len(before)


def test_a_wider_plan_adds_only_what_is_new(path: Path) -> None:
    with filled(path, plan_of("a", rounds=(1,), clients=(0, 1)), rounds=2) as ledger:
        assert [(j["round"], j["client"]) for j in jobs(ledger)] == [(1, 0), (1, 1)]
        ledger.enqueue(plan_of("a"))
        assert sorted((j["round"], j["client"]) for j in jobs(ledger)) == [(r, c) for r in (1, 2) for c in range(4)]


def test_another_update_of_the_same_client_is_another_job(path: Path) -> None:
    """The key is of the bytes: a round that was trained again is attacked again."""
    plan = plan_of("a")
    with filled(path, plan, clients=1) as ledger:
        ledger.record_intake(1, [Participation(0, "accepted", "", 4, "other bytes")], plan)
        assert len(jobs(ledger)) == 2


def test_waves_are_numbered_by_client_and_do_not_depend_on_speed_or_order(path: Path) -> None:
    plan = plan_of("a", wave=3)
    with filled(path, plan, rounds=0) as ledger:
        seen = accepted(*range(8))
        random.Random(1).shuffle(seen)
        ledger.record_intake(1, seen, plan)
        assert [(j["client"], j["wave"]) for j in jobs(ledger)] == [(c, c // 3) for c in range(8)]
        leases = [ledger.lease() for _ in range(3)]
        assert [lease.clients for lease in leases if lease] == [(0, 1, 2), (3, 4, 5), (6, 7)]
        ledger.release()
        assert ledger.progress() == Progress(queued=8)
        ledger.retry(ledger.lease() or leases[0], "died")  # type: ignore[arg-type]
        again = ledger.lease()
        assert again is not None
        assert again.clients == (0, 1, 2), "a wave that comes back has the same members"


def test_every_client_is_also_graded_against_another_one(path: Path) -> None:
    with filled(path, plan_of("a", wave=9)) as ledger:
        lease = ledger.lease()
        assert lease is not None
        assert lease.others == {0: 1, 1: 2, 2: 3, 3: 0}
    with filled(path.with_name("alone"), plan_of("a"), clients=1) as ledger:
        alone = ledger.lease()
        assert alone is not None
        assert alone.others == {}


def test_a_name_that_means_something_else_is_refused(path: Path) -> None:
    first = plan_of("a")
    with filled(path, first) as ledger:
        ledger.add_attacks(first, {"a": "card"})
        longer = AttackPlan((PlannedAttack("a", DLG, Budget(6)),))
        other_seed = plan_of("a", seed=1)
        for plan in (longer, other_seed):
            with pytest.raises(LedgerError, match=f"{path} already has an attack called 'a' with other settings"):
                ledger.add_attacks(plan, {"a": "card"})
        assert [(a["name"], a["knowledge"], a["seed"]) for a in ledger.attacks()] == [("a", "card of a", 0)]


# -------------------------------------------------------------------------------------------------------- a job's life


def test_leases_go_by_round_then_attack_then_wave(path: Path) -> None:
    with filled(path, plan_of("b", "a"), rounds=2) as ledger:
        order = []
        while (lease := ledger.lease()) is not None:
            order.append((lease.round, lease.attack.name, lease.clients))
        assert order == [(r, n, c) for r in (1, 2) for n in ("b", "a") for c in ((0, 1), (2, 3))]
        assert ledger.progress() == Progress(leased=16)


def test_a_lease_carries_all_that_the_wave_needs(path: Path) -> None:
    plan = plan_of("a", seed=11)
    with filled(path, plan) as ledger:
        lease = ledger.lease()
        assert lease is not None
        assert lease.attack == plan.attacks[0]
        assert (lease.seed, lease.round, lease.attempt) == (11, 1, 1)
        assert lease.digests == ("weights1:update1.0", "weights1:update1.1")


def test_scores_are_in_long_format_in_a_stable_order(path: Path) -> None:
    with filled(path, plan_of("a", wave=4)) as ledger:
        lease = ledger.lease()
        assert lease is not None
        ledger.finish(lease, rows_of(lease))
        found = [tuple(r) for r in ledger.scores("psnr")]
        assert found[:4] == [
            (1, 0, "a", 0, "psnr", 20.0, "converged", 0.1, "card of a"),
            (1, 0, "a", 1, "psnr", 21.0, "converged", 0.1, "card of a"),
            (1, 0, "wrong_client(a)", 0, "psnr", 9.0, "converged", 0.1, "card of a"),
            (1, 1, "a", 0, "psnr", 20.0, "converged", 0.1, "card of a"),
        ]
        assert len(list(ledger.scores())) == 4 * 4
        assert {r["example"] for r in ledger.scores("label_accuracy")} == {WHOLE_BATCH}
        assert ledger.progress() == Progress(done=4)
        assert ledger.so_far("psnr", 20.5) == (21.0, 20.25)


def test_exact_hits_and_missing_values_survive(path: Path) -> None:
    with filled(path, plan_of("a"), clients=1) as ledger:
        lease = ledger.lease()
        assert lease is not None
        values = [math.inf, None, math.nan, 0.1 + 0.2]
        rows = [ScoreRecord(1, 0, "a", i, "psnr", v, "diverged", 0.0) for i, v in enumerate(values)]
        ledger.finish(lease, {0: rows})
        assert [r["value"] for r in ledger.scores()] == [math.inf, None, None, 0.1 + 0.2]


def test_a_wave_is_tried_again_and_then_fails_with_rows_that_say_so(path: Path) -> None:
    with filled(path, plan_of("a", wave=2)) as ledger:
        for attempt in range(1, 4):
            lease = ledger.lease()
            assert lease is not None
            assert (lease.clients, lease.attempt) == ((0, 1), attempt)
            if attempt < 3:
                ledger.retry(lease, f"died {attempt}")
                assert ledger.progress() == Progress(queued=4)
                assert (list(ledger.scores()), ledger.errors()) == ([], [])
        ledger.fail(lease, "died 3")
        assert ledger.progress() == Progress(queued=2, failed=2)
        assert [(r["client"], r["status"], r["value"]) for r in ledger.scores()] == [
            (0, "failed", None),
            (1, "failed", None),
        ]
        assert ledger.errors() == ["died 3"]
        following = ledger.lease()
        assert following is not None
        assert following.clients == (2, 3)


def test_a_wave_that_is_split_comes_back_one_by_one_and_first(path: Path) -> None:
    plan = plan_of("a", wave=3)
    with filled(path, plan) as ledger:
        lease = ledger.lease()
        assert lease is not None
        assert lease.clients == (0, 1, 2)
        ledger.split(lease, "one of them raises")
        assert ledger.progress() == Progress(queued=4)
        ledger.enqueue(plan)
        assert ledger.progress() == Progress(queued=4), "a split job is the same job"
        found = [ledger.lease() for _ in range(4)]
        assert {one.clients for one in found[:3] if one} == {(0,), (1,), (2,)}
        assert [one.clients for one in found[3:] if one] == [(3,)], "the wave that was not split waits its turn"
        assert {one.attempt for one in found[:3] if one} == {2}


def test_why_an_attack_ended_as_it_did_is_kept_beside_its_job(path: Path) -> None:
    with filled(path, plan_of("a", "b", wave=4)) as ledger:
        for name, reasons in (("a", {0: "too dark", 2: "too dark", 3: "no label"}), ("b", {})):
            lease = ledger.lease()
            assert lease is not None
            assert lease.attack.name == name
            ledger.finish(lease, rows_of(lease), reasons)
        told = [(r["attack"], r["reason"], r["jobs"]) for r in ledger.reasons()]
        assert told == [("a", "too dark", 2), ("a", "no label", 1)]
        assert ledger.errors() == [], "a reason is no failure"


def test_a_job_that_is_done_at_last_has_no_error_left(path: Path) -> None:
    with filled(path, plan_of("a", wave=4)) as ledger:
        lease = ledger.lease()
        assert lease is not None
        ledger.retry(lease, "died")
        lease = ledger.lease()
        assert lease is not None
        ledger.finish(lease, rows_of(lease))
        assert (ledger.reasons(), ledger.errors()) == ([], [])


def test_a_ledger_of_the_first_version_loses_a_column_and_no_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "MIGRATIONS", ledger_file.MIGRATIONS[:1])
        Ledger(path, create=True).close()
    plan = plan_of("a", wave=2)
    old = sqlite3.connect(path)
    old.execute("INSERT INTO attacks VALUES (1, 'a', ?, 'card', 0)", (plan.attacks[0].to_json(),))
    for c in range(4):
        old.execute("INSERT INTO observations VALUES (1, ?, 'accepted', '', 4, 'weights:update')", (c,))
        state = "done" if c < 2 else "queued"
        old.execute("INSERT INTO jobs VALUES (NULL, ?, 1, 1, ?, NULL, ?, ?, 1, 9.0, NULL)", (f"{c}", c, c // 2, state))
    before = [(1, c, "a", 0, "psnr", 20.0, "converged", 0.1, "card") for c in range(2)]
    old.executemany("INSERT INTO scores VALUES (?, 'a', ?, 0, 'psnr', 1, 20.0, 'converged', 0.1)", [(1, 0), (2, 1)])
    old.commit()
    old.close()
    with Ledger(path) as ledger:
        assert "leased_at" not in jobs(ledger)[0]
        assert [tuple(r) for r in ledger.scores()] == before
        assert ledger.progress() == Progress(queued=2, done=2)
        assert len(list(ledger.scores_since(0))) == len(before), "and whoever reads what is new finds what is old"
        assert ledger.pace() is None
        following = ledger.lease()
        assert following is not None
        assert following.clients == (2, 3)


def test_damage_that_shows_when_it_is_read_is_named_too(path: Path) -> None:
    """The header is whole, so it opens; the pages behind it are not."""
    filled(path, plan_of("a", "b", wave=2), rounds=75).close()
    data = path.read_bytes()
    page = int.from_bytes(data[16:18], "big")
    path.write_bytes(data[:page] + bytes([0xFF]) * (len(data) - page))
    with pytest.raises(LedgerError, match=f"{path} cannot be read as a ledger"), Ledger(path) as ledger:
        ledger.progress()


def test_jobs_of_a_pool_that_is_gone_cost_no_attempt(path: Path) -> None:
    with filled(path, plan_of("a", wave=4)) as ledger:
        for _ in range(9):
            lease = ledger.lease()
            assert lease is not None
            assert lease.attempt == 1
            ledger.release()
            assert ledger.progress() == Progress(queued=4)


def test_finishing_twice_writes_nothing_twice(path: Path) -> None:
    with filled(path, plan_of("a", wave=4)) as ledger:
        lease = ledger.lease()
        assert lease is not None
        ledger.finish(lease, rows_of(lease))
        before = [tuple(r) for r in ledger.scores()]
        with pytest.raises(sqlite3.IntegrityError):
            ledger.finish(lease, rows_of(lease))
        assert [tuple(r) for r in ledger.scores()] == before


def test_a_wave_is_finished_whole_or_not_at_all(path: Path) -> None:
    with filled(path, plan_of("a", wave=4)) as ledger:
        lease = ledger.lease()
        assert lease is not None
        incomplete = rows_of(lease)
        del incomplete[3]
        with pytest.raises(KeyError):
            ledger.finish(lease, incomplete)
        assert list(ledger.scores()) == []
        assert ledger.progress() == Progress(leased=4)


def test_what_no_attack_needs_any_more_may_be_forgotten(path: Path) -> None:
    with filled(path, plan_of("a", wave=2, rounds=(1,)), rounds=2) as ledger:
        assert ledger.deletable() == {2: [0, 1, 2, 3]}, "round 2 is not attacked"
        ledger.mark_deleted(2)
        for _ in range(2):
            assert ledger.deletable() == {}
            lease = ledger.lease()
            assert lease is not None
            assert ledger.deletable() == {}
            ledger.finish(lease, rows_of(lease))
        assert ledger.deletable() == {1: [0, 1, 2, 3]}
        ledger.mark_deleted(1)
        assert ledger.deletable() == {}
        before = jobs(ledger)
        ledger.enqueue(plan_of("a"))
        assert jobs(ledger) == before, "what is forgotten cannot be attacked"


# -------------------------------------------------------------------------------------------------- attacks with memory


def taken(ledger: Ledger) -> list[tuple[str, int, tuple[int, ...]]]:
    """All that may be leased at this moment: attack, round, clients."""
    found = []
    while (lease := ledger.lease()) is not None:
        found.append((lease.attack.name, lease.round, lease.clients))
    return found


def finish(ledger: Ledger, lease: Lease | None, told: str = "") -> Lease:
    """Done, with memories that are called by round and client."""
    assert lease is not None
    memories = {c: f"{told}{lease.round}.{c}" for c in lease.clients} if lease.attack.name[0] == "m" else None
    ledger.finish(lease, rows_of(lease), None, memories)
    return lease


def test_an_attack_with_memory_waits_for_the_clients_earlier_rounds_and_no_other_does(path: Path) -> None:
    with filled(path, plan_of("m", "a", wave=1), rounds=3, clients=2) as ledger:
        first, second = ledger.lease(), ledger.lease()
        others = [("a", 1, (0,)), ("a", 1, (1,)), *(("a", r, (c,)) for r in (2, 3) for c in (0, 1))]
        assert taken(ledger) == others
        finish(ledger, second)
        assert taken(ledger) == [("m", 2, (1,))], "a client does not wait for another one"
        finish(ledger, first)
        assert taken(ledger) == [("m", 2, (0,))]
        ledger.release()
        again = taken(ledger)
        assert again == [*others[:2], ("m", 2, (0,)), ("m", 2, (1,)), *others[2:]], "in order of rounds, as before"


def test_a_wave_with_memory_is_leased_whole_or_not_at_all(path: Path) -> None:
    """How fast workers are must not change which problems advance together."""
    with filled(path, plan_of("m", wave=2), rounds=2) as ledger:
        left, right = ledger.lease(), ledger.lease()
        assert left is not None
        assert ledger.lease() is None
        ledger.split(left, "one of them raises")
        finish(ledger, ledger.lease())
        finish(ledger, right)
        assert taken(ledger) == [("m", 1, (0,)), ("m", 2, (2, 3))], "client 0 is not through: client 1 waits with it"


def test_a_lease_says_what_was_left_of_each_client_and_the_key_holds_its_digest(path: Path) -> None:
    plan = plan_of("m", wave=2)
    with filled(path, plan, rounds=2, clients=2) as ledger:
        ledger.record_intake(3, accepted(0, 1, 2, round=3), plan)  # client 2 comes late
        waiting = {(j["round"], j["client"]): j["key"] for j in jobs(ledger)}
        assert finish(ledger, ledger.lease()).memories == {}
        assert finish(ledger, ledger.lease()).memories == {0: (1, "1.0"), 1: (1, "1.1")}
        third = ledger.lease()
        assert third is not None
        assert (third.clients, third.memories) == ((0, 1), {0: (2, "2.0"), 1: (2, "2.1")})
        late = ledger.lease()
        assert late is not None
        assert (late.clients, late.memories) == ((2,), {})
        keys = {(j["round"], j["client"]): j["key"] for j in jobs(ledger)}
        parents = {(1, 0): "", (1, 1): "", (2, 0): "1.0", (2, 1): "1.1", (3, 0): "2.0", (3, 1): "2.1", (3, 2): ""}
        assert keys == {job: f"{waiting[job]}:{parent}" for job, parent in parents.items()}
        for _ in range(2):
            ledger.release()
            assert ledger.lease() == third, "one that comes back is the same job"
            assert {(j["round"], j["client"]): j["key"] for j in jobs(ledger)} == keys


def test_enqueueing_again_adds_nothing_whatever_has_become_of_the_chain(path: Path) -> None:
    plan = plan_of("m", "a", wave=2)
    with filled(path, plan, rounds=3) as ledger:
        while (lease := ledger.lease()) is not None:
            ledger.enqueue(plan)
            if lease.round == 2 and lease.attack.name == "m":
                ledger.fail(lease, "died")
            else:
                finish(ledger, lease)
            ledger.record_intake(2, accepted(*range(4), round=2), plan)
            assert len(jobs(ledger)) == 3 * 2 * 4
        assert ledger.progress() == Progress(done=20, failed=4)


def test_what_was_remembered_before_a_failure_is_handed_on(path: Path) -> None:
    with filled(path, plan_of("m", wave=2), rounds=4, clients=2) as ledger:
        finish(ledger, ledger.lease())
        second = ledger.lease()
        assert second is not None
        ledger.fail(second.of([1]), "damaged")
        assert ledger.lease() is None, "its neighbour is still at work"
        finish(ledger, second.of([0]))
        third = ledger.lease()
        assert third is not None
        assert third.memories == {0: (2, "2.0"), 1: (1, "1.1")}
        ledger.fail(third, "died")
        fourth = ledger.lease()
        assert fourth is not None
        assert fourth.memories == third.memories


def test_a_client_that_fails_from_the_start_begins_with_nothing(path: Path) -> None:
    with filled(path, plan_of("m"), rounds=2, clients=1) as ledger:
        first = ledger.lease()
        assert first is not None
        ledger.fail(first, "died")
        second = ledger.lease()
        assert second is not None
        assert (second.round, second.memories) == (2, {})


def test_a_round_that_is_asked_for_later_starts_from_what_came_before_it_and_undoes_nothing(path: Path) -> None:
    with filled(path, plan_of("m", rounds=(1, 3)), rounds=4, clients=1) as ledger:
        finish(ledger, ledger.lease())
        finish(ledger, ledger.lease())
        before = jobs(ledger)
        ledger.enqueue(plan_of("m"))
        second, fourth = ledger.lease(), None
        assert second is not None
        assert (second.round, second.memories) == (2, {0: (1, "1.0")})
        assert ledger.lease() is None
        finish(ledger, second)
        fourth = ledger.lease()
        assert fourth is not None
        assert (fourth.round, fourth.memories) == (4, {0: (3, "3.0")})
        assert jobs(ledger)[:2] == before


def test_two_attacks_with_memory_share_none(path: Path) -> None:
    with filled(path, plan_of("m1", "m2"), rounds=2, clients=1) as ledger:
        finish(ledger, ledger.lease(), "first's ")
        finish(ledger, ledger.lease(), "second's ")
        found = {lease.attack.name: lease.memories for lease in (ledger.lease(), ledger.lease()) if lease}
        assert found == {"m1": {0: (1, "first's 1.0")}, "m2": {0: (1, "second's 1.0")}}


def test_a_round_that_was_trained_again_is_no_dead_end(path: Path) -> None:
    plan = plan_of("m")
    with filled(path, plan, rounds=1, clients=1) as ledger:
        ledger.record_intake(1, [Participation(0, "accepted", "", 4, "other bytes")], plan)
        ledger.record_intake(2, accepted(0, round=2), plan)
        finish(ledger, ledger.lease())
        following = ledger.lease()
        assert following is not None
        assert (following.round, following.memories) == (2, {0: (1, "1.0")})


# ---------------------------------------------------------------------------------------------- several at the same time


def test_two_connections_never_lease_the_same_job(path: Path) -> None:
    filled(path, plan_of("a", "b", wave=1), rounds=10, clients=5).close()
    taken: list[int] = []

    def work() -> None:
        with Ledger(path) as ledger:
            while (lease := ledger.lease()) is not None:
                taken.extend(lease.jobs)
                ledger.finish(lease, rows_of(lease))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(taken) == Counter(range(1, 101))
    with Ledger(path) as ledger:
        assert ledger.progress() == Progress(done=100)


WORKER = """
import random, sys, time
from pathlib import Path
from fedgauge.attacks.grading.scores import ScoreRecord
from fedgauge.server.store.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
print("ready", flush=True)
while (lease := ledger.lease()) is not None:
    rows = {c: [ScoreRecord(lease.round, c, lease.attack.name, e, "psnr", 1.0, "converged", 0.1) for e in range(400)]
            for c in lease.clients}
    ledger.finish(lease, rows)
    print(*lease.jobs, flush=True)
"""


def start_worker(path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", WORKER, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_a_process_killed_while_it_finishes_loses_no_row_and_doubles_none(path: Path) -> None:
    """SIGKILL at random moments; what was reported as done is done, what was not is done by the next."""
    with filled(path, plan_of("a", "b", wave=2), rounds=75) as ledger:
        total = ledger.progress().total
        chance, reported, unfinished = random.Random(0), set[int](), 0
        for _ in range(3):
            child = start_worker(path)
            assert child.stdout is not None
            first = child.stdout.readline()  # it is at work
            time.sleep(0.05 * chance.random())
            child.send_signal(signal.SIGKILL)
            said = first + child.communicate()[0]
            reported |= {int(word) for line in said.splitlines() for word in line.split()}
            done = {j["id"] for j in jobs(ledger) if j["state"] == "done"}
            assert reported <= done
            counts = Counter(r[0] for r in ledger._db.execute("SELECT job_id FROM scores"))
            assert counts == dict.fromkeys(done, 400), "a wave's rows and its state are one"
            unfinished += ledger.progress().leased
            ledger.release()
        assert 0 < len(done) < total, "the kills came too early or too late to mean anything"
        while (lease := ledger.lease()) is not None:
            ledger.finish(lease, rows_of(lease))
        assert ledger.progress() == Progress(done=total)
        assert ledger._db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_processes_share_the_work_without_sharing_a_job(path: Path) -> None:
    filled(path, plan_of("a", "b", wave=1), rounds=10, clients=4).close()
    children = [start_worker(path) for _ in range(2)]
    said = [child.communicate()[0].split() for child in children]
    assert Counter(int(word) for words in said for word in words) == Counter(range(1, 81))


# ------------------------------------------------------------------------------------------ any sequence of operations


class Life(RuleBasedStateMachine):
    """Any order of intake, lease, finish, retry, split, fail, release and reopening keeps every job's history straight."""

    folder: Path  # set by the test

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(dir=self.folder)) / "ledger.sqlite"
        self.plan = plan_of("a", "m", wave=2)
        self.ledger = filled(self.path, self.plan, rounds=0)
        self.rounds = 0
        self.leases: list[Lease] = []
        self.tries: Counter[int] = Counter()
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self.split: set[int] = set()

    @rule(clients=st.sets(st.integers(0, 5)))
    def intake(self, clients: set[int]) -> None:
        self.rounds += 1
        self.ledger.record_intake(self.rounds, accepted(*clients, round=self.rounds), self.plan)

    @precondition(lambda self: self.rounds)
    @rule(clients=st.sets(st.integers(0, 5)))
    def same_intake_again(self, clients: set[int]) -> None:
        before = {j["key"] for j in jobs(self.ledger)}
        self.ledger.enqueue(self.plan)
        assert {j["key"] for j in jobs(self.ledger)} == before
        assert len({key.partition(":")[0] for key in before}) == len(before)

    @rule()
    def lease(self) -> None:
        queued = self.ledger.progress().queued
        lease = self.ledger.lease()
        if lease is None:  # an attack with memory waits for what is at work, never for nothing
            assert queued == 0 or "m" in {at_work.attack.name for at_work in self.leases}
            assert {j["name"] for j in jobs(self.ledger) if j["state"] == "queued"} <= {"m"}
        else:
            self.in_order(lease)
            assert len(lease.jobs) == 1 or (len(lease.jobs) == 2 and not self.split & set(lease.jobs))
            self.tries.update(lease.jobs)
            assert lease.attempt == max(self.tries[j] for j in lease.jobs)
            self.leases.append(lease)

    def in_order(self, lease: Lease) -> None:
        """With memory: nothing earlier of its clients is to come, and it is told what the last one that was done left."""
        if lease.attack.name != "m":
            assert lease.memories == {}
            return
        earlier = [j for j in jobs(self.ledger) if j["name"] == "m" and j["round"] < lease.round]
        assert {j["client"] for j in earlier if j["state"] in ("queued", "leased")}.isdisjoint(lease.clients)
        last = {j["client"]: j["round"] for j in sorted(earlier, key=lambda j: j["round"]) if j["state"] == "done"}
        assert lease.memories == {c: (last[c], f"{last[c]}.{c}") for c in lease.clients if c in last}

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9))
    def finish(self, which: int) -> None:
        lease = self.leases.pop(which % len(self.leases))
        finish(self.ledger, lease)
        self.done.update(lease.jobs)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9), what=st.sampled_from(["retry", "split", "fail"]))
    def goes_wrong(self, which: int, what: str) -> None:
        lease = self.leases.pop(which % len(self.leases))
        getattr(self.ledger, what)(lease, "died")
        if what == "fail":
            self.failed.update(lease.jobs)
        if what == "split":
            self.split.update(lease.jobs)

    @rule()
    def the_pool_dies(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.path)
        self.ledger.release()
        assert self.ledger.progress().leased == 0
        for lease in self.leases:
            self.tries.subtract(lease.jobs)
        self.leases = []

    @invariant()
    def each_job_is_in_one_state(self) -> None:
        by_state: dict[str, set[int]] = {"queued": set(), "leased": set(), "done": set(), "failed": set()}
        for j in jobs(self.ledger):
            by_state[j["state"]].add(j["id"])
            assert j["attempts"] == self.tries[j["id"]]
        assert by_state["done"] == self.done
        assert by_state["failed"] == self.failed
        leased = [job for lease in self.leases for job in lease.jobs]
        assert by_state["leased"] == set(leased)
        assert len(leased) == len(set(leased))

    @invariant()
    def scores_are_those_of_finished_jobs_once_each(self) -> None:
        counts = Counter(
            r[0] for r in self.ledger._db.execute("SELECT job_id FROM scores WHERE attack NOT LIKE 'wrong%'")
        )
        assert counts == dict.fromkeys(self.done, 3) | dict.fromkeys(self.failed, 1)

    def teardown(self) -> None:
        self.ledger.close()


def test_any_sequence_of_operations_keeps_every_job_straight(tmp_path: Path) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    Life.folder = tmp_path
    run_state_machine_as_test(Life, settings=settings(max_examples=40, stateful_step_count=25))


# ------------------------------------------------------------------------------------------- a reader that only reads


def test_a_reader_finds_every_row_once_in_whatever_pieces_it_asks(path: Path) -> None:
    with filled(path, plan_of("a", "b", wave=2), rounds=2) as ledger, Ledger(path, readonly=True) as reader:
        found, seen = [], 0
        while (lease := ledger.lease()) is not None:
            if lease.round == 2 and lease.attack.name == "b":
                ledger.fail(lease, "died")
            else:
                ledger.finish(lease, rows_of(lease))
            found += reader.scores_since(seen)
            assert reader.finished() == seen + len(lease.jobs)
            seen = reader.finished()
        whole = [(r[0], r[1], r[2], r[3], r[4], r[6], r[5]) for r in ledger.scores()]
        assert sorted(found, key=str) == sorted(whole, key=str)
        assert [o["round"] for o in reader.observations_since(2)] == [2] * 4
        pace = reader.pace()
        assert pace is not None
        assert pace > 0


def test_a_reader_cannot_write_and_does_not_wait(path: Path) -> None:
    with filled(path, plan_of("a")) as ledger:
        with Ledger(path, readonly=True) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.set_meta(state="mine")
        ledger._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        ledger.set_meta(state="locked")
        with pytest.raises(LedgerError, match=f"{path} cannot be read as a ledger: database is locked"):
            Ledger(path, readonly=True)


def test_a_reader_leaves_an_older_schema_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "MIGRATIONS", ledger_file.MIGRATIONS[:2])
        Ledger(path, create=True).close()
    with pytest.raises(LedgerError, match=f"older fedgauge; bring it up to date with: fedgauge report {path.parent}"):
        Ledger(path, readonly=True)


def test_what_a_reader_asks_is_answered_from_an_index(path: Path) -> None:
    with filled(path, plan_of("a")) as ledger:
        asked: list[str] = []
        ledger._db.set_trace_callback(asked.append)
        ledger.finished(), list(ledger.scores_since(3)), ledger.rounds_since(2), ledger.observations_since(2)
        ledger.pace()
        ledger.progress()
        ledger._db.set_trace_callback(None)
        assert len(asked) == 7
        plans = [row["detail"] for query in asked for row in ledger._db.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert [p for p in plans if "SCAN" in p and "INDEX" not in p] == []
