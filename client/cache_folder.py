"""The user's cache folder, and in it the code that torch compiles."""

import atexit
import os
import stat
from contextlib import suppress
from pathlib import Path

COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # torch's name for the folder of what it compiles


def cache_folder() -> Path:
    """Where decoded and downloaded data is kept between processes: XDG_CACHE_HOME/fedgauge."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedgauge"


def keep_compiled_code() -> None:
    """Name a folder of this user alone for what torch compiles, here and in child processes, unless the user has named one.

    By itself torch takes a folder of /tmp, which belongs to whoever makes it first, and unpickles and runs what lies there.
    """
    if COMPILED not in os.environ:
        with suppress(OSError):  # nothing can be written anywhere: torch says so where it compiles
            os.environ[COMPILED] = str(_own_folder() or _passing_folder())


def _own_folder() -> Path | None:
    """The folder in the cache, or None where somebody else may write there, or make it, or we may not."""
    try:
        folder = cache_folder().absolute() / "compiled"
        there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        found = os.stat(there)
        shared = found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if shared or not os.access(there, os.W_OK | os.X_OK):
            return None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):  # RuntimeError: we have no home
        return None
    return folder


def _passing_folder() -> Path:
    """A folder for this process and its children."""
    import shutil  # a command that only prints its help does not pay for them
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="fedgauge-compiled-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
