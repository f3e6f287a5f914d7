"""What is read of a ledger in pieces is what the whole says, and costs little."""

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.snapshot import Jobs, RunSnapshot
from tests.simulations.live.conftest import PLAN, TABLES, intake, work
from tests.small_runs import scores_of


def test_increments_add_up_to_the_whole(ledger: Ledger, run: Run) -> None:
    rng = np.random.default_rng(0)

    def psnr() -> float | None:
        kind = rng.random()
        return None if kind < 0.2 else math.inf if kind < 0.3 else float(rng.normal(20, 30))

    with closing(RunSnapshot(run)) as reading:
        for round in (1, 2, 3):
            intake(ledger, round)
            for _ in range(9):
                work(ledger, psnr, waves=1, crash=rng.random() < 0.2)
                with reading.now():
                    found = {(k.attack, k.round): k for k in reading.leakage("psnr") if k.round is not None}
        assert ledger.lease() is None, "three attacks on five clients in waves of two: nine waves"
    assert found == {(k.attack, k.round): k for k in leakage(scores_of(ledger), "psnr") if k.round is not None}


def test_rows_written_during_a_reading_are_not_lost(ledger: Ledger, run: Run) -> None:
    with closing(RunSnapshot(run)) as reading:
        own = reading.ledger._db
        for round in (1, 2, 3, 4, 5, 6):
            intake(ledger, round)
        own.set_trace_callback(lambda _: work(ledger, lambda: 20.0, waves=1))  # a wave ends before every statement
        versions = set()
        while ledger.progress().queued:
            with reading.now():
                versions.add(reading.version)
        own.set_trace_callback(None)
        with reading.now():
            assert [leak.n for leak in reading.leakage("psnr") if leak.round is not None] == [10] * 6 * (3 + 2)
        assert len(versions) > 2


def test_the_states_of_jobs_are_counted(tmp_path: Path) -> None:
    made = Run.create(tmp_path / "run", Scenario.from_tables({**TABLES, "audit": {"rounds": [1, 2], "workers": 3}}))
    with made.ledger() as ledger, closing(RunSnapshot(made)) as reading:

        def jobs() -> Jobs:
            with reading.now():
                return reading.jobs

        ledger.set_meta(main_metric="psnr")
        ledger.add_attacks(PLAN, {p.name: "" for p in PLAN.attacks})
        with made.lock("training"):
            # two rounds to be attacked, of two clients each, by analytic and three baselines; the first was planned without one
            assert (jobs().expected, jobs().seconds_left) == (16, None)
            intake(ledger, 1, clients=2)
            work(ledger, lambda: 20.0, waves=1)
            assert ledger.lease() is not None
            # the first round's six are there, the second's are still expected; its row in `rounds` comes after its jobs
            assert (jobs().total, jobs().expected) == (6, 14)
            assert (jobs().done, jobs().leased) == (2, 2)
            work(ledger, lambda: 20.0, waves=1)
            assert jobs().seconds_left is None, "of an attack that has never ended nothing is known"
            ledger.release()
            work(ledger, lambda: 20.0, waves=1)
            assert (jobs().total, jobs().waiting, jobs().expected) == (6, 0, 14)
            intake(ledger, 2, clients=2)
            ledger._db.execute("UPDATE scores SET seconds = 10 WHERE attack = 'matching'")
            reading.version = ()
            assert jobs().seconds_left == pytest.approx(2 * 10 + 4 * 0.1), "by attack: the cheap ones say nothing of it"
            assert ledger.lease() and ledger.lease()
            assert jobs().seconds_left == pytest.approx((2 * 10 + 4 * 0.1) / 2), "two waves at a time"


def test_the_time_left_is_never_no_minutes() -> None:
    assert [Jobs(queued=1, seconds_left=s).work[-1] for s in (0.2, 29.4, 145)] == [
        "about 1 s left",
        "about 29 s left",
        "about 2 min left",
    ]
