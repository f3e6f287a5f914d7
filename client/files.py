"""Files that are written whole or not at all, for their owner only."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes path's place at the end: a reader or a crash sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as scratch:
        try:
            yield scratch
            scratch.flush()
            os.replace(scratch.name, path)
        except BaseException:  # a full disk, say: what was written may be private
            os.unlink(scratch.name)
            raise
