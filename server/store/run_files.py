"""The files of a run's folder, which may come from anybody: links are refused when they are opened, and sizes are bounded."""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from unicodedata import category

from fedgauge.client import files
from fedgauge.client.files import SCRAP, read_to

FOLDERS = ("tape", "reconstructions", "memories", "logs")
MOST_TEXT = 64 << 20  # bytes of a file of JSON or TOML
MOST_VERSIONS = 1 << 20  # of environment.json


class LedgerError(Exception):
    """A run, or its ledger's file, is missing, foreign, damaged or of another version; the message names it."""


class RefusedFile(LedgerError, OSError):
    """Something in a run's folder is not what a run keeps there; the message says what it is, and what to do."""


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
    """Names and words from elsewhere as a terminal may show them: all that is no letter, sign, space or line end is a space."""
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
    """An open file, made for its owner only if the flags make it; RefusedFile as `look`, OSError as `os.open`."""
    look(path)
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def read(path: Path, most: int = MOST_TEXT) -> bytes:
    """A file's bytes; OSError if it has more than `most`, or as `opened`."""
    with os.fdopen(opened(path), "rb") as file:
        return read_to(file, os.fstat(file.fileno()).st_size, most, path)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that replaces path at the end; its folder is made if it is missing."""
    _check_folder(path.parent)
    with files.replacing(path) as file:
        yield file


def write(path: Path, data: bytes) -> None:
    """Write a run's file: a reader, or a crash, sees the old one or the complete new one."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def scratch_folder(run: Path) -> Iterator[Path]:
    """A new folder in a run's, deleted at the end."""
    _check_folder(run)
    scratch = run / f"{SCRAP}{secrets.token_hex(8)}"
    scratch.mkdir(mode=0o700)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def delete(path: Path) -> None:
    """Delete a file, or a link itself; one that is missing stays so."""
    _check_folder(path.parent)
    path.unlink(missing_ok=True)


def delete_folder(path: Path) -> None:
    """Delete a folder of the run with all that is in it; links are deleted themselves."""
    _check_folder(path.parent)
    shutil.rmtree(path, ignore_errors=True)


def names(folder: Path) -> list[str]:
    """The names in a folder, in order; none if there is no such folder."""
    _check_folder(folder)
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
