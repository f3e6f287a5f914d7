"""The user's cache folder, and in it the code that torch compiles."""

import os
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Where decoded and downloaded data is kept between processes: XDG_CACHE_HOME/fedgauge."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedgauge"


def keep_compiled_code() -> None:
    """Name a folder in the user's cache for what torch compiles, here and in child processes, unless the user has named one.

    By itself torch takes a folder of /tmp, which belongs to whoever makes it first, and unpickles and runs what lies there.
    """
    with suppress(OSError, RuntimeError):  # we have no home, or may not write there: torch takes its own
        folder = cache_folder().absolute() / "compiled"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
