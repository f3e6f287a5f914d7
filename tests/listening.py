"""Which addresses processes listen at, as the system says it."""

from collections.abc import Iterable
from contextlib import suppress

import psutil

LOOPBACK = "127.0.0.1"


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """The addresses and TCP ports at which these processes listen."""
    found = set()
    for pid in pids:
        with suppress(psutil.Error):  # it has just ended
            sockets = psutil.Process(pid).net_connections("tcp")
            found |= {s.laddr for s in sockets if s.status == psutil.CONN_LISTEN}
    return {(address.removeprefix("::ffff:"), port) for address, port in found}
