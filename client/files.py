"""Files that are written completely or not at all, readable by their owner only; and files that are read to a limit."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

SCRAP = ".part-"  # what the names of unfinished files and folders begin with; nobody reads them
# bytes of a user's own data
MOST_TABLE = 2 << 30  # text, line by line
MOST_ARCHIVE = 16 << 30  # arrays or weights, and all that is packed in one file of them
MOST_PICTURE = MOST_WORDS = 256 << 20  # a picture; a vocabulary, or the description of a dataset or model
_ARRAYS = (".safetensors", ".bin", ".pt", ".pth", ".onnx", ".gguf", ".h5", ".msgpack")  # names of a model's large files


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
        except BaseException:  # e.g. a full disk; what was written may be private
            scratch.unlink(missing_ok=True)
            raise


def writing(path: Path) -> AbstractContextManager[IO[bytes]]:
    """A file that a user names for a result: `replacing`, or what is there if it is no file, such as /dev/stdout or a pipe."""
    # to replace a device by a file would destroy it for everybody
    return replacing(path) if path.is_file() or not path.exists() else path.open("wb")


def claimed(path: Path) -> bool:
    """Whether this call has made an empty file there: of all processes, and after a crash or a power cut, one call alone has."""
    missing = [here for here in path.parents if not here.exists()]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for here in missing:  # a power cut must not take a folder with what it holds
        _sync(here.parent)
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


def read_file(path: Path, most: int) -> bytes:
    """The bytes of a file that somebody else named; OSError if it is no file (a device has no end), or larger than `most` bytes."""
    with open_data(path, most) as file:
        return read_to(file, os.fstat(file.fileno()).st_size, most, path)


def open_data(path: Path, most: int) -> IO[bytes]:
    """An open file that somebody else named; links are followed.

    Raises:
        OSError: it is no file (a device has no end, a pipe waits for its writer), or larger than `most` bytes.
    """
    _check_data(os.stat(path), path, most)
    return path.open("rb")


def _check_data(found: os.stat_result, path: Path, most: int) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no file")
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
