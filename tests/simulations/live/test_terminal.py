"""The live display fits the terminal and carries the ledger's numbers."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.views.leakage import leakage
from fedgauge.simulations.live import thumbnails
from fedgauge.simulations.live.progress import RunProgress
from fedgauge.simulations.live.terminal import Glyphs, LiveDisplay, bar, duration, sparkline
from tests.simulations.live.conftest import Clock, begun, plain
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


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 80))
def test_a_bar_is_full_when_all_is_done_and_only_then(done: int, total: int, width: int) -> None:
    drawn = bar(done, total, width, Glyphs())
    assert len(drawn) == width
    assert (drawn == "█" * width) == (done >= total)


def test_bars_and_durations_on_paper() -> None:
    assert bar(1, 4, 8, Glyphs()) == "██░░░░░░"
    assert bar(0, 0, 4, Glyphs()) == "░░░░", "nothing is to be done yet"
    assert [duration(s) for s in (0, 65, 3599.6, 7265)] == ["0:00", "1:05", "1:00:00", "2:01:05"]


def drawn(run_progress: RunProgress, run: Run, width: int, height: int, **terminal: Any) -> str:
    """What a terminal is sent."""
    file = terminal.pop("file", io.StringIO())
    given = {"force_terminal": True, "color_system": "truecolor", "legacy_windows": False, "_environ": {}, **terminal}
    console = Console(file=file, width=width, height=height, **given)
    console.print(LiveDisplay(run_progress, run, console))
    if isinstance(file, io.StringIO):
        return file.getvalue()
    file.flush()
    return str(file.buffer.getvalue().decode(file.encoding))


def bare(sent: str) -> list[str]:
    return Text.from_ansi(sent).plain.splitlines()


@pytest.mark.parametrize(
    ("width", "height"), [(80, 24), (100, 30), (80, 45), (140, 24), (140, 45), (60, 10), (220, 60)]
)
def test_the_picture_fits_with_room_for_the_terminals_own_characters(
    looking: RunProgress, attacked: Run, width: int, height: int
) -> None:
    lines = bare(drawn(looking, attacked, width, height))
    assert len(lines) < height
    assert max(map(len, lines)) <= width - 2, "a ^C at the end of a full line would move all below it"


def test_thumbnails_stand_beside_the_rows_or_below_them_or_are_left_out(looking: RunProgress, attacked: Run) -> None:
    assert "▀" not in drawn(looking, attacked, 80, 24)
    beside = bare(drawn(looking, attacked, 140, 24))
    assert sum("▀" in line for line in beside) == 14
    assert any("analytic" in line and "▀" * 28 + "  " + "▀" * 28 in line for line in beside)
    below = bare(drawn(looking, attacked, 80, 45))
    assert [line for line in below if "▀" in line] == ["▀" * 28 + "  " + "▀" * 28] * 14
    assert len(below) > len(beside)


def test_the_truth_stands_beside_its_reconstruction(looking: RunProgress, attacked: Run) -> None:
    assert looking.best is not None
    attack, round, hit = looking.best
    truth = attacked.scenario().federation.batch_at(hit.client, round).x[hit.example]
    found = attacked.read_reconstruction(round, hit.client, attack)["x"][hit.example]
    assert looking.cells[attack, round].best == hit and hit.value > 100
    sent = drawn(looking, attacked, 140, 45)
    lines = Text.from_ansi(sent).split()
    top = next(i for i, line in enumerate(lines) if "▀" in line.plain)
    console = Console(color_system="truecolor")
    for i, (left, right) in enumerate(zip(thumbnails.half_blocks(truth), thumbnails.half_blocks(found), strict=True)):
        line = lines[top + i]
        start = line.plain.index("▀")
        for x in range(28):
            for tile, offset in ((left, 0), (right, 30)):
                want, got = tile.get_style_at_offset(console, x), line.get_style_at_offset(console, start + offset + x)
                assert (want.color, want.bgcolor) == (got.color, got.bgcolor)
    said = f"round {round}, client {hit.client}, example 0: {hit.value:.1f} dB"
    assert any(line.plain.endswith(said) or said in line.plain for line in lines)


def test_a_file_that_a_tester_graded_is_shown_by_its_examples(looking: RunProgress, attacked: Run) -> None:
    """Its reconstructions stay in the attack's order, and it names the example of each."""
    assert looking.best is not None
    attack, round, hit = looking.best
    before = drawn(looking, attacked, 140, 45)
    x = attacked.read_reconstruction(round, hit.client, attack)["x"]
    kept = {"x": torch.cat([1 - x, x]), "example": torch.tensor([1, 0])}
    attacked.write_reconstruction(round, hit.client, attack, kept)
    assert drawn(looking, attacked, 140, 45) == before


def test_the_picture_carries_the_ledgers_numbers(looking: RunProgress, attacked: Run) -> None:
    with attacked.ledger() as ledger:
        leaks = {k.attack: k for k in leakage(scores_of(ledger), "psnr") if k.round == 2}
        worst = max(r["value"] for r in ledger.scores("psnr") if r["attack"] == "analytic")
    floor = max(k.mean for a, k in leaks.items() if a != "analytic" and k.mean is not None)
    rows = {
        line[:20].strip(): line[22:].rstrip().split("  ")[-1].strip()
        for line in bare(drawn(looking, attacked, 100, 24))
    }
    assert rows["rounds"] == "2 of 4"
    assert rows["accuracy"] == "12.5% first, 50.0% now"
    assert rows["analytic"] == f"{leaks['analytic'].mean:.1f} dB now, worst case {worst:.1f} dB"
    assert rows["best baseline"] == f"{floor:.1f} dB now"
    assert rows["jobs"] == "16/16 done, 0 failed"
    assert rows["workers"] == "0 of 1 at work, 0 queued"
    lines = bare(drawn(looking, attacked, 100, 24))
    # accuracy .125, .25, .5 on a scale from 0 to 1: the second, third and fifth of eight levels
    assert next(line for line in lines if line.startswith("accuracy"))[22:27] == "▂▃▅  "
    assert next(line for line in lines if line.startswith("analytic"))[22:27] == " ██  "
    assert next(line for line in lines if line.startswith("best baseline"))[22:27] == " ▁▁  "
    assert next(line for line in lines if line.startswith("replay check"))[22:28] == "cosine"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 45), (140, 45)])
def test_nothing_jumps_while_numbers_come(taped: Run, clock: Clock, width: int, height: int) -> None:
    with taped.ledger() as ledger:
        run_progress = RunProgress(ledger, taped.scenario(), clock=clock)
        seen = []
        before = drawn(run_progress, taped, width, height)  # not yet looked
        for done in (False, True):
            if done:
                serve(taped, LocalExecutor())
            run_progress.refresh(force=True)
            seen.append([line[:20].strip() for line in bare(drawn(run_progress, taped, width, height))])
        seen.append([line[:20].strip() for line in bare(before)])
    rows = [lines[:8] for lines in seen]
    assert rows[0] == rows[1] == rows[2]
    assert rows[0] == ["rounds", "accuracy", "analytic", "best baseline", "jobs", "workers", "time", "replay check"]
    assert len(seen[0]) == len(seen[1]) == len(seen[2])


def test_attacks_beyond_the_room_are_counted_and_the_baseline_stays(tmp_path: Path, clock: Clock) -> None:
    many = [{"use": "analytic", "name": f"attack{i}"} for i in range(30)]
    run = begun(tmp_path, attack=many)
    with run.ledger() as ledger:
        lines = bare(drawn(RunProgress(ledger, run.scenario(), clock=clock), run, 80, 24))
        shown = [line for line in lines if line.startswith("attack")]
        assert len(lines) == 23
        assert [line.strip() for line in lines if "more" in line] == [f"and {30 - len(shown)} more attacks"]
        assert len(shown) > 10
        assert any(line.startswith("best baseline") for line in lines)
        tall = bare(drawn(RunProgress(ledger, run.scenario(), clock=clock), run, 80, 60))
        assert sum(line.startswith("attack") for line in tall) == 30


def test_text_is_never_markup(tmp_path: Path, clock: Clock) -> None:
    run = begun(tmp_path)
    hostile = AttackPlan((PlannedAttack("[red]x[/red]", {"use": "analytic"}),))
    with run.ledger() as ledger:
        ledger.add_attacks(hostile, {"[red]x[/red]": ""})
        ledger.set_meta(replay="mismatch", replay_detail="[blink]not[/blink]\n\x1b[31mred\x07")
        run_progress = RunProgress(ledger, run.scenario(), clock=clock)
        run_progress.refresh()
        view = LiveDisplay(run_progress, run, Console())
        view.note = "[/] wait"
        lines = plain(view.lines(78, 23, Glyphs()))
        assert any(line.startswith("[red]x[/red] ") for line in lines)
        assert any("[/] wait" in line for line in lines)
        sent = drawn(run_progress, run, 80, 24)
        assert "[blink]not[/blink]" in sent
        assert "\x07" not in sent and "\x1b[31m" not in sent


def test_a_terminal_is_sent_only_what_it_can_show(looking: RunProgress, attacked: Run) -> None:
    assert "\x1b[38;2;" in drawn(looking, attacked, 140, 45)
    assert "▀" in drawn(looking, attacked, 140, 45, color_system="256")
    for terminal in ({"no_color": True}, {"color_system": "standard"}, {"color_system": None}):
        sent = drawn(looking, attacked, 140, 45, **terminal)
        assert "▀" not in sent and "38;" not in sent, terminal
        assert any("@" in line for line in bare(sent)), "the digit in characters"
    old = drawn(looking, attacked, 140, 45, file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert old.isascii() and "@" in old


def test_a_reconstruction_that_is_not_kept_leaves_its_place_empty(looking: RunProgress, attacked: Run) -> None:
    whole = len(bare(drawn(looking, attacked, 140, 45)))
    for file in (attacked.folder / "reconstructions").iterdir():
        file.unlink()
    sent = drawn(looking, attacked, 140, 45)
    assert "▀" not in sent
    assert len(bare(sent)) == whole


def test_a_picture_is_drawn_when_something_changed_or_a_second_passed(taped: Run, clock: Clock) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, height=30, color_system="truecolor", _environ={})
    with taped.ledger() as ledger, taped.ledger() as other:
        view = LiveDisplay(RunProgress(ledger, taped.scenario(), clock=clock), taped, console, clock)

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
        lines = 9 + 17  # rows, and thumbnails with their words below
        assert file.getvalue().endswith("\r" + "\x1b[1A\x1b[2K" * lines), "it is wiped"
