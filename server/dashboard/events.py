"""Tells listening pages about changes: it polls the ledgers' files, and reads them only if a file has changed."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any

from xxhash import xxh3_64_hexdigest

from fedgauge.server.dashboard.runs import RunCatalog, UnknownRun
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run

POLL_SECONDS = 0.5  # between checks of the files
HEARTBEAT = 15.0  # seconds of silence after which a comment is sent, so that proxies keep the connection


class EventStream:
    """Changes of a catalog's runs as server-sent events; a slow listener may miss versions, but never the last one."""

    def __init__(self, catalog: RunCatalog) -> None:
        self.catalog = catalog
        self._stopping = False

    def stop(self) -> None:
        """End every stream."""
        self._stopping = True

    async def events(self, name: str | None, last: str | None) -> AsyncIterator[str]:
        """The stream of one listener.

        Args:
            name: a run; None for all runs of the folder.
            last: the version that the listener already has, from its Last-Event-ID.
        """
        yield "retry: 1000\n\n"
        known, touched, spoke = last, None, monotonic()
        while not self._stopping:
            now = await asyncio.to_thread(self._touched, name)
            if now is None:
                yield "event: gone\ndata: {}\n\n"
                return
            version = known if now == touched else await asyncio.to_thread(self._version, name)
            touched = now
            if version != known or monotonic() - spoke > HEARTBEAT:
                news = f"id: {version}\nevent: change\ndata: {json.dumps({'run': name, 'version': version})}\n\n"
                yield ": still here\n\n" if version == known else news
                known, spoke = version, monotonic()
            await asyncio.sleep(POLL_SECONDS)

    def _touched(self, name: str | None) -> Any:
        """A value that differs whenever a ledger may have changed, made without a query. None: the run is gone."""
        if name is not None:
            try:
                return _marks(self.catalog.run(name))
            except UnknownRun:
                return None
            except OSError as error:  # of a run that is being replaced: it may be there again
                return str(error)
        return [(n, self._mark(n)) for n in self.catalog.names()]

    def _mark(self, name: str) -> Any:
        try:
            return _marks(self.catalog.run(name))
        except (UnknownRun, OSError) as error:  # deleted since it was listed, or not ours to open: it hides no other
            return str(error)

    def _version(self, name: str | None) -> str:
        if name is None:
            return _digest(repr(self._touched(None)))
        try:
            return self.catalog.use(name, lambda reading: reading.version)
        except (UnknownRun, LedgerError, OSError) as error:
            return _digest(str(error))


def _digest(text: str) -> str:
    return xxh3_64_hexdigest(text.encode(errors="replace"))


def _marks(run: Run) -> tuple[Any, ...]:
    try:
        at_work = tuple(run.at_work(purpose) for purpose in ("training", "audit"))
    except LedgerError:  # whoever reads the run says what is wrong with it
        at_work = ()
    return (*at_work, *(_stamp(run.folder / f"ledger.sqlite{tail}") for tail in ("", "-wal")))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.lstat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size
