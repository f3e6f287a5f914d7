"""What is read of a ledger in pieces is what the whole says, and costs little."""

import math
from pathlib import Path

import numpy as np

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Progress
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.reading import Jobs
from fedgauge.simulations.live.progress import RunProgress
from tests.simulations.live.conftest import TABLES, intake, work
from tests.small_runs import scores_of


def test_increments_add_up_to_the_whole(ledger: Ledger, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def psnr() -> float | None:
        kind = rng.random()
        return None if kind < 0.2 else math.inf if kind < 0.3 else float(rng.normal(20, 30))

    with Ledger(ledger.path) as own:  # another process's connection, as in life
        data = {**TABLES["data"], "batch_size": 2}
        run_progress = RunProgress(own, Scenario.from_tables({**TABLES, "data": data}))
        for round in (1, 2, 3):
            intake(ledger, round)
            for _ in range(9):
                work(ledger, psnr, waves=1, crash=rng.random() < 0.2)
                run_progress.refresh(force=True)
        assert ledger.lease() is None, "three attacks on five clients in waves of two: nine waves"
        found = {(k.attack, k.round): k for k in run_progress.leaks}
    assert found == {(k.attack, k.round): k for k in leakage(scores_of(ledger), "psnr") if k.round is not None}


def test_rows_written_during_a_reading_are_not_lost(ledger: Ledger) -> None:
    with Ledger(ledger.path) as own:
        run_progress = RunProgress(own, Scenario.from_tables(TABLES))
        for round in (1, 2, 3, 4, 5, 6):
            intake(ledger, round)
        own._db.set_trace_callback(lambda _: work(ledger, lambda: 20.0, waves=1))  # a wave ends before every statement
        looks = 0
        while ledger.progress().queued:
            looks += run_progress.refresh(force=True)
        run_progress.refresh(force=True)
        own._db.set_trace_callback(None)
        assert looks > 3
        assert [leak.n for leak in run_progress.leaks] == [10] * 6 * (3 + 2)


def test_how_the_jobs_stand(ledger: Ledger) -> None:
    scenario = Scenario.from_tables({**TABLES, "audit": {"rounds": [1, 2], "workers": 3}})
    run_progress = RunProgress(ledger, scenario)
    run_progress.refresh()
    # two rounds to be attacked, of two clients each, by analytic and three baselines; the first was planned without one of them
    assert (run_progress.jobs.expected, run_progress.jobs.pace) == (16, None)
    intake(ledger, 1, clients=2)
    work(ledger, lambda: 20.0, waves=1)
    assert ledger.lease() is not None
    run_progress.refresh(force=True)
    # the first round's six are there, the second's are still expected; its row in `rounds` comes after its jobs
    assert (run_progress.progress.total, run_progress.jobs.expected) == (6, 14)
    assert (run_progress.progress.done, run_progress.progress.leased) == (2, 2)
    work(ledger, lambda: 20.0, waves=1)
    ledger._db.execute("UPDATE jobs SET ended = finished / 2.0 WHERE state = 'done'")
    run_progress.refresh(force=True)
    assert (run_progress.jobs.pace, run_progress.jobs.seconds_left) == (2, (14 - 4) / 2)
    run_progress.coming = False
    assert (run_progress.jobs.expected, run_progress.jobs.seconds_left) == (6, 1)
    ledger.set_meta(attacked_from="4")
    run_progress.refresh(force=True)
    assert run_progress.jobs.seconds_left is None, "of a service that has just begun nothing is known"


def test_no_end_is_predicted_while_no_job_waits() -> None:
    assert Jobs(Progress(done=8), to_come=4, pace=2).seconds_left is None
    assert Jobs(Progress(leased=2, queued=2, done=4), to_come=4, pace=2).seconds_left == 4


def test_a_round_that_is_trained_again_loses_what_was_read_of_it(ledger: Ledger) -> None:
    run_progress = RunProgress(ledger, Scenario.from_tables(TABLES))
    for round in (1, 2):
        intake(ledger, round, clients=2)
        ledger.record_round(round, 0.1 * round, 2.0, 1.0, 0.0)
    psnr = iter([*[20.0] * 20, *[30.0] * 20])  # twenty values a round
    work(ledger, lambda: next(psnr))
    run_progress.refresh(force=True)

    def means() -> dict[int | None, float | None]:
        return {leak.round: leak.mean for leak in run_progress.leaks if leak.attack == "matching"}

    assert (run_progress.round, means()) == (2, {1: 20, 2: 30})
    ledger.rewind(2)
    run_progress.refresh(force=True)
    assert (run_progress.round, means()) == (1, {1: 20})
    intake(ledger, 2, clients=2)
    work(ledger, lambda: 25.0, waves=1)
    run_progress.refresh(force=True)
    assert means() == {1: 20, 2: 25}
