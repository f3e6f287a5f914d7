"""Which addresses processes listen at, as Linux says it."""

import ipaddress
import os
import sys
from collections.abc import Iterable
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """The addresses and TCP ports at which these processes listen."""
    sockets = {link for pid in pids for link in _links(pid) if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                found.add((_address(address), int(port, 16)))
    return found


def _links(pid: int) -> list[str]:
    try:
        return [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended, or closed a file
        return []


def _address(written: str) -> str:
    # 32-bit words in this machine's order of bytes
    words = [int(written[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(written), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
