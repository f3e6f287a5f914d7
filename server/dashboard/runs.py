"""The runs that the page shows: those of a folder, or one run; nothing outside is ever opened."""

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import TypeVar

from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.views.reading import Reading, RunLine, run_line
from fedgauge.server.views.verdict import verdict_of

OPEN = 24  # the most runs kept open, because a reading holds all scores of its run

View = TypeVar("View")
Facts = tuple[str | None, int | None]  # a run's verdict in a word, and how many attacks are expected


class UnknownRun(Exception):
    """There is no such run, or no such part of one; the message names it."""


@dataclass(frozen=True)
class BrokenRun:
    """A run that cannot be read, and why."""

    id: str
    error: str


def _plain(name: str) -> bool:
    return Path(name).name == name and not name.startswith(".")


class RunCatalog:
    """A folder of runs, or one run; safe to use from many threads."""

    def __init__(self, path: Path) -> None:
        self._only = Run(path) if (path / "ledger.sqlite").exists() else None
        self.root = path if self._only is None else self._only.folder.parent
        self._readings: OrderedDict[str, Reading] = OrderedDict()
        self._lock = Lock()
        self._judge = ThreadPoolExecutor(1)  # one at a time, as a run's data may be large
        self._facts: dict[str, tuple[str, Future[Facts]]] = {}  # of each run, and the version that they are of

    def names(self) -> list[str]:
        """The runs, newest first."""
        if self._only is not None:
            return [self._only.name]
        ledgers = self.root.glob("*/ledger.sqlite") if self.root.is_dir() else ()
        names = (p.parent.name for p in ledgers if not p.parent.is_symlink())
        return sorted(filter(_plain, names), reverse=True)

    def run(self, name: str) -> Run:
        """A run by its name; UnknownRun if there is none, even if the name is a path to something else."""
        if not self.has(name):
            raise UnknownRun(f"there is no run {name!r} here")
        return self._only or Run(self.root / name)

    def has(self, name: str) -> bool:
        """Whether there is such a run; a link is none, as it may point anywhere."""
        if self._only is not None:
            return name == self._only.name
        folder = self.root / name
        return _plain(name) and not os.path.islink(folder) and os.path.lexists(folder / "ledger.sqlite")

    def use(self, name: str, ask: Callable[[Reading], View]) -> View:
        """The result of `ask` on a run's current state.

        Raises:
            UnknownRun: there is no such run.
            LedgerError: its ledger cannot be read.
        """
        return self.compare([name], lambda readings: ask(readings[0]))

    def compare(self, names: Sequence[str], ask: Callable[[list[Reading]], View]) -> View:
        """The result of `ask` on several runs together."""
        readings = [self._reading(name) for name in dict.fromkeys(names)]
        with ExitStack() as stack:
            # always in the same order, so that no two threads wait for each other
            for reading in sorted(readings, key=lambda r: r.run.name):
                try:
                    stack.enter_context(reading.now())
                except LedgerError:  # it may be repaired by the time it is opened again
                    with self._lock:
                        self._readings.pop(reading.run.name, None)
                    raise
            return ask(readings)

    def lines(self, patience: float) -> list[RunLine | BrokenRun]:
        """A line for each run; what takes scores and data and is not known in so many seconds comes with a later question."""
        lines, until = [self._line(name) for name in self.names()], monotonic() + patience
        return [line if isinstance(line, BrokenRun) else self._judged(line, until) for line in lines]

    def _line(self, name: str) -> RunLine | BrokenRun:
        try:
            return run_line(self.run(name))
        except (LedgerError, UnknownRun, KeyError, OSError) as error:
            return BrokenRun(name, str(error))

    def _judged(self, line: RunLine, until: float) -> RunLine | BrokenRun:
        with self._lock:
            known, asked = self._facts.get(line.id, ("", None))
            if asked is None or (asked.done() and (known != line.version or asked.exception())):
                asked = self._judge.submit(self.use, line.id, _facts_of)
                self._facts[line.id] = line.version, asked
        try:
            verdict, expected = asked.result(max(until - monotonic(), 0))
        except TimeoutError:
            return line
        except (LedgerError, UnknownRun, OSError) as error:
            return BrokenRun(line.id, str(error))
        return replace(line, verdict=verdict, expected=expected)

    def close(self) -> None:
        """Read no further facts."""
        self._judge.shutdown(wait=False, cancel_futures=True)

    def _reading(self, name: str) -> Reading:
        run = self.run(name)
        with self._lock:
            known = self._readings.pop(name, None)
            self._readings[name] = Reading(run) if known is None or known.gone else known
            # dropped but not closed: another thread may be about to read it
            while len(self._readings) > OPEN:
                self._readings.popitem(last=False)
            return self._readings[name]


def _facts_of(reading: Reading) -> Facts:
    return verdict_of(reading).word, reading.jobs.expected
