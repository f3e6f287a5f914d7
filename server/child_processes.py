"""Child processes: end them with their parent, and give them its folders."""

import ctypes
import os
import signal
import tempfile
from pathlib import Path

# characters of its parent: below a folder of ours Ray's sockets take 88 of the 103 that macOS allows
_LONGEST = 15
_PR_SET_PDEATHSIG = 1
_FOLDERS = ("FEDGAUGE_DATA", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR")


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """A preexec_fn for Linux: the child gets this signal when the thread that started it ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def scratch_folder(prefix: str = "fedgauge-") -> Path:
    """Make a private folder whose path is short enough for Ray's sockets below it, whatever TMPDIR names."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp" if len(tempfile.gettempdir()) > _LONGEST else None))


def paths_from_here() -> dict[str, str]:
    """The variables that name folders, for a child in another folder: relative ones start from ours, as they did."""
    modules = [str(Path(name).absolute()) for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
    found = {key: str(Path(value).absolute()) for key in _FOLDERS if (value := os.environ.get(key))}
    return found | ({"PYTHONPATH": os.pathsep.join(modules)} if modules else {})
