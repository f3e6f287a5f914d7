"""Processes of their own as forks of this one: a fresh Python takes seconds to import torch."""

import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from fedgauge.server.store.run import Run

FORK = multiprocessing.get_context("fork")


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
