"""Files that are written completely or not at all, readable by their owner only; and files that are read to a limit."""

import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

SCRAP = ".part-"  # what the names of unfinished files and folders begin with; nobody reads them


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[IO[bytes]]:
    """A file to write that replaces path at the end: a reader, or a crash, sees the old file or the complete new one.

    Args:
        durable: once this has returned, the new file survives a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = path.with_name(f"{SCRAP}{secrets.token_hex(8)}")
    opened = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(opened, "w+b") as file:
        try:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(scratch, path)
            if durable:
                _sync(path.parent)  # it records that a file replaced another
        except BaseException as error:  # e.g. a full disk; what was written may be private
            scratch.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:  # a write says only that it failed
                error.filename = str(path)
            raise


def writing(path: Path) -> AbstractContextManager[IO[bytes]]:
    """A file that a user names for a result: `replacing`, or what is there if it is no file, such as /dev/stdout or a pipe."""
    # to replace a device by a file would destroy it for everybody
    return replacing(path) if path.is_file() or not path.exists() else path.open("wb")


def claimed(path: Path) -> bool:
    """Make an empty file and return whether this call made it: of all processes, even after a power cut, only one did."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    _sync(path.parent)
    return True


def _sync(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def reading(name: object, form: str) -> Iterator[None]:
    """Name a user's file in the error where a library fails to read it: each raises errors of its own kinds, often without a name.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        yield
    except Exception as error:
        why = getattr(error, "strerror", None)
        raise ValueError(f"{name}: {why}" if why else f"{name} is not {form} that can be read: {error}") from error


def read_file(path: Path, most: int) -> bytes:
    """Read a file that somebody else named; links are followed.

    Raises:
        OSError: it is no file (a device has no end, a pipe waits for its writer), or larger than `most` bytes.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # to open a folder fails by itself
        raise OSError(f"{path} is no file")
    with path.open("rb") as file:
        return read_to(file, os.fstat(file.fileno()).st_size, most, path)


def read_to(file: IO[bytes], size: int, most: int, path: Path) -> bytes:
    """Read an open file of this size.

    Raises:
        OSError: that is more than `most` bytes.
    """
    if size > most:
        raise OSError(f"{path} has {size} bytes, and no such file has more than {most}")
    return file.read(size)
