"""The user's cache folder, and in it the code that torch compiles."""

import os
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for decoded and downloaded data: XDG_CACHE_HOME/fedgauge."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedgauge"


def keep_compiled_code() -> None:
    """Name a folder in the user's cache for what torch compiles, here and in child processes, unless the user has named one.

    By default torch unpickles and runs files from a folder in /tmp, which another user may have created.
    """
    with suppress(OSError, RuntimeError):  # we have no home, or may not write there: torch takes its own
        folder = cache_folder().absolute() / "compiled"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
