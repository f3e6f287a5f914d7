"""Tells listening pages about changes: it polls the ledgers' files, and reads them only if a file has changed."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from fedgauge.server.dashboard.runs import RunCatalog, UnknownRun
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.views.reading import state_of

POLL_SECONDS = 0.5  # between checks of the files
HEARTBEAT = 15.0  # seconds of silence after which a comment is sent, so that proxies keep the connection


class EventStream:
    """Changes of a catalog's runs as server-sent events; a slow listener may miss versions, but never the last one."""

    def __init__(self, catalog: RunCatalog) -> None:
        self.catalog = catalog
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End every stream."""
        self._stopping.set()

    async def events(self, name: str | None, last: str | None) -> AsyncIterator[str]:
        """The stream of one listener.

        Args:
            name: a run; None for all runs of the folder.
            last: the version that the listener already has, from its Last-Event-ID.
        """
        known, touched, silent = last, None, 0.0
        yield "retry: 1000\n\n"
        while not self._stopping.is_set():
            now = await asyncio.to_thread(self._touched, name)
            if now is None:
                yield "event: gone\ndata: {}\n\n"
                return
            if now != touched:
                touched = now
                version = await asyncio.to_thread(self._version, name)
                if version != known:
                    known, silent = version, 0.0
                    yield f"id: {version}\nevent: change\ndata: {json.dumps({'run': name, 'version': version})}\n\n"
            if silent >= HEARTBEAT:
                silent = 0.0
                yield ": still here\n\n"
            silent += POLL_SECONDS
            try:
                await asyncio.wait_for(self._stopping.wait(), POLL_SECONDS)
            except TimeoutError:
                continue

    def _touched(self, name: str | None) -> Any:
        """A value that differs whenever a ledger may have changed, made without a query. None: the run is gone."""
        if name is not None:
            try:
                return _marks(self.catalog.run(name))
            except UnknownRun:
                return None
        return [(n, _marks(self.catalog.run(n))) for n in self.catalog.names()]

    def _version(self, name: str | None) -> str:
        if name is None:
            return _digest("\n".join(f"{n}: {self._line(n)}" for n in self.catalog.names()))
        try:
            return self.catalog.use(name, lambda reading: reading.version)
        except (UnknownRun, LedgerError) as error:
            return _digest(str(error))

    def _line(self, name: str) -> str:
        try:
            run = self.catalog.run(name)
            with run.ledger(readonly=True) as ledger:
                return f"{ledger.finished()} {ledger.last_round()} {ledger.progress()} {state_of(run, ledger)}"
        except (UnknownRun, LedgerError):
            return "unreadable"


def _digest(text: str) -> str:
    return xxh3_64_hexdigest(text.encode())


def _marks(run: Run) -> tuple[Any, ...]:
    at_work = tuple(run.holder(purpose) for purpose in ("training", "audit"))
    return (*at_work, *(_stamp(run.folder / f"ledger.sqlite{tail}") for tail in ("", "-wal")))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size
