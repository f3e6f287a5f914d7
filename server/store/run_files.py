"""Files of a run's folder, which may be foreign: links are refused, and sizes are bounded."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from unicodedata import category

from fedgauge.client import files
from fedgauge.client.files import read_to

FOLDERS = ("tape", "reconstructions", "memories", "logs")
MOST_TEXT = 64 << 20  # bytes of a file of JSON or TOML
MOST_VERSIONS = 1 << 20  # of environment.json


class LedgerError(Exception):
    """A run or its ledger is missing, foreign, damaged or of another version; the message names it."""


class RefusedFile(LedgerError, OSError):
    """A run's folder has something unexpected; the message names it and the remedy."""


def _check(found: os.stat_result, path: Path | str, folder: bool = False) -> None:
    wanted, right = ("a folder", stat.S_ISDIR) if folder else ("a file", stat.S_ISREG)
    if not right(found.st_mode):
        kind = "a link" if stat.S_ISLNK(found.st_mode) else "something else"
        raise RefusedFile(f"{path} is {kind} where a run has {wanted}: put {wanted} there, or delete it")


def _check_folder(folder: Path) -> None:
    """Refuse a run's folder, or one of FOLDERS in it, that is a link or no folder."""
    for here in (folder.parent, folder) if folder.name in FOLDERS else (folder,):
        with suppress(FileNotFoundError):
            _check(here.lstat(), here, folder=True)


def printable(text: object) -> str:
    """Replace control characters by spaces, for a terminal."""
    return "".join(c if c.isprintable() or c == "\n" or category(c) == "Zs" else " " for c in str(text))


def look(path: Path) -> os.stat_result | None:
    """Return the file's status, or None where there is none.

    Raises:
        RefusedFile: it is a link, a folder, a pipe or a device, or its folder is a link.
    """
    _check_folder(path.parent)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    _check(found, path)
    return found


def opened(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file, for its owner only; errors as of `look` and `os.open`."""
    look(path)
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def read(path: Path, most: int = MOST_TEXT) -> bytes:
    """Read at most `most` bytes; errors as of `opened`, and OSError for a larger file."""
    with os.fdopen(opened(path), "rb") as file:
        return read_to(file, os.fstat(file.fileno()).st_size, most, path)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces path at the end; a missing folder is created."""
    _check_folder(path.parent)
    with files.replacing(path) as file:
        yield file


def write(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


def delete(path: Path) -> None:
    _check_folder(path.parent)
    path.unlink(missing_ok=True)


def delete_folder(path: Path) -> None:
    """Delete a folder of the run with its content, but not the targets of links."""
    _check_folder(path.parent)
    shutil.rmtree(path, ignore_errors=True)


def names(folder: Path) -> list[str]:
    _check_folder(folder)
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
