"""The files of a run's folder, which may come from anybody: opened, written, deleted and listed without following a link.

A file lies in the run's folder or in a folder of it. The run's folder is opened first, as a folder and no link, each folder by its
name in the one that is open, and then the file: whoever replaces a part of the path in between leads nowhere.
"""

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO
from unicodedata import category

from fedgauge.client.files import SCRAP, read_to, replacing_in

FOLDERS = ("tape", "reconstructions", "memories", "logs", "tensorboard")
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
# folders of runs that no other may take the place of, by path, with their device and number
_staying: ContextVar[dict[Path, tuple[int, int]] | None] = ContextVar("_staying", default=None)


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
    if os.geteuid() not in (0, found.st_uid) and _owner_of_ours(found.st_dev, Path(path).parent) != found.st_uid:
        raise RefusedFile(
            f"{path} belongs to another user (number {found.st_uid}): copy the run, which makes it yours, and open the copy"
        )
    if alone and found.st_nlink > 1:
        raise RefusedFile(
            f"{path} is a file with {found.st_nlink} names (hard links), and to write to it would change all: copy the run, and "
            "open the copy"
        )


_owners: dict[int, int] = {}  # of files that we make, by the device they are on


def _owner_of_ours(device: int, folder: Path) -> int | None:
    """Whose a file is that we make in a folder: NFS and mounts with a fixed owner give all files to one; None if we may not."""
    if device not in _owners:
        try:
            with tempfile.TemporaryFile(dir=folder) as made:
                _owners[device] = os.fstat(made.fileno()).st_uid
        except OSError:
            return None
    return _owners[device]


def _named(error: OSError, path: Path) -> OSError:
    """The error with a file's whole path, not only the name by which an open folder has it."""
    error.filename = str(path)
    return error


@contextmanager
def _folder(path: Path, run: Path | None = None, make: bool = False) -> Iterator[int]:
    """An open folder of ours; no part of its path from the run's own folder on is followed.

    Args:
        run: the run's folder; None: the path is it, or is one of FOLDERS in it.
        make: the folder if it is missing, in a run that is there.
    """
    here = run or (path.parent if path.name in FOLDERS else path)
    parts = path.relative_to(here).parts
    if make and not parts:
        path.mkdir(exist_ok=True, mode=0o700)
    at = _open_folder(here, here)
    try:
        for name in parts:
            here /= name
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=at)
            outer, at = at, _open_folder(here, name, at)
            os.close(outer)
        yield at
    finally:
        os.close(at)


@contextmanager
def staying(run: Path) -> Iterator[None]:
    """Refuse a run's files, meanwhile and in this thread, once another folder is in its place.

    The owner of a folder above may replace that by a link to somebody else's, with a run of the same name.
    """
    with _folder(run) as at:  # open, so that no other folder gets its number
        known = os.fstat(at)
        token = _staying.set({**(_staying.get() or {}), run.absolute(): (known.st_dev, known.st_ino)})
        try:
            yield
        finally:
            _staying.reset(token)


def _open_folder(path: Path, name: Path | str, at: int | None = None) -> int:
    """Open a folder by its name in an open one; the name's last part is not followed."""
    try:
        opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    except FileNotFoundError:
        raise
    except OSError as error:
        _check(os.stat(name, dir_fd=at, follow_symlinks=False), path, folder=True)
        if error.errno in (errno.ENOTDIR, errno.ELOOP):  # and now it is a folder
            raise _replaced(path) from None
        raise _named(error, path) from None
    try:
        found, known = os.fstat(opened), _staying.get()
        _check(found, path, folder=True)
        number = found.st_dev, found.st_ino
        if known and at is None and known.get(path.absolute(), number) != number:
            raise _replaced(path)
    except RefusedFile:
        os.close(opened)
        raise
    return opened


def _replaced(path: Path) -> RefusedFile:
    return RefusedFile(f"{path} was replaced while it was at work: copy the run, and open the copy")


def printable(text: object) -> str:
    """Names and words from elsewhere as a terminal may show them: all that is no letter, sign, space or line end is a space."""
    return "".join(c if c.isprintable() or c == "\n" or category(c) == "Zs" else " " for c in str(text))


def look(path: Path, alone: bool = False, run: Path | None = None) -> os.stat_result | None:
    """What a file is, or None where there is none.

    Args:
        alone: refuse a file that has another name, too, as it is to be changed in place.
        run: the run's folder, for a file in a folder of its folders.

    Raises:
        RefusedFile: it is a link, a folder, a pipe, a device, or not ours.
    """
    try:
        with _folder(path.parent, run) as at:
            found = os.stat(path.name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return None
    _check(found, path, alone=alone)
    return found


def opened(path: Path, flags: int = os.O_RDONLY, run: Path | None = None) -> int:
    """An open file, made for its owner only if the flags make it; RefusedFile as `look`, OSError as `os.open`."""
    with _folder(path.parent, run) as at:
        try:
            alone = bool(flags & (os.O_WRONLY | os.O_RDWR))
            if look(path, alone, run) is None and not flags & os.O_CREAT:
                raise FileNotFoundError(2, os.strerror(2))
            # without O_NONBLOCK, what became a pipe since would wait for its writer
            file = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=at)
        except RefusedFile:
            raise
        except OSError as error:
            raise _named(error, path) from None
    try:
        _check(os.fstat(file), path, alone=alone)
    except RefusedFile:
        os.close(file)
        raise
    return file


def read(path: Path, most: int = MOST_TEXT) -> bytes:
    """A file's bytes; OSError if it has more than `most`, or as `opened`."""
    with os.fdopen(opened(path), "rb") as file:
        return read_to(file, os.fstat(file.fileno()).st_size, most, path)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that replaces path at the end; its folder is made if it is missing."""
    with _folder(path.parent, make=True) as at, replacing_in(at, path.name) as file:
        yield file


def write(path: Path, data: bytes) -> None:
    """Write a run's file: a reader, or a crash, sees the old one or the complete new one."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def new_folder(run: Path, name: str | None = None) -> Iterator[Path]:
    """A new folder in a run's for those who write by path, under a path that (on Linux) leads there whatever becomes of the run's.

    Args:
        name: of the run's folder that it replaces at the end; None: it is deleted.
    """
    scratch = f"{SCRAP}{secrets.token_hex(8)}"
    with _folder(run) as at:
        os.mkdir(scratch, 0o700, dir_fd=at)
        try:
            inner = _open_folder(run / scratch, scratch, at)
            try:
                owner = os.fstat(inner).st_uid
                if owner != os.geteuid() and owner != _owner_of_ours(os.fstat(inner).st_dev, run):
                    raise RefusedFile(
                        f"{run / scratch} was replaced while it was made: copy the run, and open the copy"
                    )
                os.mkdir("new", 0o700, dir_fd=inner)
                place = Path(f"/proc/{os.getpid()}/fd/{inner}")
                yield (place if place.exists() else run / scratch) / "new"
                if name is not None:
                    with suppress(FileNotFoundError):
                        os.rename(name, "old", src_dir_fd=at, dst_dir_fd=inner)
                    os.rename("new", name, src_dir_fd=inner, dst_dir_fd=at)
            finally:
                os.close(inner)
        finally:
            shutil.rmtree(scratch, ignore_errors=True, dir_fd=at)


def delete(path: Path, run: Path | None = None) -> None:
    """Delete a file, or a link itself; one that is missing stays so.

    Args:
        run: the run's folder, for a file in a folder of its folders.
    """
    try:
        with _folder(path.parent, run) as at:
            os.unlink(path.name, dir_fd=at)
    except FileNotFoundError:
        return
    except RefusedFile:
        raise
    except OSError as error:
        raise _named(error, path) from None


def delete_folder(path: Path) -> None:
    """Delete a folder of the run with all that is in it; links are deleted themselves."""
    with suppress(FileNotFoundError), _folder(path.parent) as at:
        shutil.rmtree(path.name, ignore_errors=True, dir_fd=at)


def names(folder: Path) -> list[str]:
    """The names in a folder, in order; none if there is no such folder."""
    try:
        with _folder(folder) as at:
            return sorted(os.listdir(at))
    except FileNotFoundError:
        return []


def check(folder: Path, whole: bool = True) -> None:
    """Refuse a run's folder in which anything is no file or folder of ours.

    Args:
        whole: look at the files in its folders, too; otherwise only at what the folder itself holds.

    Raises:
        RefusedFile: naming the first, and what to do.
    """
    waiting = [(folder, 0)]
    while waiting:
        here, depth = waiting.pop()
        if depth > _DEEPEST:
            raise RefusedFile(f"{here} lies deeper than any folder of a run: delete it")
        for name, found in _all(here, folder):
            scrap = name.startswith(SCRAP)
            # a report that is printed, and an export, keep a folder in the run's own until they end
            if scrap and (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) and not depth):
                continue
            wanted = name in FOLDERS or not scrap and not name.endswith(_FILES) and stat.S_ISDIR(found.st_mode)
            _check(found, f"{here}/{name}", folder=wanted)  # to make a Path of each would take half of the time
            if wanted and whole:
                waiting.append((here / name, depth + 1))


def _all(folder: Path, run: Path) -> list[tuple[str, os.stat_result]]:
    """Names in a folder of a run, in order, with what they are; links are not followed."""
    found = {}
    with suppress(FileNotFoundError), _folder(folder, run) as at, os.scandir(at) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a run at work deletes files
                found[entry.name] = entry.stat(follow_symlinks=False)
    return sorted(found.items())
