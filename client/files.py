"""Files that are written whole or not at all, for their owner only."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[IO[bytes]]:
    """A file to write that takes path's place at the end: a reader or a crash sees the old file or the whole new one.

    Args:
        durable: after a power cut, too, the new one is there once this has returned.
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
        except BaseException:  # a full disk, say: what was written may be private
            os.unlink(scratch.name)
            raise


def _sync_folder(folder: Path) -> None:
    """Its names: that a file has taken another's place is written in it, and in no file."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
