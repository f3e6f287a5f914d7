"""Files that are written completely or not at all, readable by their owner only; and files that are read to a limit."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[IO[bytes]]:
    """A file to write that replaces path at the end: a reader, or a crash, sees the old file or the complete new one.

    Args:
        durable: once this has returned, the new file survives a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = os.open(path.parent, _FOLDER)
    try:
        with replacing_in(folder, path.name, durable) as file:
            yield file
    finally:
        os.close(folder)


@contextmanager
def replacing_in(folder: int, name: str, durable: bool = False) -> Iterator[IO[bytes]]:
    """The same in an open folder, whatever has become of its path; a link of this name is replaced, not followed."""
    scratch = f".part-{secrets.token_hex(8)}"
    opened = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with os.fdopen(opened, "w+b") as file:
        try:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
            if durable:
                os.fsync(folder)  # it records that a file replaced another
        except BaseException:  # e.g. a full disk; what was written may be private
            os.unlink(scratch, dir_fd=folder)
            raise


def read_file(path: Path, most: int) -> bytes:
    """The bytes of a file that somebody else named; OSError if it is no file (a device has no end), or larger than `most` bytes."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    with os.fdopen(opened, "rb") as file:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no file")
        return read_to(file, found.st_size, most, path)


def read_to(file: IO[bytes], size: int, most: int, path: Path) -> bytes:
    """What an open file holds; OSError if that is more than `most` bytes."""
    if size > most:
        raise OSError(f"{path} has {size} bytes, and no such file has more than {most}")
    return file.read(size)
