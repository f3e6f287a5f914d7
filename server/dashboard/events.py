"""Events for open pages: poll the ledgers' files, and read them after a change."""

import asyncio
import json
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

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
        known, touched, spoke = None, None, monotonic()
        while not self._stopping:
            now = await asyncio.to_thread(self._touched, name)
            if name is not None and now is None:
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
        """Return a value that changes with the files of a run; None: the run is gone."""
        if name is None:
            return [(each, self._touched(each)) for each in self.catalog.names()]
        try:
            run = self.catalog.run(name)
            paths = [run.folder / f"ledger.sqlite{tail}" for tail in ("", "-wal")]
            stamps = [(stat.st_mtime_ns, stat.st_size) for path in paths if path.exists() for stat in [path.lstat()]]
            return stamps, [run.at_work(purpose) for purpose in ("training", "audit")]
        except UnknownRun:
            return None
        except (LedgerError, OSError) as error:
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
