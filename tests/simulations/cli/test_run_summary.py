"""What a run leaves on standard output: its results, what failed, and what to do next."""

import re
from pathlib import Path

import pytest
from rich.console import Console

from fedgauge.attacks.score_rows import ScoreRecord
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.notices import notices
from fedgauge.server.views.snapshot import read_once, state_of
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.cli import run_summary
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.cli.run_summary import print_summary
from fedgauge.simulations.run.create import create_run, new_run
from tests.simulations.cli.conftest import TABLES


def test_what_waits_and_what_was_at_work_are_parked_together(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with taped.ledger() as ledger:
        assert ledger.lease() is not None
        progress = ledger.progress()
        assert progress.queued and progress.leased
    print_summary(taped, quiet=False)
    assert f"0 of {progress.total} jobs" in capsys.readouterr().out
    with taped.ledger() as ledger:
        ledger.release()
    assert main(["audit", str(taped.folder)]) == 0
    assert "Continue with" not in capsys.readouterr().out


def test_a_terminal_breaks_the_verdict_between_words(
    attacked: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with read_once(attacked) as reading:
        verdict = verdict_of(reading).sentences[0]
    print_summary(attacked, quiet=False)
    assert verdict in capsys.readouterr().out.splitlines(), "a file has whole sentences"
    monkeypatch.setattr(run_summary, "wide_console", lambda: Console(force_terminal=True, no_color=True, width=50))
    print_summary(attacked, quiet=False)
    plain = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    lines = [line.rstrip() for line in plain.splitlines()]
    first = next(k for k, line in enumerate(lines) if line and verdict.startswith(line))
    assert lines[first] != verdict and max(map(len, lines[first : first + 2])) <= 50
    assert " ".join(lines[first:]).startswith(verdict)


def test_a_narrow_terminal_breaks_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run_summary.wide_console().width == 80


def test_what_attacks_say_of_themselves_is_reported_once_each(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with taped.ledger() as ledger:
        while (lease := ledger.lease()) is not None:
            rows = {
                c: [ScoreRecord(lease.round, c, lease.attack.name, 0, "psnr", None, "diverged", 0.1)]
                for c in lease.clients
            }
            random = lease.attack.name == "random_image"  # each of its four jobs has a reason of its own
            reasons = {c: f"[no] label {(lease.round, c) if random else ''}" for c in lease.clients}
            ledger.finish(lease, rows, reasons if lease.attack.name in ("analytic", "random_image") else {})
    print_summary(taped, quiet=False)
    told = [line.rstrip() for line in capsys.readouterr().out.splitlines() if " x): " in line]
    assert told == ["analytic (4 x): [no] label"] + [
        f"random_image (1 x): [no] label ({r}, {c})" for r in (1, 2) for c in (0, 1)
    ]


def state_after(run: Run, state: str) -> str:
    with run.ledger() as ledger:
        ledger.set_meta(state=state)
        return state_of(run, ledger)


def test_a_run_of_which_everything_is_done_is_no_failure(attacked: Run) -> None:
    for state in ("failed", "interrupted", "trained"):
        assert state_after(attacked, state) == "complete"
    with attacked.ledger() as ledger:
        ledger.set_meta(rounds="9")
    assert [state_after(attacked, s) for s in ("failed", "interrupted")] == ["failed", "interrupted"]


def test_remaining_work_is_reported_in_every_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = Scenario.from_tables(TABLES)
    run = new_run(scenario, "stopped", tmp_path / "runs")

    def left() -> str:
        with read_once(run) as reading:
            return " ".join(notice.command for notice in notices(reading))

    with run.ledger() as ledger:
        ledger.record_intake(1, [Participation(0, "rejected", "why not")], scenario.plan)
    assert left().strip() == f"fedgauge run --resume {run.folder}"
    with run.ledger() as ledger:
        ledger.record_intake(2, [Participation(0, "accepted", "", 1, "digest")], scenario.plan)
    assert left().strip() == f"fedgauge run --resume {run.folder}", "not its attacks first"
    with run.ledger() as ledger:
        ledger.set_meta(state="trained")
    assert left().strip() == f"fedgauge audit {run.folder}"
    with run.ledger() as ledger:
        while (lease := ledger.lease()) is not None:
            ledger.finish(lease, {0: []})
        ledger.mark_deleted(2)
    assert left().strip() == ""
    assert main(["audit", str(run.folder)]) == 2
    assert "no recorded updates" in capsys.readouterr().err


def test_the_end_of_a_deployment_says_who_was_missing_and_how_to_be_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run(scenario := Scenario.from_tables(TABLES), tmp_path / "runs" / "one", mode="deployment")
    with run.ledger() as ledger:
        for round in (1, 2):
            seen = [
                Participation(0, "accepted", "", 1, f"digest {round}"),
                Participation(1, "missing", "'mynets:Small' is not allowed"),
            ]
            ledger.record_intake(round, seen, scenario.plan)
        ledger.set_meta(grading="not graded: the owner does not allow it")
        ledger._db.execute("UPDATE jobs SET state = 'done', graded = 'the owner does not allow it'")
    words = "2 of 4 updates arrived; client 1 missing in 2 rounds: 'mynets:Small' is not allowed"
    for quiet in (False, True):
        print_summary(run, quiet)
        told = capsys.readouterr()
        assert words in (told.err if quiet else told.out)
        if not quiet:
            assert 'mode = "scores"' in told.out and "no client grades" in told.out
