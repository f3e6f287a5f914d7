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

EVERY = 1.0  # seconds between two readings of the ledger
PLAIN_EVERY = 5.0  # seconds between plain lines


class View:
    """View that shows nothing; `note`: what the run waits for."""

    def __init__(self, reading: RunSnapshot) -> None:
        self.reading, self.note = reading, ""
        self._started, self._read_at = monotonic(), -inf

    @contextmanager
    def shown(self) -> Iterator["View"]:
        with closing(self.reading):
            yield self

    def update(self) -> None:
        self.refresh()

    def refresh(self, force: bool = False) -> None:
        """Read changes, at most once a second unless forced."""
        if force or monotonic() - self._read_at >= EVERY:
            self._read_at = monotonic()
            with self.reading.now():
                pass

    def say(self, text: str) -> None:
        """Show a message next to the view."""

    @property
    def line(self) -> str:
        """The state of the run, and the note, until its first round is recorded."""
        waiting = self.note if not self.reading.rounds else ""
        return "; ".join(filter(None, (progress_line(self.reading), waiting)))


class Lines(View):
    """View with a plain line every few seconds after a change."""

    _printed, _last = -inf, ""

    @contextmanager
    def shown(self) -> Iterator[View]:
        with super().shown():
            yield self
            self._print(force=True)

    def update(self) -> None:
        if monotonic() - self._printed >= PLAIN_EVERY:
            self._print()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _print(self, force: bool = False) -> None:
        self.refresh(force)
        self._printed = monotonic()
        if self.line != self._last:
            self._last = self.line
            self.say(f"[{monotonic() - self._started:5.0f} s] {self._last}")


class LiveLine(Lines):
    """View with one line that is kept up to date, and wiped at the end."""

    def __init__(self, reading: RunSnapshot, console: Console) -> None:
        super().__init__(reading)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    @contextmanager
    def shown(self) -> Iterator[View]:
        with closing(self.reading), self._live:
            yield self

    def update(self) -> None:
        self.refresh()
        self._live.update(Text(printable(self.line)), refresh=True)


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
