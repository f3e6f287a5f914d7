"""Events for open pages: poll the ledgers' files."""

import asyncio
import json
from collections.abc import AsyncIterator
from time import monotonic

from xxhash import xxh3_64_hexdigest

from fedgauge.server.dashboard.runs import RunCatalog, UnknownRun
from fedgauge.server.store.ledger_connection import LedgerError

POLL_SECONDS = 0.5  # between checks of the files
HEARTBEAT = 15.0  # seconds of silence after which a comment is sent, so that proxies keep the connection


class EventStream:
    """Changes of a catalog's runs as server-sent events."""

    def __init__(self, catalog: RunCatalog) -> None:
        self.catalog = catalog
        self._stopping = False

    def stop(self) -> None:
        """End every stream."""
        self._stopping = True

    async def events(self, name: str | None) -> AsyncIterator[str]:
        """Yield the events of one listener.

        Args:
            name: a run; None for all runs of the folder.
        """
        yield "retry: 1000\n\n"
        known, spoke = None, monotonic()
        while not self._stopping:
            now = await asyncio.to_thread(self._version, name)
            if now is None:
                yield "event: gone\ndata: {}\n\n"
                return
            if now != known or monotonic() - spoke > HEARTBEAT:
                news = f"id: {now}\nevent: change\ndata: {json.dumps({'run': name, 'version': now})}\n\n"
                yield ": still here\n\n" if now == known else news
                known, spoke = now, monotonic()
            await asyncio.sleep(POLL_SECONDS)

    def _version(self, name: str | None) -> str | None:
        """Return a value that changes with the files of a run, or of all; None: the run is gone."""
        if name is not None and not self.catalog.has(name):
            return None
        names = self.catalog.names() if name is None else [name]
        return xxh3_64_hexdigest(repr([(each, self._state(each)) for each in names]).encode(errors="replace"))

    def _state(self, name: str) -> object:
        try:
            run = self.catalog.run(name)
            paths = [run.folder / f"ledger.sqlite{tail}" for tail in ("", "-wal")]
            stamps = [(stat.st_mtime_ns, stat.st_size) for path in paths if path.exists() for stat in [path.lstat()]]
            return stamps, [run.at_work(purpose) for purpose in ("training", "audit")]
        except (UnknownRun, LedgerError, OSError) as error:
            return str(error)
