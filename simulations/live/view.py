"""Views of a run at work: nothing, plain lines, or one line of a terminal that is kept up to date."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.run_files import printable
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.formatting import in_unit
from fedgauge.server.views.outcomes import work_words
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.strength import best_of, final_accuracy
from fedgauge.simulations.live.log import Log
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

    @property
    def line(self) -> str:
        """The state of the run, and the note."""
        return "; ".join(filter(None, (progress_line(self.run_progress), self.note)))


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
        if self.line != self._last:
            self._last = self.line
            self.say(f"[{self._clock() - self._started:5.0f} s] {self._last}")


class LiveLine(View):
    """View with one line that is kept up to date, and wiped at the end."""

    def __init__(self, run_progress: RunProgress, console: Console) -> None:
        super().__init__(run_progress)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    @contextmanager
    def shown(self) -> Iterator[View]:
        with self._live:
            yield self

    def update(self) -> None:
        self.run_progress.refresh()
        self._live.update(Text(printable(self.line), no_wrap=True, overflow="ellipsis"), refresh=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def view_of(
    run: Run, ledger: Ledger, scenario: Scenario, console: Console, log: Log = "auto", training: bool = True
) -> View:
    """Make a view; auto: a live line in a capable terminal, otherwise plain lines."""
    run_progress = RunProgress(ledger, scenario, training)
    if log == "json":
        from fedgauge.simulations.live.json_log import Events

        return Events(run_progress, run)
    if log == "quiet":
        return View(run_progress)
    return (
        LiveLine(run_progress, console) if console.is_terminal and not console.is_dumb_terminal else Lines(run_progress)
    )


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
