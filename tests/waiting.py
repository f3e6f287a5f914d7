"""Wait for what another process or thread does."""

import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any


def wait_for(
    look: Callable[[], Any],
    seconds: float = 240.0,
    what: str = "it",
    process: subprocess.Popen[Any] | None = None,
    pause: float = 0.05,
) -> Any:
    """What a look gives once it is true; a busy machine has time for it, and a process must not end before."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert process is None or process.poll() is None, f"the process ended before {what}"
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(pause)
    return found


def listens(port: int) -> bool:
    """Return whether a process accepts connections on a port of the loopback address."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
