"""The view of a run at work, as its user asked for it: plain lines, and what every view has in common."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from fedgauge.server.views.roles import is_attack
from fedgauge.simulations.live.progress import Clock, RunProgress

Log = Literal["auto", "quiet", "json"]  # how a command tells what it does

PLAIN_EVERY = 5.0  # seconds between plain lines


class View:
    """Follows a run and shows nothing; `update` may be called as often as one likes.

    Attributes:
        note: what is waited for, in words.
    """

    def __init__(self, run_progress: RunProgress) -> None:
        self.run_progress = run_progress
        self.note = ""

    @contextmanager
    def shown(self) -> Iterator["View"]:
        """Show while the run works."""
        yield self

    def update(self) -> None:
        """Show how the run stands now."""
        self.run_progress.refresh()

    def say(self, words: str) -> None:
        """Tell the user something beside the view."""


class Lines(View):
    """A plain line every few seconds, where something has changed."""

    def __init__(self, run_progress: RunProgress, clock: Clock = time.monotonic) -> None:
        super().__init__(run_progress)
        self._clock = clock
        self._printed: float | None = None
        self._last = ""

    @contextmanager
    def shown(self) -> Iterator[View]:
        yield self
        self._print(force=True)

    def update(self) -> None:
        if self._printed is None or self._clock() - self._printed >= PLAIN_EVERY:
            self._print()

    def say(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    def _print(self, force: bool = False) -> None:
        self.run_progress.refresh(force)
        self._printed = self._clock()
        line = "; ".join([words(self.run_progress), *([self.note] if self.note else [])])
        if line != self._last:
            self._last = line
            self.say(f"[{self.run_progress.elapsed():5.0f} s] {line}")


def words(s: RunProgress) -> str:
    """How a run stands, on one line."""
    parts = [f"round {s.round}/{s.scenario.protocol.rounds}"] if s.training else []
    if s.training and s.accuracy:
        parts.append(f"accuracy {s.accuracy[max(s.accuracy)]:.1%}")
    parts.append(
        f"attacks on updates {s.progress.done}/{s.expected} (baselines too), {s.progress.queued} queued, "
        f"{s.progress.leased} at work"
    )
    if s.progress.failed:
        parts.append(f"{s.progress.failed} failed")
    graded = [
        (c.n, c.mean, c.best.psnr) for (a, _), c in s.cells.items() if is_attack(a) and c.mean is not None and c.best
    ]
    if graded:
        mean = sum(n * mean for n, mean, _ in graded) / sum(n for n, _, _ in graded)
        best, by = max(best for _, _, best in graded), s.measure
        parts.append(f"{by.name} best {best:.1f} {by.unit}, mean {mean:.1f} {by.unit}")
    if (left := s.seconds_left()) is not None:
        parts.append(f"about {left:.0f} s left")
    return "; ".join(parts)
