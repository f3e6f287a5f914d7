"""The page follows a run that works, and never delays the writer."""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from copy import copy
from pathlib import Path

import pytest

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.attacks.score_rows import ScoreRecord
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.snapshot import RunSnapshot
from tests.server.dashboard.pages import Get, served, visitor


def train_again(ledger: Ledger) -> None:
    ledger.rewind(2)
    ledger.record_intake(2, [Participation(0, "missing", "it was late")])
    ledger.record_round(2, 0.9, 1.0, 1.0)


DELETIONS: dict[str, Callable[[Ledger], object]] = {
    "a round is trained again": train_again,
    "failed jobs are tried again": lambda ledger: ledger.retry_ended(["failed"], 2),
    "a grade is taken back": lambda ledger: ledger.grade(1, [], None, afresh=True),
}


@pytest.mark.parametrize("delete", DELETIONS.values(), ids=DELETIONS)
def test_deleted_rows_are_no_longer_shown(
    delete: Callable[[Ledger], object],
    make_scenario: Callable[..., Scenario],
    make_taped: Callable[..., Run],
    tmp_path: Path,
) -> None:
    def shown(reading: RunSnapshot) -> tuple[object, ...]:
        with reading.now():
            who = (reading.rounds, [tuple(o) for o in reading.observations])
            return reading.state, reading.leakage("psnr"), *map(copy, who)

    run = make_taped(tmp_path / "live", make_scenario())
    with run.ledger() as ledger, closing(RunSnapshot(run)) as reading:
        while (lease := ledger.lease()) is not None:
            if lease.round == 2:
                ledger.fail(lease, "gone")
            else:
                rows = {c: [ScoreRecord(1, c, lease.attack.name, 0, "psnr", 9.0 + c, "", 0.1)] for c in lease.clients}
                ledger.finish(lease, rows)
        before, version = shown(reading), reading.version
        delete(ledger)
        with closing(RunSnapshot(run)) as another:
            after = shown(another)
        assert shown(reading) == after != before
        assert reading.version != version


def test_a_change_has_another_version(folder: Path, get: Get) -> None:
    def versions() -> list[str]:
        return [get(f"/api/version{of}")["version"] for of in ("?run=complete", "")]

    first = versions()
    assert versions() == first
    with Run(folder / "complete").ledger() as ledger:
        ledger.record_round(3, 0.5, 1.0, 1.0)
    assert all(now != before for now, before in zip(versions(), first, strict=True))
    get("/api/version?run=nobody", 404)


@pytest.mark.full
@pytest.mark.slow
def test_open_pages_hinder_no_writer_and_no_page(folder: Path) -> None:
    """Pages stay open and read all the time while a run writes as fast as it can: no row is lost, each page sees the end."""
    plan = AttackPlan((PlannedAttack("dlg", {"use": "dlg"}),), wave=4)
    rounds, clients = 12, 8
    seen, told, errors, listening = [(0, 0)] * 5, [0] * 5, [], threading.Barrier(6, timeout=60)
    with served(folder) as address, Run(folder / "complete").ledger() as ledger:
        assert "/?token=" in address, "a list of runs"
        end = (rounds, ledger.progress().done + (rounds - 2) * clients)

        def look(i: int) -> None:
            """As the page's script does: ask again when something has changed."""
            try:
                with visitor(address) as http:
                    http.get("/run/complete").raise_for_status()
                    known = None
                    while seen[i] != end:
                        now = http.get("/api/version?run=complete").raise_for_status().json()["version"]
                        if now != known:
                            known = now
                            found = http.get("/api/runs/complete/overview").raise_for_status().json()
                            told[i] += 1
                            if told[i] == 1:
                                listening.wait()  # all are open before the first row is written
                            seen[i] = (found["progress"]["round"], found["progress"]["done"])
                        time.sleep(0.5)
            except Exception as error:  # reported by the main thread
                errors.append(error)

        pages = [threading.Thread(target=look, args=(i,), daemon=True) for i in range(5)]
        for page in pages:
            page.start()
        listening.wait()
        ledger.add_attacks(plan, {"dlg": "card"})
        before = sum(1 for _ in ledger.scores())
        for r in range(3, rounds + 1):
            ledger.record_intake(
                r, [Participation(c, "accepted", "", 1, f"digest {r} {c}") for c in range(clients)], plan
            )
            ledger.record_round(r, 0.5, 1.0, 1.0)
            while (lease := ledger.lease()) is not None:
                ledger.finish(lease, {c: [ScoreRecord(r, c, "dlg", 0, "psnr", 20.0, "", 0.1)] for c in lease.clients})
        for page in pages:
            page.join(timeout=120)
        assert errors == []
        assert seen == [end] * 5
        assert min(told) >= 2, "each saw it come"
        assert sum(1 for _ in ledger.scores()) - before == (rounds - 2) * clients
        with visitor(address) as http:
            summary = http.get("/api/runs/complete/overview").json()["summary"]
        place = [column["key"] for column in summary["columns"]].index("n")
        assert {row[0]: row[place] for row in summary["rows"]}["dlg"] == (rounds - 2) * clients
