"""The live display of a run in a terminal: rounds, jobs and leakage as rows of a table."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isinf

from rich.console import Console, Group
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from fedgauge.server.store.run_files import printable
from fedgauge.server.views.formatting import in_unit
from fedgauge.server.views.roles import is_attack
from fedgauge.simulations.live.progress import Clock, RunProgress
from fedgauge.simulations.live.view import View

DRAWN_EVERY = 1.0  # seconds between two redraws if only the clock has changed
LABEL, DRAWING, TEXT = 20, 60, 32  # columns of a row: label, drawing at most, text at least
LEVELS = "▁▂▃▄▅▆▇█"  # of a sparkline, from low to high


def sparkline(values: Mapping[int, float], last: int, width: int, low: float, high: float) -> str:
    """A character for each round from 0 to `last`, blank without a value; neighbours are averaged if there are too many."""
    columns = min(last + 1, width)
    values_of: list[list[float]] = [[] for _ in range(columns)]
    for round, value in values.items():
        if 0 <= round <= last:
            values_of[round * columns // (last + 1)].append(value)
    return "".join(_level(sum(c) / len(c), low, high) if c else " " for c in values_of)


def _level(value: float, low: float, high: float) -> str:
    if high <= low:  # all values are equal
        return LEVELS[len(LEVELS) // 2]
    return LEVELS[min(len(LEVELS) - 1, max(0, int((value - low) / (high - low) * len(LEVELS))))]


def duration(seconds: float) -> str:
    """1:05, or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class LiveDisplay(View):
    """The live display; its number of lines depends on the number of attacks only, so that nothing jumps."""

    def __init__(self, run_progress: RunProgress, console: Console, clock: Clock = time.monotonic) -> None:
        super().__init__(run_progress)
        self.console = console
        self._clock = clock
        self._live: Live | None = None
        self._drawn: tuple[float, str] | None = None  # when, and with which note

    @contextmanager
    def shown(self) -> Iterator[View]:
        self.run_progress.refresh(force=True)
        # drawn by `update` only: a thread that draws four times a second would take time from the training
        with Live(self, console=self.console, auto_refresh=False, transient=True) as live:
            self._live = live
            yield self
        self._live = None

    def update(self) -> None:
        news, now = self.run_progress.refresh(), self._clock()
        stale = self._drawn is None or now - self._drawn[0] >= DRAWN_EVERY or self._drawn[1] != self.note
        if self._live is not None and (news or stale):
            self._drawn = (now, self.note)
            self._live.refresh()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def __rich__(self) -> Constrain:
        width = self.console.width - 2  # free for the terminal's own ^C, which would wrap a full line
        drawing = max(8, min(DRAWING, width - LABEL - TEXT - 4))
        replay, detail = self.run_progress.replay
        words = f"replay check: {detail}" if detail else "replay check"
        # attacks come last, as a display that is too tall loses its last lines
        check = _text(words, "yellow" if replay == "mismatch" else "dim")
        return Constrain(
            Group(
                self._status(drawing),
                check,
                _text("; ".join(filter(None, (self.note, self.run_progress.plan_coverage.settled))), "dim"),
                self._leakage(drawing),
            ),
            width,
        )

    def _status(self, drawing: int) -> Table:
        """Rounds, accuracy, jobs, workers and time."""
        s = self.run_progress
        last, curve, jobs, progress = s.scenario.protocol.rounds, s.accuracy, s.jobs, s.progress
        accuracy = f"{curve[min(curve)]:.1%} first, {curve[max(curve)]:.1%} now" if curve else ""
        left = "" if jobs.seconds_left is None else f"about {duration(jobs.seconds_left)} left"
        pace = "" if jobs.pace is None else f"{60 * jobs.pace:.0f} jobs/min"
        workers = f"{s.busy} of {s.slots} at work, {progress.queued} queued"
        table = _grid(drawing)
        if s.training:
            table.add_row(_text("rounds"), _bar(s.round, last, drawing), _text(f"{s.round} of {last}"))
        table.add_row(_text("accuracy"), _text(sparkline(curve, last, drawing, 0, 1), "cyan"), _text(accuracy))
        ended = f"{progress.done}/{jobs.expected} done, {progress.failed} failed"
        table.add_row(_text("jobs"), _bar(jobs.expected - jobs.left, jobs.expected, drawing), _text(ended))
        table.add_row(
            _text("workers"), _bar(s.busy, s.slots, drawing), _text("; ".join(filter(None, (workers, s.use))))
        )
        table.add_row(_text("elapsed"), _text(duration(s.elapsed())), _text(", ".join(filter(None, (left, pace)))))
        return table

    def _leakage(self, drawing: int) -> Table:
        """A row for the best baseline and one for each attack, all on the same scale."""
        s = self.run_progress
        names = [a for a in s.reconstructing if is_attack(a)]
        curves = {"best baseline": s.floor()} | {a: s.means(a) for a in names} if names else {}
        values = [v for curve in curves.values() for v in curve.values()]
        low, high = min(values, default=0.0), max(values, default=0.0)
        table = _grid(drawing)
        for name, curve in curves.items():
            style = "yellow" if name in names else "dim"
            text = f"{in_unit(curve[max(curve)], s.measure)} now" if curve else ""
            if name in names and (worst := s.worst_case(name)) is not None:
                text += f", worst case {'exact' if isinf(worst) else in_unit(worst, s.measure)}"
            drawn = sparkline(curve, s.scenario.protocol.rounds, drawing, low, high)
            table.add_row(_text(name, style), _text(drawn, style), _text(text, style))
        return table


def _grid(drawing: int) -> Table:
    columns = Column(width=LABEL), Column(width=drawing), Column(ratio=1)
    return Table.grid(*columns, padding=(0, 2, 0, 0), expand=True)


def _bar(done: int, total: int, width: int) -> ProgressBar:
    return ProgressBar(total=max(1, total), completed=done, width=width)


def _text(text: str, style: str = "") -> Text:
    """One line of text, which is neither markup nor control codes."""
    return Text(printable(text).replace("\n", " "), style, no_wrap=True, overflow="ellipsis")
