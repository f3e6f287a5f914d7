"""Whose connection it is: Linux says which user of this machine holds the other end of a connection within it."""

import errno
import socket
import struct
import sys
from ipaddress import IPv6Address, ip_address
from pathlib import Path

Address = tuple[str, int]

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
USER, FILE = 6, 8  # fields of a line, counted from the end's own address

# the kernel's words for one socket: linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_NETLINK_SOCK_DIAG, _BY_FAMILY, _ERROR, _REQUEST, _ANY = 4, 20, 2, 1, 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, sender
# family, state, timer, resent, both ends, expires, unread, unsent, user, file
_REPLY = struct.Struct("=BBBB 48s IIIII")


def user_of(client: Address, server: Address) -> int | None:
    """The user at the other end of a connection; None if that end is not on this machine, or is closed.

    It takes microseconds, however many connections there are.

    Args:
        client, server: address and port of the other end, and of ours, which must be listening or connected.

    Raises:
        OSError: the system does not say it of single connections.
    """
    reply = _asked(client, server)
    if reply is None:
        if _asked(server, client) is None:  # a kernel that cannot say it says that there is none
            raise OSError(errno.ENOTSUP, "this kernel knows no connection by its ends")
        return None
    _, _, _, _, ends, _, _, _, user, file = _REPLY.unpack(reply)
    connected = struct.unpack_from("!H", ends, 2)[0] == server[1]  # a socket that listens there is no end of it
    return user if connected and file else None  # without a file nobody holds it, and the user is 0


def _asked(near: Address, far: Address) -> bytes | None:
    """What the kernel says of a connection's near end, or of the socket that listens there; None if there is neither."""
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, "only Linux says whose connection it is")
    family = socket.AF_INET if len(_packed(near[0])) == 4 else socket.AF_INET6
    question = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ANY)
    question += struct.pack("!HH16s16s", near[1], far[1], _packed(near[0]), _packed(far[0]))
    question += struct.pack("=III", 0, _ANY, _ANY)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)  # the answer is there when the question is sent
        kernel.sendto(_HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _REQUEST, 1, 0) + question, (0, 0))
        answer = kernel.recv(4096)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _ERROR:
        return answer[_HEADER.size : _HEADER.size + _REPLY.size]
    (code,) = struct.unpack_from("=i", answer, _HEADER.size)
    if code == -errno.ENOENT:
        return None
    raise OSError(-code, "the kernel was asked whose a connection is")


def _packed(address: str) -> bytes:
    """An address in the network's order of bytes; IPv4's in IPv6 as IPv4's."""
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).packed


def user_in_tables(client: Address, server: Address) -> int | None:
    """As `user_of`, from the table of all connections: it takes longer the more there are. None also if there is no table."""
    for _ in range(3):  # a table that changes while it is read may lack a line
        for table in TABLES:
            try:
                rows = table.read_text()
            except OSError:  # not Linux, or no such protocol
                continue
            for mapped in (False, True):  # a socket for both protocols names IPv4 addresses by IPv6 ones
                place = rows.find(f" {_end(*client, mapped)} {_end(*server, mapped)} ")
                if place >= 0:
                    fields = rows[place : rows.index("\n", place)].split()
                    return int(fields[USER]) if fields[FILE] != "0" else None
    return None


def _end(address: str, port: int, mapped: bool) -> str:
    packed = _packed(address)
    if mapped and len(packed) == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    words = (int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
