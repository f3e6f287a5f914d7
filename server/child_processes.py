"""Child processes: end them with their parent, and give them its folders."""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_FOLDERS = ("FEDGAUGE_DATA", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR")


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """A preexec_fn for Linux: the child gets this signal when the thread that started it ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def paths_from_here() -> dict[str, str]:
    """The variables that name folders, for a child in another folder: relative ones start from ours, as they did."""
    modules = [str(Path(name).absolute()) for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
    found = {key: str(Path(value).absolute()) for key in _FOLDERS if (value := os.environ.get(key))}
    return found | ({"PYTHONPATH": os.pathsep.join(modules)} if modules else {})
