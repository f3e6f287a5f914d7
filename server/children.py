"""What a child process does first, so that it never outlives its parent, even if that is killed."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """A preexec_fn for Linux: the child gets SIGTERM when the thread that started it ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
