"""Files that are written completely or not at all, readable by their owner only; and files that are read to a limit."""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO

SCRAP = ".part-"  # what the names of unfinished files and folders begin with; nobody reads them
# bytes of a user's own data
MOST_TABLE = 2 << 30  # text, line by line
MOST_ARCHIVE = 16 << 30  # arrays or weights, and all that is packed in one file of them
MOST_PICTURE = MOST_WORDS = 256 << 20  # a picture; a vocabulary, or the description of a dataset or model
_ARRAYS = (".safetensors", ".bin", ".pt", ".pth", ".onnx", ".gguf", ".h5", ".msgpack")  # names of a model's large files
# a folder in which no link is followed, and how a file in it is opened
_guarded: ContextVar[tuple[Path, Callable[[Path], int]] | None] = ContextVar("_guarded", default=None)
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


def writing(path: Path) -> AbstractContextManager[IO[bytes]]:
    """A file that a user names for a result: `replacing`, or what is there if it is no file, such as /dev/stdout or a pipe."""
    # to replace a device by a file would destroy it for everybody
    return replacing(path) if path.is_file() or not path.exists() else path.open("wb")


@contextmanager
def replacing_in(folder: int, name: str, durable: bool = False) -> Iterator[IO[bytes]]:
    """The same in an open folder, whatever has become of its path; a link of this name is replaced, not followed."""
    scratch = f"{SCRAP}{secrets.token_hex(8)}"
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


def claimed(path: Path) -> bool:
    """Whether this call has made an empty file there: of all processes, and after a crash or a power cut, one call alone has."""
    missing = [here for here in path.parents if not here.exists()]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for here in missing:  # a power cut must not take a folder with what it holds
        _sync(here.parent)
    folder = os.open(path.parent, _FOLDER)
    try:
        os.close(os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
        os.fsync(folder)
    except FileExistsError:
        return False
    finally:
        os.close(folder)
    return True


def _sync(path: Path) -> None:
    folder = os.open(path, _FOLDER)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_file(path: Path, most: int) -> bytes:
    """The bytes of a file that somebody else named; OSError if it is no file (a device has no end), or larger than `most` bytes."""
    with open_data(path, most) as file:
        return read_to(file, os.fstat(file.fileno()).st_size, most, path)


@contextmanager
def guarding(folder: Path, opened: Callable[[Path], int]) -> Iterator[None]:
    """`open_data` opens what lies in this folder so, meanwhile and in this thread."""
    token = _guarded.set((folder.absolute(), opened))
    try:
        yield
    finally:
        _guarded.reset(token)


def open_data(path: Path, most: int) -> IO[bytes]:
    """An open file that somebody else named; links are followed, but where `guarding` says how a file is opened.

    Raises:
        OSError: it is no file (a device has no end, a pipe waits for its writer), an unfinished one, or larger than `most` bytes.
    """
    guarded = _guarded.get()
    if guarded and (plain := Path(os.path.abspath(path))).is_relative_to(guarded[0]):
        opened = guarded[1](plain)
    else:
        _check_data(os.stat(path), path, most)  # before it is opened: to open a device may already do something
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_data(os.fstat(opened), path, most)
        return os.fdopen(opened, "rb")
    except BaseException:
        os.close(opened)
        raise


def _check_data(found: os.stat_result, path: Path, most: int) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no file")
    if any(part.startswith(SCRAP) for part in path.parts):
        raise OSError(f"{path} is unfinished (a name in it begins with {SCRAP}): name another")
    _check_size(found.st_size, most, path)


def check_folder(folder: Path) -> None:
    """Raise OSError, as `open_data`, unless what a library reads in a model's folder, and in the folders of it, are files."""
    folders = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    for path in (path for here in (folder, *folders) for path in here.iterdir()):
        with suppress(FileNotFoundError):  # a link that leads nowhere is not there for a library either
            if not stat.S_ISDIR((found := os.stat(path)).st_mode):
                _check_data(found, path, MOST_ARCHIVE if path.suffix in _ARRAYS else MOST_WORDS)


def read_to(file: IO[bytes], size: int, most: int, path: Path) -> bytes:
    """What an open file holds; OSError if that is more than `most` bytes."""
    _check_size(size, most, path)
    return file.read(size)


def _check_size(size: int, most: int, path: Path) -> None:
    if size > most:
        raise OSError(f"{path} has {size} bytes, and no such file has more than {most}")
