"""Every job is done once, and every score is there once, in the plan's order."""

import random
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from fedgauge.attacks.base import Budget
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.ledger_types import Participation, Progress
from tests.server.store.ledgers import DLG, accepted, filled, finish, jobs, plan_of, rows_of, take


def test_a_wider_plan_adds_only_what_is_new(path: Path) -> None:
    with filled(path, plan_of("a", rounds=(1,), clients=(0, 1)), rounds=2) as ledger:
        assert [(j["round"], j["client"]) for j in jobs(ledger)] == [(1, 0), (1, 1)]
        ledger.enqueue(plan_of("a"))
        assert sorted((j["round"], j["client"]) for j in jobs(ledger)) == [(r, c) for r in (1, 2) for c in range(4)]


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
        again = take(ledger)
        assert again.clients == (0, 1, 2), "a wave that comes back has the same members"


def test_every_client_is_also_graded_against_another_one(path: Path) -> None:
    with filled(path, plan_of("a", wave=9)) as ledger:
        lease = take(ledger)
        assert lease.others == {0: 1, 1: 2, 2: 3, 3: 0}
    with filled(path.with_name("alone"), plan_of("a"), clients=1) as ledger:
        alone = take(ledger)
        assert alone.others == {}


def test_a_name_that_means_something_else_is_refused(path: Path) -> None:
    first = plan_of("a")
    with filled(path, first) as ledger:
        ledger.add_attacks(first, {"a": "card"})
        longer = AttackPlan((PlannedAttack("a", DLG, Budget(6)),))
        other_seed = plan_of("a", seed=1)
        for plan in (longer, other_seed):
            with pytest.raises(LedgerError):
                ledger.add_attacks(plan, {"a": "card"})
        assert [(a["name"], a["knowledge"], a["seed"]) for a in ledger.attacks()] == [("a", "card of a", 0)]


def test_scores_are_in_long_format_in_a_stable_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(path, plan_of("a", wave=4)) as ledger:
        lease = take(ledger)
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
        assert ledger.best_so_far() == 21.0
        main = replace(ImageModality.main, higher_is_better=False)
        monkeypatch.setattr(Ledger, "modality", type("LowerLeaksMore", (ImageModality,), {"main": main}))
        assert ledger.best_so_far() == 20.0


def test_the_reason_of_an_attack_is_kept_with_its_job(path: Path) -> None:
    with filled(path, plan_of("a", "b", wave=4)) as ledger:
        for name, reasons in (("a", {0: "too dark", 2: "too dark", 3: "no label"}), ("b", {})):
            lease = take(ledger)
            assert lease.attack.name == name
            ledger.finish(lease, rows_of(lease), reasons)
        told = [(r["attack"], r["reason"], r["jobs"]) for r in ledger.reasons()]
        assert told == [("a", "too dark", 2), ("a", "no label", 1)]
        assert ledger.reasons("failed") == [], "a reason is no failure"


def test_a_wave_is_finished_whole_or_not_at_all(path: Path) -> None:
    with filled(path, plan_of("a", wave=4)) as ledger:
        lease = take(ledger)
        incomplete = rows_of(lease)
        del incomplete[3]
        with pytest.raises(KeyError):
            ledger.finish(lease, incomplete)
        assert list(ledger.scores()) == []
        assert ledger.progress() == Progress(leased=4)


# -------------------------------------------------------------------------------------------------- stateful attacks


def test_a_lease_says_what_was_left_of_each_client(path: Path) -> None:
    plan = plan_of("m", wave=2)
    with filled(path, plan, rounds=2, clients=2) as ledger:
        ledger.record_intake(3, accepted(0, 1, 2, round=3), plan)  # client 2 comes late
        assert finish(ledger).memories == {}
        assert finish(ledger).memories == {0: (1, "1.0"), 1: (1, "1.1")}
        third = take(ledger)
        assert (third.clients, third.memories) == ((0, 1), {0: (2, "2.0"), 1: (2, "2.1")})
        late = take(ledger)
        assert (late.clients, late.memories) == ((2,), {})
        for _ in range(2):
            ledger.release()
            assert ledger.lease() == third, "one that comes back is the same job"


def test_a_round_that_is_asked_for_later_starts_from_what_came_before_it_and_undoes_nothing(path: Path) -> None:
    with filled(path, plan_of("m", rounds=(1, 3)), rounds=4, clients=1) as ledger:
        finish(ledger)
        finish(ledger)
        before = jobs(ledger)
        ledger.enqueue(plan_of("m"))
        second, fourth = ledger.lease(), None
        assert second is not None
        assert (second.round, second.memories) == (2, {0: (1, "1.0")})
        assert ledger.lease() is None
        finish(ledger, second)
        fourth = take(ledger)
        assert (fourth.round, fourth.memories) == (4, {0: (3, "3.0")})
        assert jobs(ledger)[:2] == before


def test_a_round_that_was_trained_again_is_no_dead_end(path: Path) -> None:
    plan = plan_of("m")
    with filled(path, plan, rounds=1, clients=1) as ledger:
        ledger.record_intake(1, [Participation(0, "accepted", "", 4, "other bytes")], plan)
        ledger.record_intake(2, accepted(0, round=2), plan)
        for _ in range(2):  # one client once in a wave
            again = ledger.lease()
            assert again is not None and again.clients == (0,)
            finish(ledger, again)
        following = take(ledger)
        assert (following.round, following.memories) == (2, {0: (1, "1.0")})


def failed_once(ledger: Ledger) -> None:
    """The first wave failed as a whole, the second was split and one of its jobs failed."""
    lease = take(ledger)
    ledger.fail(lease, "faulty")
    lease = take(ledger)
    ledger.retry(lease, "faulty", split=True)
    one = take(ledger)
    ledger.fail(one, "faulty")
    finish(ledger)


def test_failed_jobs_return_to_the_queue_without_attempts(path: Path) -> None:
    with filled(path, plan_of("a", wave=2)) as ledger:
        untried = jobs(ledger)
        failed_once(ledger)
        scores = [tuple(r) for r in ledger.scores() if r["status"] != "failed"]
        assert ledger.retry_ended(["failed"], 2) == (3, 0)
        assert ledger.progress() == Progress(queued=3, done=1)
        assert [tuple(r) for r in ledger.scores()] == scores
        tried = jobs(ledger)
        for before, after in zip(untried, tried, strict=True):
            assert after["state"] == "done" or after | {"finished": None} == before
        while (lease := ledger.lease()) is not None:
            assert lease.attempt == 1
            finish(ledger, lease)
        assert ledger.progress() == Progress(done=4)
        assert ledger.retry_ended(["failed"], 2) == (0, 0)


def test_what_a_stateful_attack_did_after_a_failure_is_tried_again_too(path: Path) -> None:
    with filled(path, plan_of("m", "a", wave=1), rounds=3, clients=2) as ledger:
        while (lease := ledger.lease()) is not None:
            if (lease.round, lease.clients) == (2, (0,)):
                ledger.fail(lease, "faulty")
            else:
                finish(ledger, lease)
        assert ledger.retry_ended(["failed"], 1) == (3, 0), "both attacks in round 2, and the stateful one in round 3"
        queued = [(j["round"], j["client"]) for j in jobs(ledger) if j["state"] == "queued"]
        assert sorted(queued) == [(2, 0), (2, 0), (3, 0)]
        remembered = {}
        while (lease := ledger.lease()) is not None:
            remembered[lease.attack.name, lease.round] = lease.memories
            finish(ledger, lease)
        assert remembered == {("m", 2): {0: (1, "1.0")}, ("m", 3): {0: (2, "2.0")}, ("a", 2): {}}
        assert ledger.retry_ended(["failed"], 1) == (0, 0)


def test_jobs_whose_update_is_deleted_are_not_tried_again(path: Path) -> None:
    with filled(path, plan_of("a", wave=2)) as ledger:
        failed_once(ledger)
        ledger.mark_deleted(1)
        before = jobs(ledger), list(map(tuple, ledger.scores()))
        assert ledger.retry_ended(["failed"], 2) == (0, 3)
        assert (jobs(ledger), list(map(tuple, ledger.scores()))) == before


def test_a_retry_that_is_cut_off_changes_nothing(path: Path) -> None:
    with filled(path, plan_of("a", wave=2)) as ledger:
        failed_once(ledger)
        before = jobs(ledger), list(map(tuple, ledger.scores())), ledger.meta()
        stop = "CREATE TRIGGER cut BEFORE UPDATE ON jobs WHEN OLD.id = 4 BEGIN SELECT raise(ABORT, 'cut off'); END"
        ledger._db.execute(stop)
        with pytest.raises(sqlite3.IntegrityError):
            ledger.retry_ended(["failed"], 2)
        assert (jobs(ledger), list(map(tuple, ledger.scores())), ledger.meta()) == before


@pytest.mark.parametrize(
    ("attack", "metric"),
    [("a", "rouge1"), ("bayes_limit", "mse"), ("candidate_bound", "mse"), ("membership_limit", "membership")],
)
def test_a_failed_attack_leaves_a_row_of_its_main_metric(path: Path, attack: str, metric: str) -> None:
    with filled(path, plan_of(attack)) as ledger:
        ledger.set_meta(main_metric="rouge1")
        ledger.fail(take(ledger), "gone")
        assert {row["metric"] for row in ledger.scores()} == {metric}


def test_a_baseline_has_no_baseline(path: Path) -> None:
    plan = AttackPlan((*plan_of("a").attacks, PlannedAttack("mine", {"use": "mean_image"})))
    with filled(path, plan, clients=2) as ledger:
        assert {(job["name"], job["other"]) for job in jobs(ledger)} == {("a", 0), ("a", 1), ("mine", None)}


def test_an_unknown_main_metric_is_named(path: Path) -> None:
    with filled(path, plan_of("a")) as ledger:
        ledger.set_meta(main_metric="taste")
        with pytest.raises(LedgerError):
            _ = ledger.modality
