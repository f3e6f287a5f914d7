"""The runs on the page: those of a folder, or one run; nothing outside is opened."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from xxhash import xxh3_64_hexdigest

from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.views.snapshot import RunLine, RunSnapshot

OPEN = 24  # the most runs kept open, because a reading holds all scores of its run

View = TypeVar("View")


class UnknownRun(Exception):
    """A run, or a part of one, does not exist; the message names it."""


@dataclass(frozen=True)
class BrokenRun:
    id: str
    error: str


def _plain(name: str) -> bool:
    return Path(name).name == name and not name.startswith(".")


class RunCatalog:
    """A folder of runs, or one run; safe to use from many threads."""

    def __init__(self, path: Path) -> None:
        self._only = Run(path) if (path / "ledger.sqlite").exists() else None
        self.root = path if self._only is None else self._only.folder.parent
        # those that it drops are not closed, as another thread may be about to read them
        self._reading = lru_cache(OPEN)(lambda name: RunSnapshot(self.run(name)))

    @property
    def first_page(self) -> str:
        """The address of the only run, or of the list."""
        return "" if self._only is None else f"run/{quote(self._only.name)}"

    def names(self) -> list[str]:
        """Return the runs, newest first."""
        if self._only is not None:
            return [self._only.name]
        ledgers = self.root.glob("*/ledger.sqlite") if self.root.is_dir() else ()
        names = (p.parent.name for p in ledgers if not p.parent.is_symlink())
        return sorted(filter(_plain, names), reverse=True)

    def run(self, name: str) -> Run:
        """Return a run by its name.

        Raises:
            UnknownRun: there is no such run.
        """
        if not self.has(name):
            self._reading.cache_clear()  # another run may get this name
            raise UnknownRun(f"there is no run {name!r} here")
        return self._only or Run(self.root / name)

    def has(self, name: str) -> bool:
        """Check for a run, which a link is not."""
        if self._only is not None:
            return name == self._only.name
        folder = self.root / name
        return _plain(name) and not os.path.islink(folder) and os.path.lexists(folder / "ledger.sqlite")

    def use(self, name: str, ask: Callable[[RunSnapshot], View]) -> View:
        """Return the result of `ask` on a run's current state.

        Raises:
            UnknownRun: there is no such run.
            LedgerError: its ledger cannot be read.
        """
        return self.compare([name], lambda readings: ask(readings[0]))

    def compare(self, names: Sequence[str], ask: Callable[[list[RunSnapshot]], View]) -> View:
        readings = [self._reading(self.run(name).name) for name in dict.fromkeys(names)]
        with ExitStack() as stack:
            # in one order, against deadlocks
            for reading in sorted(readings, key=lambda r: r.run.name):
                try:
                    stack.enter_context(reading.now())
                except LedgerError:  # open it again next time
                    self._reading.cache_clear()
                    raise
            return ask(readings)

    def version(self, name: str | None) -> str:
        """Return a value that changes with the files of a run; None: of all runs."""
        names = self.names() if name is None else [self.run(name).name]
        return xxh3_64_hexdigest(repr([(each, self._state(each)) for each in names]).encode(errors="replace"))

    def _state(self, name: str) -> object:
        try:
            run = self.run(name)
            paths = [run.folder / f"ledger.sqlite{tail}" for tail in ("", "-wal")]
            stamps = [(stat.st_mtime_ns, stat.st_size) for path in paths if path.exists() for stat in [path.lstat()]]
            return stamps, [run.at_work(purpose) for purpose in ("training", "audit")]
        except (UnknownRun, LedgerError, OSError) as error:
            return str(error)

    def lines(self) -> list[RunLine | BrokenRun]:
        found: list[RunLine | BrokenRun] = []
        for name in self.names():
            try:
                found.append(RunLine(self.run(name)))
            except (LedgerError, UnknownRun, KeyError, OSError) as error:
                found.append(BrokenRun(name, str(error)))
        return found
