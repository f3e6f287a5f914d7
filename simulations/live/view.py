"""Views of a run at work: the base class, and plain lines."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from fedgauge.server.views.formatting import in_unit
from fedgauge.server.views.outcomes import work_words
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.strength import best_of, final_accuracy
from fedgauge.simulations.live.progress import Clock, RunProgress

PLAIN_EVERY = 5.0  # seconds between plain lines


class View:
    """View that shows nothing; note: what the run waits for."""

    def __init__(self, run_progress: RunProgress) -> None:
        self.run_progress = run_progress
        self.note = ""

    @contextmanager
    def shown(self) -> Iterator["View"]:
        """Show while the run works."""
        yield self

    def update(self) -> None:
        """Show the state of the run."""
        self.run_progress.refresh()

    def say(self, text: str) -> None:
        """Show a message next to the view."""


class Lines(View):
    """View with a plain line every few seconds after a change."""

    def __init__(self, run_progress: RunProgress, clock: Clock = time.monotonic) -> None:
        super().__init__(run_progress)
        self._clock, self._started = clock, clock()
        self._printed = -inf
        self._last = ""

    @contextmanager
    def shown(self) -> Iterator[View]:
        yield self
        self._print(force=True)

    def update(self) -> None:
        if self._clock() - self._printed >= PLAIN_EVERY:
            self._print()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _print(self, force: bool = False) -> None:
        self.run_progress.refresh(force)
        self._printed = self._clock()
        line = "; ".join([progress_line(self.run_progress), *([self.note] if self.note else [])])
        if line != self._last:
            self._last = line
            self.say(f"[{self._clock() - self._started:5.0f} s] {line}")


def progress_line(s: RunProgress) -> str:
    """Write the state of a run on one line."""
    jobs, parts = s.jobs, [f"round {s.round}/{s.scenario.protocol.rounds}"] if s.training else []
    if s.training and (accuracy := final_accuracy(s.rounds)) is not None:
        parts.append(f"accuracy {accuracy:.1%}")
    parts += work_words(jobs)
    if s.plan_coverage.words and not jobs.left:
        parts.append(s.plan_coverage.words)
    by = s.measure
    leaks = [k for k in s.leakage(by.metric) if k.round is None and is_attack(k.attack)]
    best = by.leakiest((k.best for k in leaks if k.best is not None), float)
    if best is not None and (strongest := best_of(leaks, "attack")):
        parts.append(f"{by.name} best {in_unit(best, by)}, mean {in_unit(strongest.mean, by)} by {strongest.attack}")
    return "; ".join(parts)
