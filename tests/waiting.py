"""Waits for what other threads and processes do."""

import time
from collections.abc import Callable
from typing import Any


def wait_for(look: Callable[[], Any], seconds: float = 60.0, what: str = "it") -> Any:
    """The first result of `look` that counts as true."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return found
