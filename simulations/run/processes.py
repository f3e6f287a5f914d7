"""Child processes that end with this one: each has its own session, is signalled when we die, and is swept at the end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from fedgauge.server.child_processes import die_with_parent
from fedgauge.server.store import run_files

MARK = "FEDGAUGE_LAUNCH"  # in the environment of every process that one launch started, grandchildren included


def start(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    folder: Path | None = None,
    at_our_death: int = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a child process with its output in a log file; the terminal's Ctrl-C does not reach it.

    Args:
        folder: its current folder; None: ours.
        at_our_death: the signal that it gets when we die (Linux).
    """
    with os.fdopen(run_files.opened(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as out:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=folder,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, at_our_death) if sys.platform == "linux" else None,
        )


def end(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """Ask a child's process group to end; kill it if the child has not ended after `patience` seconds."""
    if process.poll() is not None:
        return
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait)
        except (ProcessLookupError, PermissionError):  # the group is empty (macOS: only a zombie is left)
            return
        except subprocess.TimeoutExpired:
            continue


def sweep(mark: str, patience: float = 5.0) -> list[int]:
    """End every process that carries a launch's mark; returns the ids of those that were still alive."""
    alive, asked = marked(mark), set[int]()
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        for pid in (found := marked(mark)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        asked.update(found)
        deadline = time.monotonic() + wait
        # a process that gives its memory back has lost its environment, and so its mark, before it has ended
        while (marked(mark) or any(is_running(pid) for pid in asked)) and time.monotonic() < deadline:
            time.sleep(0.1)
    return alive


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def marked(mark: str, variable: str = MARK) -> list[int]:
    """The ids of living processes that carry a launch's mark, without our own."""
    found = psutil.process_iter(["environ"])  # None: a zombie's, or another user's
    carry = [p.pid for p in found if (p.info["environ"] or {}).get(variable) == mark]
    return [pid for pid in carry if pid != os.getpid() and is_running(pid)]
