"""The live display fits the terminal and carries the ledger's numbers."""

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.views.leakage import leakage
from fedgauge.simulations.live.progress import RunProgress
from fedgauge.simulations.live.terminal import LiveDisplay, duration, sparkline
from tests.simulations.live.conftest import Clock, begun
from tests.small_runs import scores_of


def test_a_sparkline_stands_on_paper() -> None:
    eight = {r: float(r) for r in range(8)}
    assert sparkline(eight, 7, 20, 0, 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(eight, 9, 20, 0, 8) == "▁▂▃▄▅▆▇█  ", "rounds to come are blank"
    assert sparkline({0: 0.0, 3: 7.9}, 3, 20, 0, 8) == "▁  █", "and so are rounds without a value"
    assert sparkline({0: 0.0, 1: 8.0, 2: 8.0, 3: 8.0}, 3, 2, 0, 8) == "▅█", "two rounds a column: their mean"
    assert sparkline({0: 5.0, 1: 5.0}, 1, 20, 5, 5) == "▅▅"
    assert sparkline({}, 3, 20, 0, 0) == "    "
    assert sparkline({0: -9.0, 1: 99.0, 5: 4.0}, 1, 20, 0, 8) == "▁█", "beyond the scale, beyond the rounds"


@given(st.lists(st.floats(0, 60), min_size=1, max_size=60), st.integers(1, 40))
def test_a_sparkline_is_as_wide_as_its_rounds_or_its_room_and_rises_with_its_values(
    values: list[float], width: int
) -> None:
    curve = dict(enumerate(sorted(values)))
    drawn = sparkline(curve, len(values) - 1, width, min(values), max(values))
    assert len(drawn) == min(len(values), width)
    assert list(drawn) == sorted(drawn), "the block characters are in order of height"


def test_durations() -> None:
    assert [duration(s) for s in (0, 65, 3599.6, 7265)] == ["0:00", "1:05", "1:00:00", "2:01:05"]


def drawn(run_progress: RunProgress, width: int, height: int, note: str = "") -> str:
    """What a terminal is sent."""
    console = terminal(width, height)
    display = LiveDisplay(run_progress, console)
    display.note = note
    console.print(display)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal(width: int, height: int) -> Console:
    given: dict[str, Any] = {
        "force_terminal": True,
        "color_system": "truecolor",
        "legacy_windows": False,
        "_environ": {},
    }
    return Console(file=io.StringIO(), width=width, height=height, **given)


def bare(sent: str) -> list[str]:
    return Text.from_ansi(sent).plain.splitlines()


@pytest.mark.parametrize("width", [60, 80, 140, 220])
def test_the_display_leaves_room_for_the_terminals_own_characters(looking: RunProgress, width: int) -> None:
    lines = bare(drawn(looking, width, 24))
    assert max(map(len, lines)) <= width - 2, "a ^C at the end of a full line would move all below it"


def test_the_display_carries_the_ledgers_numbers(looking: RunProgress, attacked: Run) -> None:
    with attacked.ledger() as ledger:
        leaks = {k.attack: k for k in leakage(scores_of(ledger), "psnr") if k.round == 2}
        worst = max(r["value"] for r in ledger.scores("psnr") if r["attack"] == "analytic")
    floor = max(k.mean for a, k in leaks.items() if a != "analytic" and k.mean is not None)
    rows = {line[:20].strip(): line[22:].rstrip().split("  ")[-1].strip() for line in bare(drawn(looking, 100, 24))}
    assert rows["rounds"] == "2 of 4"
    assert rows["accuracy"] == "12.5% first, 50.0% now"
    assert rows["analytic"] == f"{leaks['analytic'].mean:.1f} dB now, worst case {worst:.1f} dB"
    assert rows["best baseline"] == f"{floor:.1f} dB now"
    assert rows["jobs"] == "16/16 done, 0 failed"
    assert rows["workers"] == "0 of 1 at work, 0 queued"
    lines = bare(drawn(looking, 100, 24))
    # accuracy .125, .25, .5 on a scale from 0 to 1: the second, third and fifth of eight levels
    assert next(line for line in lines if line.startswith("accuracy"))[22:27] == "▂▃▅  "
    assert next(line for line in lines if line.startswith("analytic"))[22:27] == " ██  "
    assert next(line for line in lines if line.startswith("best baseline"))[22:27] == " ▁▁  "
    assert any(line.startswith("replay check: cosine") for line in lines)


def test_nothing_jumps_while_numbers_come(taped: Run, clock: Clock) -> None:
    with taped.ledger() as ledger:
        run_progress = RunProgress(ledger, taped.scenario(), clock=clock)
        seen = [bare(drawn(run_progress, 80, 24))]  # not yet looked
        for done in (False, True):
            if done:
                serve(taped, LocalExecutor())
            run_progress.refresh(force=True)
            seen.append(bare(drawn(run_progress, 80, 24)))
    labels = [[line.split("  ")[0].split(":")[0] for line in lines] for lines in seen]
    assert labels[0] == labels[1] == labels[2]
    expected = ["rounds", "accuracy", "jobs", "workers", "elapsed", "replay check", "", "best baseline", "analytic"]
    assert [label.strip() for label in labels[0]] == expected


def test_a_display_that_is_too_tall_loses_attacks_first(tmp_path: Path, clock: Clock) -> None:
    run = begun(tmp_path, attack=[{"use": "analytic", "name": f"attack{i}"} for i in range(30)])
    console = terminal(80, 24)
    with run.ledger() as ledger, LiveDisplay(RunProgress(ledger, run.scenario(), clock=clock), console).shown() as view:
        view.update()
        assert isinstance(console.file, io.StringIO)
        lines = bare(console.file.getvalue())
    assert any(line.startswith("best baseline") for line in lines) and any("attack9" in line for line in lines)
    assert not any("attack29" in line for line in lines)


def test_text_is_never_markup(tmp_path: Path, clock: Clock) -> None:
    run = begun(tmp_path)
    hostile = AttackPlan((PlannedAttack("[red]x[/red]", {"use": "analytic"}),))
    with run.ledger() as ledger:
        ledger.add_attacks(hostile, {"[red]x[/red]": ""})
        ledger.set_meta(replay="mismatch", replay_detail="[blink]not[/blink]\n\x1b[31mred\x07")
        run_progress = RunProgress(ledger, run.scenario(), clock=clock)
        run_progress.refresh()
        sent = drawn(run_progress, 80, 24, note="[/] wait")
    lines = bare(sent)
    assert any(line.startswith("[red]x[/red] ") for line in lines)
    assert any("[/] wait" in line for line in lines) and "[blink]not[/blink]" in sent
    assert "\x07" not in sent and "\x1b[31mred" not in sent


def test_a_display_is_drawn_when_something_changed_or_a_second_passed(taped: Run, clock: Clock) -> None:
    console = terminal(100, 30)
    file = console.file
    assert isinstance(file, io.StringIO)
    with taped.ledger() as ledger, taped.ledger() as other:
        view = LiveDisplay(RunProgress(ledger, taped.scenario(), clock=clock), console, clock)

        def frames() -> int:
            before = file.tell()
            view.update()
            return file.getvalue()[before:].count("best baseline")

        with view.shown():
            assert [frames(), frames()] == [1, 0]
            clock.now += 0.3
            assert frames() == 0
            view.note = "waiting"
            assert [frames(), frames()] == [1, 0]
            clock.now += 0.7
            other.record_round(3, 0.7, 1.0, 1.0, 0.0)
            assert [frames(), frames()] == [1, 0]
            assert "3 of 4" in file.getvalue()
            clock.now += 1
            assert [frames(), frames()] == [1, 0], "the clock goes on"
        assert file.getvalue().endswith("\r" + "\x1b[1A\x1b[2K" * 9), "it is wiped"
