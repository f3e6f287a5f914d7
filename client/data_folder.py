"""The folder of local data, and the cache of decoded and downloaded data."""

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np

from fedgauge.client.components import SpecError
from fedgauge.client.files import reading, replacing

may_download = ContextVar("may_download", default=True)  # False while a run is only displayed


def cache_folder() -> Path:
    """Return the folder for decoded and downloaded data: XDG_CACHE_HOME/fedgauge."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedgauge"


@contextmanager
def offline() -> Iterator[None]:
    """Forbid downloads of data."""
    before = may_download.set(False)
    try:
        yield
    finally:
        may_download.reset(before)


def data_folder() -> Path | None:
    """The folder of local data: FEDGAUGE_DATA, else shared/data next to the project, else None.

    Raises:
        SpecError: FEDGAUGE_DATA does not name a folder.
    """
    named = os.environ.get("FEDGAUGE_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if named and not folder.is_dir():
        raise SpecError(f"FEDGAUGE_DATA names {named}, which is not a folder: correct it, or unset it")
    return folder if folder.is_dir() else None


def state_folder() -> Path:
    """Return the folder for lasting state: XDG_STATE_HOME/fedgauge."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedgauge"


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of an npz file.

    Raises:
        ValueError: it is missing or damaged.
    """
    with reading(path, "an npz file"), zipfile.ZipFile(path), np.load(path, allow_pickle=False) as stored:
        arrays = {key: stored[key] for key in stored.files}
    return arrays


def cached(name: str, make: Callable[[], Mapping[str, np.ndarray]]) -> Mapping[str, np.ndarray]:
    """Arrays from the cache folder, computed and stored on first use."""
    path = cache_folder() / f"{name}.npz"
    if path.exists():
        return read_npz(path)
    made = make()
    with replacing(path) as scratch:
        np.savez_compressed(scratch, allow_pickle=False, **made)
    return made
