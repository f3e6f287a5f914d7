"""The files of a run's folder, which may come from anybody: links are refused when they are opened, and sizes are bounded."""

import errno
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
_FILES = (".toml", ".json", ".sqlite", "-wal", "-shm", ".safetensors", ".lock", ".html", ".pdf", ".parquet", ".log")
_DEEPEST = 6  # folders within folders: TensorBoard's are the deepest
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISREG, "a file"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class LedgerError(Exception):
    """A run, or its ledger's file, is missing, foreign, damaged or of another version; the message names it."""


class RefusedFile(LedgerError, OSError):
    """Something in a run's folder is not what a run keeps there; the message says what it is, and what to do."""


def _check(found: os.stat_result, path: Path | str, folder: bool = False, alone: bool = False) -> None:
    wanted = "a folder" if folder else "a file"
    kind = next((word for is_kind, word in _KINDS if is_kind(found.st_mode)), "a device")
    if kind != wanted:
        raise RefusedFile(
            f"{path} is {kind} where a run has {wanted}; nothing in a run's folder is followed: put {wanted} there, or delete it"
        )
    if alone and found.st_nlink > 1:
        raise RefusedFile(
            f"{path} is a file with {found.st_nlink} names (hard links), and to write to it would change all: copy the run, and "
            "open the copy"
        )


def _check_folder(folder: Path) -> None:
    """Refuse a run's folder, or one of FOLDERS in it, that is a link or no folder."""
    for here in (folder.parent, folder) if folder.name in FOLDERS else (folder,):
        with suppress(FileNotFoundError):
            _check(here.lstat(), here, folder=True)


def printable(text: object) -> str:
    """Names and words from elsewhere as a terminal may show them: all that is no letter, sign, space or line end is a space."""
    return "".join(c if c.isprintable() or c == "\n" or category(c) == "Zs" else " " for c in str(text))


def look(path: Path, alone: bool = False) -> os.stat_result | None:
    """Return the file's status, or None where there is none.

    Args:
        alone: refuse a file that has another name, too, as it is to be changed in place.

    Raises:
        RefusedFile: it is a link, a folder, a pipe or a device, or its folder is a link.
    """
    _check_folder(path.parent)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    _check(found, path, alone=alone)
    return found


def opened(path: Path, flags: int = os.O_RDONLY) -> int:
    """An open file, made for its owner only if the flags make it; RefusedFile as `look`, OSError as `os.open`."""
    if look(path, alone=bool(flags & (os.O_WRONLY | os.O_RDWR))) is None and not flags & os.O_CREAT:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
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
def new_folder(run: Path, name: str | None = None) -> Iterator[Path]:
    """A new folder in a run's.

    Args:
        name: of the run's folder that it replaces at the end; None: it is deleted.
    """
    _check_folder(run)
    scratch = run / f"{SCRAP}{secrets.token_hex(8)}"
    scratch.mkdir(mode=0o700)
    try:
        new = scratch / "new"
        new.mkdir(mode=0o700)
        yield new
        if name is not None:
            with suppress(FileNotFoundError):
                (run / name).rename(scratch / "old")
            new.rename(run / name)
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


def check(folder: Path, whole: bool = True) -> None:
    """Refuse a run's folder in which anything is no file or folder of ours.

    Args:
        whole: look at the files in its folders, too; otherwise only at what the folder itself holds.

    Raises:
        RefusedFile: naming the first, and what to do.
    """
    _check_folder(folder)
    waiting = [(folder, 0)]
    while waiting:
        here, depth = waiting.pop()
        if depth > _DEEPEST:
            raise RefusedFile(f"{here} lies deeper than any folder of a run: delete it")
        for name, found in _all(here):
            scrap = name.startswith(SCRAP)
            # a report that is printed, and an export, keep a folder in the run's own until they end
            if scrap and (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) and not depth):
                continue
            wanted = name in FOLDERS or not scrap and not name.endswith(_FILES) and stat.S_ISDIR(found.st_mode)
            _check(found, f"{here}/{name}", folder=wanted)  # to make a Path of each would take half of the time
            if wanted and whole:
                waiting.append((here / name, depth + 1))


def _all(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Names in a folder of a run, in order, with what they are; links are not followed."""
    found = {}
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a run at work deletes files
                found[entry.name] = entry.stat(follow_symlinks=False)
    return sorted(found.items())
