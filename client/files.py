"""Files that are written completely or not at all, readable by their owner only."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[IO[bytes]]:
    """A file to write that replaces path at the end: a reader, or a crash, sees the old file or the complete new one.

    Args:
        durable: once this has returned, the new file survives a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as scratch:
        try:
            yield scratch
            scratch.flush()
            if durable:
                os.fsync(scratch.fileno())
            os.replace(scratch.name, path)
            if durable:
                _sync_folder(path.parent)
        except BaseException:  # e.g. a full disk; what was written may be private
            os.unlink(scratch.name)
            raise


def _sync_folder(folder: Path) -> None:
    """Sync the folder itself, which records that a file replaced another."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
