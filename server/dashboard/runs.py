"""The runs that the page shows: those of a folder, or one run; nothing outside is ever opened."""

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import TypeVar

from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.views.reading import Reading, jobs_of_run
from fedgauge.server.views.verdict import verdict_of

OPEN = 24  # the most runs kept open, because a reading holds all scores of its run

View = TypeVar("View")
Facts = Mapping[str, str | int | None]
UNKNOWN: Facts = {"verdict": None, "expected": None}


class UnknownRun(Exception):
    """There is no such run, or no such part of one; the message names it."""


def _plain(name: str) -> bool:
    return Path(name).name == name and not name.startswith(".")


class RunCatalog:
    """A folder of runs, or one run; safe to use from many threads."""

    def __init__(self, path: Path) -> None:
        self.single = (path / "ledger.sqlite").exists()
        self._only = Run(path) if self.single else None
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
        folder = self.root / name
        if self._only is not None:
            if name == self._only.name:
                return self._only
        elif _plain(name) and not os.path.islink(folder) and os.path.lexists(folder / "ledger.sqlite"):
            return Run(folder)  # never a link, which may point anywhere
        raise UnknownRun(f"there is no run {name!r} here")

    def use(self, name: str, ask: Callable[[Reading], View]) -> View:
        """The result of `ask` on a run's current state.

        Raises:
            UnknownRun: there is no such run.
            LedgerError: its ledger cannot be read.
        """
        reading = self._reading(name)
        try:
            with reading.now():
                return ask(reading)
        except LedgerError:
            self._drop(name)  # it may be repaired by the time it is opened again
            raise

    def facts(self, name: str, version: str, patience: float) -> Facts:
        """What takes a run's scores and data: the verdict in a word, and how many attacks are expected.

        UNKNOWN if that is not known within so many seconds; it is read on.

        Raises:
            UnknownRun: there is no such run.
            LedgerError: its ledger cannot be read.
        """
        with self._lock:
            known, asked = self._facts.get(name, ("", None))
            if asked is None or (asked.done() and (known != version or asked.exception())):
                asked = self._judge.submit(self.use, name, _facts_of)
                self._facts[name] = version, asked
        try:
            return asked.result(max(patience, 0))
        except TimeoutError:
            return UNKNOWN

    def close(self) -> None:
        """Read no further facts."""
        self._judge.shutdown(wait=False, cancel_futures=True)

    def compare(self, names: Sequence[str], ask: Callable[[list[Reading]], View]) -> View:
        """The result of `ask` on several runs together."""
        readings = [self._reading(name) for name in dict.fromkeys(names)]
        with ExitStack() as stack:
            # always in the same order, so that no two threads wait for each other
            for reading in sorted(readings, key=lambda r: r.run.name):
                try:
                    stack.enter_context(reading.now())
                except LedgerError:
                    self._drop(reading.run.name)
                    raise
            return ask(readings)

    def _reading(self, name: str) -> Reading:
        run = self.run(name)
        with self._lock:
            known = self._readings.pop(name, None)
            if known is not None and known.gone:
                known = None
            self._readings[name] = known or Reading(run)
            # dropped but not closed: another thread may be about to read it
            while len(self._readings) > OPEN:
                self._readings.popitem(last=False)
            return self._readings[name]

    def _drop(self, name: str) -> None:
        with self._lock:
            self._readings.pop(name, None)


def _facts_of(reading: Reading) -> Facts:
    return {"verdict": verdict_of(reading).word, "expected": jobs_of_run(reading).expected}
