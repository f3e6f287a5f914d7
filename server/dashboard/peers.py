"""Whose connection it is: Linux says which user of this machine holds the other end of a connection within it."""

import socket
import sys
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
USER = 6  # the field, counted from the end's own address


def user_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The user at the other end of a connection; None if that end is not on this machine, or the system does not say.

    Args:
        client, server: address and port of the other end, and of ours.
    """
    for table in TABLES:
        try:
            rows = table.read_text()
        except OSError:  # not Linux, or no such protocol
            continue
        for mapped in (False, True):  # a socket for both protocols names IPv4 addresses by IPv6 ones
            place = rows.find(f" {_end(*client, mapped)} {_end(*server, mapped)} ")
            if place >= 0:
                return int(rows[place : rows.index("\n", place)].split()[USER])
    return None


def _end(address: str, port: int, mapped: bool) -> str:
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    if mapped and len(packed) == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    words = (int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
