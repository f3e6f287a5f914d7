"""Rounds and replies come back, and nothing is lost or doubled, whichever process dies in between."""

import random
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fedgauge.attacks.score_rows import ScoreRecord
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Lease, Participation, Progress, RecordedProblem
from tests.forks import FORK, forked
from tests.server.store.ledgers import accepted, filled, finish, jobs, plan_of, rows_of


def test_rounds_and_facts_are_read_again(path: Path) -> None:
    with Ledger(path, create=True) as ledger:
        ledger.record_round(0, 0.1, 2.3, 1.5)
        ledger.record_round(1, 0.2, 2.2, 1.6)
        ledger.record_round(1, 0.3, 2.1, 1.7)  # a round that was trained again
        ledger.set_meta(state="trained", replay="ok")
        ledger.set_meta(state="failed")
    with Ledger(path) as again:
        assert [tuple(r) for r in again.rounds()] == [(0, 0.1, 2.3, 1.5), (1, 0.3, 2.1, 1.7)]
        assert again.meta() == {"state": "failed", "replay": "ok"}


def test_problems_are_kept_once_and_in_order(path: Path) -> None:
    with Ledger(path, create=True) as ledger:
        assert ledger.problems() == []
        for _ in range(2):
            ledger.add_problem("unreadable", "the reply's arrays\n have no names", round=2, client=3)
            ledger.add_problem("unreadable", "no reply can be read")
            ledger.add_problem("unreadable", "round 1", round=1)
        ledger.add_problem("unreadable", "other words for the same", round=2, client=3)
    expected = [
        RecordedProblem("unreadable", 2, 3, "the reply's arrays  have no names"),
        RecordedProblem("unreadable", None, None, "no reply can be read"),
        RecordedProblem("unreadable", 1, None, "round 1"),
    ]
    with Ledger(path, readonly=True) as reader:
        assert reader.problems() == expected
    with Ledger(path) as ledger:
        ledger.rewind(2)  # round 2 is trained again
        assert ledger.problems() == expected[1:]


def test_intake_and_jobs_are_one_transaction(path: Path) -> None:
    """A plan whose attacks are unknown fails the jobs; the observations must not stay without them."""
    with Ledger(path, create=True) as ledger:
        with pytest.raises(KeyError):
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


# --------------------------------------------------------------------------------------- several at the same time


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


def work_at(path: Path, done: Connection) -> None:
    """Finish one lease after the other, and report the jobs of each."""
    with Ledger(path) as ledger:
        while (lease := ledger.lease()) is not None:
            of = [ScoreRecord(lease.round, 0, lease.attack.name, e, "psnr", 1.0, "converged", 0.1) for e in range(400)]
            ledger.finish(lease, {c: [replace(row, client=c) for row in of] for c in lease.clients})
            done.send(lease.jobs)


def test_a_process_killed_while_it_finishes_loses_no_row_and_doubles_none(path: Path) -> None:
    """SIGKILL after a random number of jobs; what was reported as done is done, what was not is done by the next."""
    with filled(path, plan_of("a", "b", wave=2), rounds=75) as ledger:
        total = ledger.progress().total
        chance, reported, unfinished = random.Random(0), set[int](), 0
        for _ in range(3):
            said, done_by = FORK.Pipe(duplex=False)
            child = forked(work_at, path, done_by)
            done_by.close()
            for _ in range(chance.randint(1, 8)):
                reported.update(said.recv())
            child.kill()  # it works on the next job
            with suppress(EOFError):
                while True:
                    reported.update(said.recv())
            child.join()
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


# ------------------------------------------------------------------------------------- any sequence of operations


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
        self.ledger.fail(lease, "died") if what == "fail" else self.ledger.retry(lease, "died", what == "split")
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
