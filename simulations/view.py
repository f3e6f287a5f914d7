"""The view of a run at work: a live table in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from attacks.metrics import PSNR_CAP
from server.ledger import Ledger, Progress
from server.scenario import Scenario

PLAIN_EVERY = 5.0  # seconds between plain lines


@dataclass(frozen=True)
class Snapshot:
    """How a run stands."""

    round: int
    rounds: int
    accuracy: float | None
    progress: Progress
    expected: int  # jobs in all, as far as the plan tells
    best: float | None
    mean: float | None
    replay: str


def snapshot(ledger: Ledger, scenario: Scenario) -> Snapshot:
    """Read a run's state from its ledger."""
    rounds, progress, meta = ledger.rounds(), ledger.progress(), ledger.meta()
    done = rounds[-1]["round"] if rounds else 0
    best, mean = ledger.psnr_so_far(PSNR_CAP)
    total = scenario.protocol.rounds
    expected = progress.total + (_still_to_come(scenario, done) if scenario.audit.curious else 0)
    accuracy = rounds[-1]["accuracy"] if rounds else None
    return Snapshot(done, total, accuracy, progress, expected, best, mean, meta.get("replay_detail", ""))


def _still_to_come(scenario: Scenario, done: int) -> int:
    """Jobs that the rounds not yet trained will add, every client taking part."""
    plan, protocol = scenario.plan, scenario.protocol
    fraction = scenario.strategy.get("fraction_train", 1.0)
    seen = range(max(1, int(protocol.clients * fraction)))
    return sum(len(plan.targets(r, seen)) for r in range(done + 1, protocol.rounds + 1)) * len(plan.attacks)


class View:
    """Shows snapshots until the run is over; `update` may be called as often as one likes."""

    def __init__(self, ledger: Ledger, scenario: Scenario, console: Console, training: bool = True) -> None:
        self.ledger = ledger
        self.scenario = scenario
        self.console = console
        self.training = training
        self.note = ""
        self._live: Live | None = None
        self._started = time.monotonic()
        self._printed = 0.0
        self._last = ""
        self._first_done: tuple[float, int] | None = None

    @contextmanager
    def shown(self) -> Iterator["View"]:
        """Take the terminal while the run works."""
        if self.console.is_terminal:
            with Live(console=self.console, refresh_per_second=4, transient=True) as live:
                self._live = live
                yield self
            self._live = None
        else:
            yield self
            self._print_line(force=True)

    def update(self) -> None:
        """Show how the run stands now."""
        if self._live is not None:
            self._live.update(self._render(snapshot(self.ledger, self.scenario)))
        else:
            self._print_line()

    def _print_line(self, force: bool = False) -> None:
        if not force and time.monotonic() - self._printed < PLAIN_EVERY:
            return
        self._printed = time.monotonic()
        line = self._words(snapshot(self.ledger, self.scenario))
        if line != self._last:
            self._last = line
            elapsed = time.monotonic() - self._started
            print(f"[{elapsed:5.0f} s] {line}", file=sys.stderr, flush=True)

    def _words(self, s: Snapshot) -> str:
        parts = [f"round {s.round}/{s.rounds}"] if self.training else []
        if s.accuracy is not None and self.training:
            parts.append(f"accuracy {s.accuracy:.1%}")
        parts.append(
            f"attacks on updates {s.progress.done}/{s.expected} (baselines too), {s.progress.queued} queued, "
            f"{s.progress.leased} at work"
        )
        if s.progress.failed:
            parts.append(f"{s.progress.failed} failed")
        if s.best is not None and s.mean is not None:
            parts.append(f"PSNR best {s.best:.1f} dB, mean {s.mean:.1f} dB")
        if (left := self._seconds_left(s)) is not None:
            parts.append(f"about {left:.0f} s left")
        return "; ".join([*parts, *([self.note] if self.note else [])])

    def _seconds_left(self, s: Snapshot) -> float | None:
        """From the pace of the jobs since the first was done."""
        now = time.monotonic()
        if s.progress.done and self._first_done is None:
            self._first_done = (now, s.progress.done)
        if self._first_done is None or s.progress.done <= self._first_done[1]:
            return None
        began, had = self._first_done
        return (s.expected - s.progress.done - s.progress.failed) * (now - began) / (s.progress.done - had)

    def _render(self, s: Snapshot) -> Group:
        grid = Table.grid(padding=(0, 2))
        if self.training:
            words = f"{s.round}/{s.rounds}" + ("" if s.accuracy is None else f"   accuracy {s.accuracy:.1%}")
            grid.add_row("rounds", ProgressBar(s.rounds, s.round, width=30), words)
        done = s.progress.done + s.progress.failed
        jobs = (
            f"{done}/{s.expected}   {s.progress.queued} queued, {s.progress.leased} at work, {s.progress.failed} failed"
        )
        grid.add_row("attacks on updates", ProgressBar(max(s.expected, 1), done, width=30), jobs)
        if s.best is not None and s.mean is not None:
            grid.add_row("PSNR", "", f"best {s.best:.1f} dB, mean {s.mean:.1f} dB")
        left = self._seconds_left(s)
        clock = f"{time.monotonic() - self._started:.0f} s" + ("" if left is None else f", about {left:.0f} s left")
        grid.add_row("time", "", clock)
        if s.replay:
            grid.add_row("replay", "", Text(s.replay))
        return Group(grid, Text(self.note)) if self.note else Group(grid)
