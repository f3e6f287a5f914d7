"""What a command shows while it works: pictures and events carry the ledger's numbers, and cost little to make."""

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from fedgauge.attacks.grading.scores import WHOLE_BATCH, ScoreRecord
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_rows import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.scores import Scores
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.live import thumbnails
from fedgauge.simulations.live.json_log import Events
from fedgauge.simulations.live.progress import RunProgress
from fedgauge.simulations.live.terminal import Glyphs, LiveDisplay, bar, duration, sparkline
from fedgauge.simulations.live.view import Lines, View, words
from fedgauge.simulations.live.views import view_of
from fedgauge.simulations.run.simulate import new_run

TABLES: dict[str, Any] = {
    "seed": 1,
    "rounds": 4,
    "clients": 2,
    "data": {"use": "mnist5k", "batch_size": 1},
    "model": {"use": "mlp", "hidden": [16]},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "analytic"}],
    "audit": {"executor": "local", "rounds": [1, 2]},
}


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def begun(folder: Path, **changes: object) -> Run:
    return new_run(Scenario.from_tables({**TABLES, **changes}), "small", folder / "runs")


@pytest.fixture
def taped(tmp_path: Path) -> Run:
    """A run as training leaves it: two rounds on the tape, nothing attacked yet."""
    run = begun(tmp_path)
    scenario = run.scenario()
    params, buffers = scenario.federation.initial()
    tape = run.tape()
    with run.ledger() as ledger:
        ledger.record_round(0, 0.125, 2.5, 0.5, 0.0)
        for r in (1, 2):
            tape.write_round(r, params, buffers)
            updates = {c: scenario.federation.client_update(params, buffers, c, r) for c in range(2)}
            digests = {c: tape.write_update(r, c, u) for c, u in updates.items()}
            ledger.record_intake(r, [Participation(c, "accepted", "", 1, d) for c, d in digests.items()], scenario.plan)
            ledger.record_round(r, 0.25 * r, 2.0, 1.0, 0.01)
        ledger.set_meta(state="trained")
    return run


@pytest.fixture
def attacked(taped: Run) -> Run:
    serve(taped, LocalExecutor())
    return taped


@pytest.fixture
def looking(attacked: Run, clock: Clock) -> Iterator[RunProgress]:
    with attacked.ledger() as ledger:
        run_progress = RunProgress(ledger, attacked.scenario(), clock=clock)
        run_progress.refresh()
        yield run_progress


def plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


# ------------------------------------------------------------------------------------------------- drawn from numbers


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


RED, GREEN, BLUE, WHITE = (1.0, 0, 0), (0, 1.0, 0), (0, 0, 1.0), (1.0, 1, 1)


def image_of(*rows: list[tuple[float, float, float]]) -> torch.Tensor:
    return torch.tensor(rows).permute(2, 0, 1)


def colours(lines: list[Text]) -> list[list[tuple[str, str | None, str | None]]]:
    """Each cell: character, colour of the upper and of the lower pixel."""
    cells = []
    for line in lines:
        styles = [(line.plain[span.start : span.end], span.style) for span in line.spans]
        cells.append(
            [
                (text, style.color and style.color.name, style.bgcolor and style.bgcolor.name)  # type: ignore[union-attr]
                for text, style in styles
            ]
        )
    return cells


def test_two_pixels_share_a_cell_in_their_own_colours() -> None:
    image = image_of([RED, GREEN], [BLUE, WHITE], [(0.5, 0.5, 0.5), (2.0, -1.0, float("nan"))])
    assert colours(thumbnails.half_blocks(image)) == [
        [("▀", "#ff0000", "#0000ff"), ("▀", "#00ff00", "#ffffff")],
        [("▀", "#808080", None), ("▀", "#ff0000", None)],  # an odd number of lines ends on the terminal's own colour
    ]


@pytest.mark.parametrize(
    ("shape", "columns", "lines"),
    [((1, 28, 28), 28, 14), ((3, 32, 32), 32, 16), ((3, 64, 64), 32, 16), ((3, 64, 32), 16, 16), ((3, 500, 7), 1, 16)],
)
def test_a_thumbnail_is_as_large_as_the_image_up_to_32_pixels(
    shape: tuple[int, int, int], columns: int, lines: int
) -> None:
    for draw in (thumbnails.half_blocks, thumbnails.gray_ramp):
        drawn = draw(torch.rand(shape, generator=torch.manual_seed(0)))
        assert (len(drawn), {line.cell_len for line in drawn}) == (lines, {columns})


def test_what_is_too_large_is_averaged() -> None:
    checkers = (torch.arange(64)[:, None] + torch.arange(64)) % 2
    assert torch.equal(thumbnails.shrink(checkers[None].float()), torch.full((32, 32, 3), 128, dtype=torch.uint8))


def test_without_colours_light_is_dense() -> None:
    ramp = torch.tensor([[[0.0, 0.5, 1.0], [0.0, 0.5, 1.0], [0.0, 0.0, 1.0]]])
    # ten characters from 0 to 9: round(9 * 0.50196) = 5; the last line is its own lower half
    assert plain(thumbnails.gray_ramp(ramp)) == [" +@", "  @"]


# --------------------------------------------------------------------------------------------- read a little at a time

NAMES = ("matching", "other")
PLAN = AttackPlan(
    (
        *(PlannedAttack(name, {"use": "inverting_gradients"}) for name in NAMES),
        PlannedAttack("mean_image", {"use": "mean_image"}),
    ),
    wave=2,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite", create=True) as opened:
        opened.add_attacks(PLAN, {p.name: "" for p in PLAN.attacks})
        yield opened


def work(ledger: Ledger, psnr: Callable[[], float | None], waves: int | None = None, crash: bool = False) -> None:
    """Score waves as the pool does: two examples a client, and those of another client as its baseline."""
    while waves != 0 and (lease := ledger.lease()) is not None:
        waves = None if waves is None else waves - 1
        if crash:
            ledger.fail(lease, "WorkerCrashed: gone")
            continue
        baseline = lease.attack.is_baseline
        of = [lease.attack.name] if baseline else [lease.attack.name, f"wrong_client({lease.attack.name})"]
        values = {(c, a, e): psnr() for c in lease.clients for a in of for e in (0, 1)}
        rows: dict[int, list[ScoreRecord]] = {c: [] for c in lease.clients}
        for (c, a, e), v in values.items():
            status = "diverged" if v is None else "converged"
            rows[c].append(ScoreRecord(lease.round, c, a, e, "psnr", v, status, 0.1))
            rows[c].append(ScoreRecord(lease.round, c, a, e, "mse", v, status, 0.1))
        for c in lease.clients:
            rows[c].append(
                ScoreRecord(lease.round, c, lease.attack.name, WHOLE_BATCH, "label_accuracy", 1.0, "converged", 0.1)
            )
        ledger.finish(lease, rows)


def intake(ledger: Ledger, round: int, clients: int = 5) -> None:
    seen = [Participation(c, "accepted", "", 2, f"digest {round} {c}") for c in range(clients)]
    ledger.record_intake(round, seen, PLAN)


def test_what_is_read_in_pieces_is_what_the_analysis_finds_in_the_whole(ledger: Ledger, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def psnr() -> float | None:
        kind = rng.random()
        return None if kind < 0.2 else math.inf if kind < 0.3 else float(rng.normal(20, 30))

    with Ledger(ledger.path) as own:  # another process's connection, as in life
        run_progress = RunProgress(own, Scenario.from_tables(TABLES))
        incomplete = 0
        for round in (1, 2, 3):
            intake(ledger, round)
            for _ in range(9):
                work(ledger, psnr, waves=1, crash=rng.random() < 0.2)
                run_progress.refresh(force=True)
                incomplete += sum(not run_progress.cells[key].complete for key in run_progress.fresh)
        assert ledger.lease() is None, "three attacks on five clients in waves of two: nine waves"
        assert incomplete > 0
        found = {k: run_progress.cells.pop(k) for k in list(run_progress.cells)}
    whole = {(k.attack, k.round): k for k in leakage(Scores.read(ledger), "psnr") if k.round is not None}
    assert found.keys() == whole.keys()
    for key, leak in whole.items():
        cell = found[key]
        assert (cell.n, cell.failed, cell.complete) == (leak.n, sum(leak.failed.values()), True), key
        assert cell.mean == pytest.approx(leak.mean), key
        assert (cell.best and cell.best.psnr) == leak.best, key


def test_what_is_written_while_we_look_is_neither_lost_nor_called_complete_too_early(ledger: Ledger) -> None:
    with Ledger(ledger.path) as own:
        run_progress = RunProgress(own, Scenario.from_tables(TABLES))
        for round in (1, 2, 3, 4, 5, 6):
            intake(ledger, round)
        own._db.set_trace_callback(lambda _: work(ledger, lambda: 20.0, waves=1))  # a wave ends before every statement
        claimed: dict[tuple[str, int], int] = {}
        looks = 0
        while ledger.progress().queued:
            looks += run_progress.refresh(force=True)
            claimed |= {
                k: run_progress.cells[k].n
                for k in run_progress.fresh
                if run_progress.cells[k].complete and k not in claimed
            }
        run_progress.refresh(force=True)
        own._db.set_trace_callback(None)
        assert looks > 3
        assert len(run_progress.cells) == 6 * (3 + 2)
        assert {(c.n, c.complete) for c in run_progress.cells.values()} == {(10, True)}
        assert set(claimed.values()) == {10}


def test_a_look_at_an_unchanged_ledger_reads_no_table(ledger: Ledger, clock: Clock) -> None:
    intake(ledger, 1)
    with Ledger(ledger.path) as own:
        run_progress = RunProgress(own, Scenario.from_tables(TABLES), clock=clock)
        asked: list[str] = []
        assert run_progress.refresh()
        own._db.set_trace_callback(asked.append)
        assert not run_progress.refresh()
        assert asked == [], "a second has not passed"
        clock.now += 1
        assert not run_progress.refresh()
        assert asked == ["PRAGMA data_version"]
        work(ledger, lambda: 20.0, waves=1)
        assert not run_progress.refresh(), "news wait for the second to pass"
        clock.now += 1
        assert run_progress.refresh()
        assert run_progress.fresh == [("matching", 1), ("wrong_client(matching)", 1)]
        clock.now += 1
        assert not run_progress.refresh()
        run_progress.ledger.set_meta(state="trained")
        clock.now += 1
        assert run_progress.refresh(), "our own connection's writes are news, too"


def test_a_look_reads_only_the_jobs_that_ended_since_and_every_query_has_its_index(ledger: Ledger) -> None:
    for round in (1, 2, 3):
        intake(ledger, round)
    run_progress = RunProgress(ledger, Scenario.from_tables(TABLES))
    work(ledger, lambda: 20.0, waves=18)
    run_progress.refresh(force=True)
    work(ledger, lambda: 20.0, waves=1)
    asked: list[str] = []
    ledger._db.set_trace_callback(asked.append)
    run_progress.refresh(force=True)
    ledger._db.set_trace_callback(None)
    assert len(asked) < 12
    (scores,) = [q for q in asked if "FROM jobs j JOIN scores" in q]
    assert len(ledger._db.execute(scores).fetchall()) == 2 * (2 * 2 * 2 + 1), "a wave of two clients"
    for query in [q for q in asked if q.startswith("SELECT")]:
        plan = [row["detail"] for row in ledger._db.execute(f"EXPLAIN QUERY PLAN {query}")]
        tables = ("SCAN jobs", "SCAN j", "SCAN scores", "SCAN s", "SCAN observations", "SCAN rounds")
        bare = [d for d in plan if d.startswith(tables) and "INDEX" not in d and "PRIMARY KEY" not in d]
        assert bare == [], query


def test_how_the_jobs_stand(ledger: Ledger, clock: Clock) -> None:
    scenario = Scenario.from_tables({**TABLES, "audit": {"rounds": [1, 2], "workers": 3}})
    run_progress = RunProgress(ledger, scenario, clock=clock)
    run_progress.refresh()
    # two rounds to be attacked, of two clients each, by analytic and two baselines
    assert (run_progress.expected, run_progress.slots, run_progress.busy, run_progress.pace()) == (12, 3, 0, None)
    intake(ledger, 1, clients=2)
    work(ledger, lambda: 20.0, waves=1)
    taken = ledger.lease()
    assert taken is not None
    clock.now += 1
    run_progress.refresh()
    # the first round's six are there, the second's are still expected; its row in `rounds` comes after its jobs
    assert (run_progress.progress.total, run_progress.expected) == (6, 12)
    assert (run_progress.progress.done, run_progress.busy) == (2, 1)
    assert run_progress.seconds_left() is None, "no pace from one look"
    work(ledger, lambda: 20.0, waves=1)
    clock.now += 4
    run_progress.refresh()
    assert (run_progress.pace(), run_progress.seconds_left()) == (2 / 4, (12 - 4) / 0.5)
    run_progress.coming = False
    assert run_progress.expected == 6


def test_no_end_is_foretold_while_rounds_are_waited_for(ledger: Ledger, clock: Clock) -> None:
    """Attacks take a second each, rounds ten: time left at the attacks' pace would shrink and grow with each round."""
    run_progress = RunProgress(ledger, Scenario.from_tables({**TABLES, "audit": {"rounds": [1, 2, 3]}}), clock=clock)

    def attacked(waves: int) -> None:
        for _ in range(waves):
            work(ledger, lambda: 20.0, waves=1)
            clock.now += 1
            run_progress.refresh()

    for round in (1, 2):
        intake(ledger, round, clients=2)
        clock.now += 1
        run_progress.refresh()
        attacked(3)
        assert run_progress.seconds_left() is None, "all that is there is done"
        clock.now += 10
        run_progress.refresh()
        assert run_progress.seconds_left() is None
    intake(ledger, 3, clients=2)
    clock.now += 1
    run_progress.refresh()
    assert run_progress.seconds_left() is None, "attacks are at work, but have mostly waited"
    run_progress.coming = False
    left = run_progress.seconds_left()
    # two jobs a wave and second; of the first wave's second nothing is known, as the clock begins with its end
    assert left is not None and left == pytest.approx(3, rel=0.3), "six jobs, at the pace of the seconds that had jobs"
    attacked(2)
    assert run_progress.seconds_left() == pytest.approx(1, rel=0.3)


def test_the_picture_is_of_the_best_in_the_newest_round_that_brought_something_back(ledger: Ledger) -> None:
    run_progress = RunProgress(ledger, Scenario.from_tables(TABLES))
    intake(ledger, 1, clients=2)
    psnr = iter([10.0, 12, 99, 99, 11, 30, 99, 99])  # the 99s are wrong_client's: no leak
    work(ledger, lambda: next(psnr), waves=1)
    run_progress.refresh(force=True)
    assert run_progress.best is not None
    attack, round, hit = run_progress.best
    assert (attack, round, hit.client, hit.example, hit.psnr) == ("matching", 1, 1, 1, 30.0)
    work(ledger, lambda: 20.0)
    run_progress.refresh(force=True)
    assert run_progress.best[2] == hit, "another attack of the round is worse"
    intake(ledger, 2, clients=2)
    work(ledger, lambda: None, waves=1)
    run_progress.refresh(force=True)
    assert run_progress.best[1] == 1, "nothing came back in the new round"
    work(ledger, lambda: 15.0, waves=1)
    run_progress.refresh(force=True)
    assert run_progress.best[:2] == ("other", 2), "the new round, though its best is worse"


# -------------------------------------------------------------------------------------------------------- the picture


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
    assert looking.cells[attack, round].best == hit and hit.psnr > 100
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
    said = f"round {round}, client {hit.client}, example 0: {hit.psnr:.1f} dB"
    assert any(line.plain.endswith(said) or said in line.plain for line in lines)


def test_the_picture_carries_the_ledgers_numbers(looking: RunProgress, attacked: Run) -> None:
    with attacked.ledger() as ledger:
        leaks = {k.attack: k for k in leakage(Scores.read(ledger), "psnr") if k.round == 2}
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
    assert rows["jobs"] == "12/12 done, 0 failed"
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


def test_who_looks_decides_on_the_view(taped: Run) -> None:
    def kind(log: Any, **given: Any) -> type[View]:
        console = Console(file=io.StringIO(), legacy_windows=False, **{"_environ": {}, **given})
        with taped.ledger() as ledger:
            return type(view_of(taped, ledger, taped.scenario(), console, log))

    assert kind("auto", force_terminal=True) is LiveDisplay
    assert kind("auto", force_terminal=True, _environ={"TERM": "dumb"}) is Lines
    assert kind("auto") is Lines
    assert kind("quiet", force_terminal=True) is View
    assert kind("json", force_terminal=True) is Events


# --------------------------------------------------------------------------------------------------------------- lines


def test_a_line_says_what_it_counts_and_what_it_waits_for(
    taped: Run, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with taped.ledger() as ledger:
        view = Lines(RunProgress(ledger, taped.scenario(), clock=clock), clock)
        view.note = "waiting for Flower"
        with view.shown():
            view.update()
            told = capsys.readouterr()
            assert told.out == ""
            assert told.err == (
                "[    0 s] round 2/4; accuracy 50.0%; attacks on updates 0/12 (baselines too), 12 queued, 0 at work; "
                "waiting for Flower\n"
            )
            clock.now += 4.9
            view.note = ""
            view.update()
            assert capsys.readouterr().err == "", "a line every five seconds"
            clock.now += 0.1
            view.update()
            assert capsys.readouterr().err.startswith("[    5 s] round 2/4")
            clock.now += 5
            view.update()
            assert capsys.readouterr().err == "", "where something has changed"


def test_a_line_has_the_best_and_the_mean_of_the_attacks(looking: RunProgress, attacked: Run) -> None:
    with attacked.ledger() as ledger:
        best, mean = ledger.so_far("psnr", 60.0)
    assert f"PSNR best {best:.1f} dB, mean {mean:.1f} dB" in words(looking)
    assert mean == 60.0


# -------------------------------------------------------------------------------------------------------------- events


def events_of(text: str) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_the_events_of_an_audit_carry_the_ledgers_numbers(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(taped.folder), "--log", "json"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    events = events_of(told.out)
    assert [e["event"] for e in (events[0], events[-1])] == ["started", "finished"]
    for e in events:
        assert datetime.fromisoformat(e["time"]).utcoffset() == timedelta(0)
    start, end = events[0], events[-1]
    assert (start["run"], start["folder"]) == (taped.name, str(taped.folder))
    assert (start["clients"], start["rounds"]) == (2, 4)
    assert start["attacks"] == ["analytic", "mean_image", "random_image"]
    with taped.ledger() as ledger:
        rounds = [(r["round"], r["accuracy"], r["loss"], r["seconds"]) for r in ledger.rounds()]
        leaks = leakage(Scores.read(ledger), "psnr")
        meta = ledger.meta()
    of = {kind: [e for e in events if e["event"] == kind] for kind in ("round", "scores", "progress", "replay")}
    assert [(e["round"], e["accuracy"], e["loss"], e["seconds"]) for e in of["round"]] == rounds
    last = {(e["attack"], e["round"]): e for e in of["scores"]}
    by_round = [k for k in leaks if k.round is not None]
    assert last.keys() == {(k.attack, k.round) for k in by_round}
    for leak in by_round:
        e = last[leak.attack, leak.round or 0]
        assert (e["metric"], e["n"], e["failed"], e["complete"]) == ("psnr", leak.n, 0, True)
        assert e["mean"] == pytest.approx(leak.mean)
        assert (e["best"] is None and e["exact"]) or e["best"] == leak.best
        assert e["kind"] == ("attack" if leak.attack == "analytic" else "baseline")
    p = of["progress"][-1]
    assert (p["done"], p["expected"], p["queued"], p["leased"], p["failed"]) == (12, 12, 0, 0, 0)
    assert [(e["verdict"], e["words"]) for e in of["replay"]] == [("ok", meta["replay_detail"])]
    assert (end["run"], end["state"]) == (taped.name, "complete" if meta["rounds"] == "2" else end["state"])
    assert Path(end["report"]).is_file()
    assert end["verdict"] in ("leaks", "not shown to leak", "undetermined")
    pooled = {k.attack: k for k in leaks if k.round is None}
    assert {a["attack"]: (a["n"], a["mean"]) for a in end["attacks"]} == {a: (k.n, k.mean) for a, k in pooled.items()}
    assert end["attacks"][0]["attack"] == "analytic"


def test_numbers_that_are_not_finite_are_null(ledger: Ledger, taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    ledger.record_round(1, math.nan, math.inf, 1.0, 0.0)
    intake(ledger, 1, clients=2)
    psnr = iter([math.inf, 20.0, 9.0, 9.0] * 2)
    work(ledger, lambda: next(psnr), waves=1)
    work(ledger, lambda: None, waves=1)
    with Events(RunProgress(ledger, Scenario.from_tables(TABLES)), taped).shown():
        pass
    events = events_of(capsys.readouterr().out)
    (round,) = [e for e in events if e["event"] == "round"]
    assert (round["accuracy"], round["loss"]) == (None, None)
    scores = {e["attack"]: e for e in events if e["event"] == "scores"}
    exact, none = scores["matching"], scores["other"]
    assert (exact["best"], exact["exact"], exact["mean"], exact["n"]) == (None, True, (60 + 20) / 2, 4)
    assert (none["best"], none["exact"], none["mean"], none["n"], none["failed"]) == (None, False, None, 0, 4)
    assert (scores["wrong_client(matching)"]["best"], scores["wrong_client(matching)"]["exact"]) == (9.0, False)


def test_an_event_is_told_once(ledger: Ledger, taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run_progress = RunProgress(ledger, Scenario.from_tables(TABLES))
    ledger.record_round(1, 0.5, 1.0, 1.0, 0.0)
    ledger.set_meta(replay="ok", replay_detail="exact")
    intake(ledger, 1, clients=2)
    view = Events(run_progress, taped)
    with view.shown():
        for waves in (0, 1, 0, 5):
            work(ledger, lambda: 20.0, waves=waves)
            ledger.set_meta(state="whatever")
            view._tell(force=True)
    kinds = [(e["event"], e.get("attack"), e.get("done")) for e in events_of(capsys.readouterr().out)]
    assert len(kinds) == len(set(kinds))
    assert [done for event, _, done in kinds if event == "progress"] == [0, 2, 6]


def test_errors_are_events_as_well_as_words(taped: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path), "--log", "json"]) == 2
    told = capsys.readouterr()
    (error,) = events_of(told.out)
    assert error["event"] == "error" and str(tmp_path) in error["words"]
    assert told.err == f"fedgauge: {error['words']}\n"
    for attack in ("analytic", "magic"):
        main(["audit", str(taped.folder), "--attack", attack, "--log", "quiet"])
        told = capsys.readouterr()
        assert (told.out == "") == (attack == "magic")
        assert told.err.startswith("fedgauge: ") == (attack == "magic")


def test_quiet_says_nothing_but_where_the_results_are(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(taped.folder), "--log", "quiet"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert told.out == f"report: {taped.folder / 'report.html'}\n{taped.folder}\n"


@pytest.mark.parametrize("log", ["quiet", "json"])
def test_what_fails_is_told_in_every_mode(taped: Run, capsys: pytest.CaptureFixture[str], log: str) -> None:
    damaged = sorted((taped.folder / "tape").glob("round-00002-client-*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(["audit", str(taped.folder), "--log", log]) == 0
    told = capsys.readouterr()
    if log == "quiet":
        assert told.err.startswith("fedgauge: 3 attacks failed: ") and damaged.name in told.err
    else:
        finished = events_of(told.out)[-1]
        assert len(finished["errors"]) == 1 and damaged.name in finished["errors"][0]
        assert [a["failed"] for a in finished["attacks"] if a["attack"] == "analytic"] == [1]


def test_a_replay_that_fails_is_told_in_every_mode(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (taped.folder / "scenario.toml").write_text((taped.folder / "scenario.toml").read_text().replace("0.1", "0.2"))
    assert main(["audit", str(taped.folder), "--log", "quiet"]) == 1
    assert "the learning rate" in capsys.readouterr().err
    assert main(["audit", str(taped.folder), "--log", "json"]) == 1
    events = events_of(capsys.readouterr().out)
    (replay,) = [e for e in events if e["event"] == "replay"]
    assert replay["verdict"] == "mismatch" and "the learning rate" in replay["words"]
    assert events[-1]["event"] == "finished" and events[-1]["attacks"] == []


def test_who_reads_no_further_ends_the_command_in_silence(taped: Run) -> None:
    program = [sys.executable, "-m", "fedgauge.simulations.cli.main", "audit", str(taped.folder), "--log", "json"]
    command = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with command:
        assert command.stdout is not None and command.stderr is not None
        assert json.loads(command.stdout.readline())["event"] == "started"
        command.stdout.close()
        assert command.stderr.read() == ""
        assert command.wait(timeout=60) == 0
    assert main(["audit", str(taped.folder), "--log", "quiet"]) == 0, "what was not attacked is attacked now"
    with taped.ledger() as ledger:
        assert ledger.progress().done == ledger.progress().total == 12
