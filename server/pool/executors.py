"""Executors: they run attack tasks somewhere and give back results; this one runs them in the process itself."""

from collections import deque

import torch

from fedgauge.attacks.engine.devices import CPU, Precision
from fedgauge.server.pool.worker import Task, TaskResult, Worker

Result = TaskResult | Exception


class WorkerDied(Exception):
    """The process that attacked a wave died; the wave is to blame only if that happens again."""


class LocalExecutor:
    """One wave at a time, in this process, on one device; a task's exception is a result like any other."""

    slots = 1

    def __init__(self, device: torch.device = CPU, precision: Precision = "ieee") -> None:
        self._waiting: deque[tuple[int, Task]] = deque()
        self._worker = Worker(device, precision)

    def submit(self, ticket: int, task: Task) -> None:
        self._waiting.append((ticket, task))

    def next_done(self, timeout: float) -> tuple[int, Result] | None:
        if not self._waiting:
            return None
        ticket, task = self._waiting.popleft()
        try:
            return ticket, self._worker.attack(task)
        except Exception as error:  # an attack's failure becomes a score row with a status and never ends the service
            return ticket, error

    def close(self) -> None:
        self._waiting.clear()


def last_line(error: Exception) -> str:
    """The last line of an error's message, which may be a whole traceback."""
    return (str(error).strip().splitlines() or [""])[-1]
