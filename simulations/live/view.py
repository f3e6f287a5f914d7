"""Views of a run at work: nothing, plain lines, or one line of a terminal that is kept up to date."""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import inf
from time import monotonic

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedgauge.server.store.run import Run
from fedgauge.server.store.run_files import printable
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.formatting import in_unit
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.strength import best_of, final_accuracy


class View:
    """View that shows nothing."""

    def __init__(self, reading: RunSnapshot) -> None:
        self.reading = reading

    @contextmanager
    def shown(self) -> Iterator["View"]:
        with closing(self.reading):
            yield self

    def update(self, force: bool = False) -> None:
        """Show what has changed, now and then unless forced."""

    def say(self, text: str) -> None:
        """Show a message next to the view."""


class Lines(View):
    """View with a plain line every few seconds after a change."""

    every = 5.0  # seconds between two readings of the ledger
    _read_at, _last = -inf, ""

    def __init__(self, reading: RunSnapshot) -> None:
        super().__init__(reading)
        self._started = monotonic()

    @contextmanager
    def shown(self) -> Iterator[View]:
        with super().shown():
            yield self
            self.update(force=True)

    def update(self, force: bool = False) -> None:
        if force or monotonic() - self._read_at >= self.every:
            self._read_at = monotonic()
            with self.reading.now():
                self._show(progress_line(self.reading))

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _show(self, line: str) -> None:
        if line != self._last:
            self.say(f"[{monotonic() - self._started:5.0f} s] {line}")
        self._last = line


class LiveLine(Lines):
    """View with one line that is kept up to date, and wiped at the end."""

    every = 1.0

    def __init__(self, reading: RunSnapshot, console: Console) -> None:
        super().__init__(reading)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    @contextmanager
    def shown(self) -> Iterator[View]:
        with closing(self.reading), self._live:
            yield self

    def _show(self, line: str) -> None:
        self._live.update(Text(printable(line)), refresh=True)


def view_of(run: Run, console: Console, quiet: bool = False, scenario: Scenario | None = None) -> View:
    """Make a view: nothing if quiet, a live line in a capable terminal, otherwise plain lines."""
    reading = RunSnapshot(run, scenario)
    if quiet:
        return View(reading)
    return LiveLine(reading, console) if console.is_terminal and not console.is_dumb_terminal else Lines(reading)


def progress_line(reading: RunSnapshot) -> str:
    jobs, by = reading.jobs, reading.scores.measure
    parts = [f"round {max(reading.rounds, default=0)}/{reading.tables['rounds']}"]
    if (accuracy := final_accuracy(reading.rounds)) is not None:
        parts.append(f"{reading.scores.label_kind.utility} {accuracy:.1%}")
    parts += jobs.work
    leaks = [leak for leak in reading.pooled(by.metric).values() if leak.role == "attack"]
    best = by.leakiest((k.best for k in leaks if k.best is not None), float)
    if best is not None and (strongest := best_of(leaks, "attack")):
        parts.append(f"{by.name} best {in_unit(best, by)}, mean {in_unit(strongest.mean, by)} by {strongest.attack}")
    return "; ".join(parts)
