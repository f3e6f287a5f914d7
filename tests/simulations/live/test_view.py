"""Plain lines and quiet commands: what they say, and who gets which view."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedgauge.attacks.score_rows import ScoreRecord
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.views.leakage import leakage_of_all
from fedgauge.server.views.snapshot import RunSnapshot, read_once
from fedgauge.server.views.strength import best_of
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.live.view import Lines, LiveLine, View, progress_line, view_of
from tests.simulations.live.conftest import Clock, begun, intake
from tests.small_runs import scores_of


def test_who_looks_decides_on_the_view(taped: Run) -> None:
    def kind(quiet: bool = False, **given: Any) -> type[View]:
        console = Console(**{"file": io.StringIO(), "legacy_windows": False, "_environ": {}, **given})
        with view_of(taped, console, quiet).shown() as view:
            return type(view)

    assert kind(force_terminal=True) is LiveLine
    assert kind(force_terminal=True, _environ={"TERM": "dumb"}) is Lines
    assert kind() is Lines
    assert kind(True, force_terminal=True) is View


def test_a_line_says_what_it_counts(taped: Run, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    view = Lines(RunSnapshot(taped))
    with view.shown(), taped.ledger() as ledger:
        view.update()
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err == "[    0 s] round 2/4; accuracy 50.0%; 0 of 16 jobs done; 16 waiting\n"
        ledger.record_round(3, 0.5, 2.0, 1.0)
        clock.now += 4.9
        view.update()
        assert capsys.readouterr().err == "", "a line every five seconds"
        clock.now += 0.1
        view.update()
        assert capsys.readouterr().err.startswith("[    5 s] round 3/4")
        clock.now += 5
        view.update()
        assert capsys.readouterr().err == "", "where something has changed"


def test_the_result_of_numbers_has_its_name_before_the_first_score(tmp_path: Path) -> None:
    rows = "\n".join(f"{k % 7},{k / 3:.3f}" for k in range(60))
    (tmp_path / "houses.csv").write_text(f"area,price\n{rows}\n")
    data = {"use": "table", "path": str(tmp_path / "houses.csv"), "label": "price", "target": "number", "auxiliary": 20}
    run = begun(tmp_path, data=data, loss={"use": "mean_squared_error"})
    with run.ledger() as ledger:
        ledger.record_round(0, 0.25, 2.0, 1.0)
    with read_once(run) as reading:
        assert "; R2 25.0%;" in progress_line(reading)


def test_a_live_line_follows_the_ledger_and_is_wiped(run: Run, clock: Clock) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, legacy_windows=False, _environ={})
    view = LiveLine(RunSnapshot(run), console)
    with view.shown(), run.ledger() as other:
        view.update()
        assert "0/4" in file.getvalue()
        other.record_round(3, 0.7, 1.0, 1.0)
        clock.now += 1
        view.update()
        assert "3/4" in file.getvalue()
    assert "\x07" not in file.getvalue() and file.getvalue().endswith("\x1b[1A\x1b[2K"), "it is wiped"


def test_the_mean_in_a_line_is_the_strongest_attacks_as_in_the_gate(run: Run, ledger: Ledger) -> None:
    """Of two attacks the second has the higher mean, and the first the best example."""
    values = {"matching": {0: 40.0, 1: 2.0}, "other": {0: 30.0, 1: 20.0}, "mean_image": {0: 50.0, 1: 50.0}}
    intake(ledger, 1, clients=2)
    while (lease := ledger.lease()) is not None:
        name = lease.attack.name
        ledger.finish(
            lease,
            {c: [ScoreRecord(1, c, name, 0, "psnr", values[name][c], "converged", 0.1)] for c in lease.clients},
        )
    strongest = best_of(leakage_of_all(scores_of(ledger), "psnr"), "attack")
    assert strongest is not None and (strongest.attack, strongest.mean) == ("other", 25.0)
    with read_once(run) as reading:
        assert "mean 25.0 dB by other" in progress_line(reading)


def test_quiet_says_nothing_but_where_the_results_are(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with taped.ledger() as ledger:
        ledger.set_meta(rounds="2")
    assert main(["audit", str(taped.folder), "--log", "quiet"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert told.out == f"report: {taped.folder / 'report.html'}\n{taped.folder}\n"


def test_failures_are_reported_to_the_quiet(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = sorted((taped.folder / "tape").glob("round-00002-client-*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(["audit", str(taped.folder), "--log", "quiet"]) == 1
    told = capsys.readouterr().err
    assert "4 of 16 attacks" in told and damaged.name in told


def test_a_replay_that_fails_is_reported_to_the_quiet(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (taped.folder / "scenario.toml").write_text((taped.folder / "scenario.toml").read_text().replace("0.1", "0.2"))
    assert main(["audit", str(taped.folder), "--log", "quiet"]) == 1
    assert "the learning rate" in capsys.readouterr().err
