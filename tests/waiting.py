"""Wait for what another process or thread does."""

import subprocess
import time
from collections.abc import Callable
from typing import Any


def wait_for(
    look: Callable[[], Any], seconds: float = 240.0, process: subprocess.Popen[Any] | None = None, pause: float = 0.05
) -> Any:
    """What a look gives once it is true; a busy machine has time for it, and a process must not end before."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert process is None or process.poll() is None, "the process ended"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)
    return found
