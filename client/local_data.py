"""Local data: the folder that holds it, and the cache of decoded and downloaded data."""

import os
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path

import numpy as np

from fedgauge.client.cache_folder import cache_folder
from fedgauge.client.files import MOST_ARCHIVE, open_data, replacing

may_download = ContextVar("may_download", default=True)  # False while a run is only displayed


def data_folder() -> Path | None:
    """The folder of local data: FEDGAUGE_DATA, else shared/data beside the project, else None.

    Raises:
        FileNotFoundError: FEDGAUGE_DATA does not name a folder.
    """
    named = os.environ.get("FEDGAUGE_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if named and not folder.is_dir():
        raise FileNotFoundError(f"FEDGAUGE_DATA names {named}, which is not a folder: correct it, or unset it")
    return folder if folder.is_dir() else None


def state_folder() -> Path:
    """What must outlive the cache: XDG_STATE_HOME/fedgauge."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedgauge"


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of an npz file that anybody may have made.

    Raises:
        ValueError: it is missing, damaged, or unpacks to more than the largest file.
    """
    try:
        with open_data(path, MOST_ARCHIVE) as file:
            with zipfile.ZipFile(file) as packed:
                if (size := sum(part.file_size for part in packed.infolist())) > MOST_ARCHIVE:
                    raise ValueError(f"its arrays need {size} bytes; the limit is {MOST_ARCHIVE}")
            file.seek(0)
            with np.load(file, allow_pickle=False) as stored:
                return {key: stored[key] for key in stored.files}
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such file") from error
    except Exception as error:  # damage shows as zlib.error, TokenError, BadZipFile, NotImplementedError and more
        raise ValueError(f"{path} is not an npz file that can be read: {error}") from error


def cached(name: str, make: Callable[[], Mapping[str, np.ndarray]]) -> Mapping[str, np.ndarray]:
    """Arrays from the cache folder, computed and stored on first use; a damaged entry is computed again."""
    path = cache_folder() / f"{name}.npz"
    if path.exists():
        try:
            return read_npz(path)
        except ValueError as error:
            warnings.warn(f"{path} is damaged ({error}) and is made again", stacklevel=2)
    made = make()
    with replacing(path) as scratch:
        np.savez_compressed(scratch, allow_pickle=False, **made)
    return made
