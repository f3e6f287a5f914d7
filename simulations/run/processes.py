"""Child processes that end with us: in a session of their own, told when we die, and swept at the end."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedgauge.server.children import die_with_parent

MARK = "FEDGAUGE_LAUNCH"  # in the environment of everything that one launch started, grandchildren too


def start(command: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a child whose output goes to a log file. It gets SIGTERM when we die (Linux), and no Ctrl-C of the terminal's."""
    with log.open("ab") as out:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )


def end(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """Ask a child's whole group to end, then insist: with the child that stays, or with what it leaves behind."""
    if process.poll() is not None:
        return
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait)
        except (ProcessLookupError, PermissionError):  # nobody of the group is left (macOS: but a zombie)
            return
        except subprocess.TimeoutExpired:
            continue


def sweep(mark: str, patience: float = 5.0) -> list[int]:
    """End every process that carries a launch's mark; returns the ids of those that were still there (Linux)."""
    found = marked(mark)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in marked(mark):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + patience
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
    return found


def marked(mark: str) -> list[int]:
    """The living processes that carry a launch's mark, less our own (Linux)."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):  # ended while we looked, or another user's
            continue
        if wanted in environment.split(b"\0") and state != "Z" and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody accepts connections on a port of the loopback address."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
