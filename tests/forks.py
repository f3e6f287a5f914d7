"""Processes of their own as forks of this one: a fresh Python takes seconds to import torch."""

import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from fedgauge.server.store.run import Run
from fedgauge.simulations.run.launch import OwnProcess

FORK = multiprocessing.get_context("fork")
# of a process that has imported what the tests' processes need, and has done nothing else
CLEAN_FORK = multiprocessing.get_context("forkserver")
CLEAN_FORK.set_forkserver_preload(
    [
        "fedgauge.server.pool.service",
        "fedgauge.simulations.rehearsal.rehearse",
        "fedgauge.simulations.run.in_memory",
        "sklearn.datasets",
        "torch._dynamo",
    ]
)


def ready_to_fork() -> None:
    """Start the process of which clean forks are made, once for all tests of this process."""
    forkserver.ensure_running()


class ForkedProcess(OwnProcess):
    """A child process of a run as a clean fork."""

    def __init__(
        self, run: Run, log: str, *arguments: str, ray: bool = True, at_our_death: int = signal.SIGTERM
    ) -> None:
        self.run, self.log, self.scratch = run, log, Path(tempfile.mkdtemp(prefix="fedgauge-"))
        self._fork = CLEAN_FORK.Process(target=_enter, args=(arguments, run.log(log), self.scratch))
        self._fork.start()

    def status(self) -> int | None:
        return self._fork.exitcode

    def park(self) -> None:
        self._fork.terminate()

    def close(self) -> None:
        self._fork.kill()
        self._fork.join()
        shutil.rmtree(self.scratch)


def processes_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of this process start their federation and their attack service as clean forks."""
    ready_to_fork()
    monkeypatch.setattr("fedgauge.simulations.run.launch.OwnProcess", ForkedProcess)


def _enter(arguments: tuple[str, ...], log: Path, scratch: Path) -> None:
    """Do in a fork what `python -m` does in a process of its own."""
    torch.set_num_threads(1)
    os.chdir(scratch)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__")


def forked(work: Callable[..., object], *arguments: object) -> BaseProcess:
    def begun() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's handler, if an earlier test has started Ray
        work(*arguments)

    child = FORK.Process(target=begun, daemon=True)
    child.start()
    return child


def hold(folder: Path, purpose: str) -> BaseProcess:
    """A process that holds a lock of a run until it is ended."""

    def wait() -> None:
        with Run(folder).lock(purpose):
            held.set()
            time.sleep(120)

    held = FORK.Event()
    child = forked(wait)
    assert held.wait(60)
    return child
