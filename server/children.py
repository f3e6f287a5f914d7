"""What a child process does first, so that none outlives us even where we are killed."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """As a preexec_fn on Linux: the child gets SIGTERM when the thread that started it ends, however that comes about."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
