"""Memory of the process that trains and records, and of the one that attacks, after each round."""

import ctypes
import gc
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar, cast

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedgauge.server.app import one_round
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.strategy.build import build_strategy
from fedgauge.server.strategy.reply_checks import CheckedStrategy, RoundReplies
from fedgauge.server.update_recorder import UpdateRecorder
from fedgauge.simulations.run.in_memory import MemoryGrid, flower

MB = 2**20
Result = TypeVar("Result")


@dataclass(frozen=True)
class MemoryUse:
    """A process's resident memory after some rounds, and its peak so far, in MiB."""

    rounds: int
    resident: float
    peak: float


def memory_of(pid: int, rounds: int) -> MemoryUse:
    """Return a process's VmRSS and VmHWM (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {key: int(value.split()[0]) / 1024 for key, _, value in (x.partition(":") for x in lines) if "kB" in value}
    return MemoryUse(rounds, values["VmRSS"], values["VmHWM"])


def own_memory(rounds: int) -> MemoryUse:
    """Return this process's memory, after freed memory was returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory_of(os.getpid(), rounds)


class InMemory:
    """A scenario's federation, trained round by round with the real clients, check, recorder and strategy.

    Args:
        grid: of other clients than the real ones.
    """

    def __init__(
        self, scenario: Scenario, recorder: Callable[[RoundReplies], object], grid: MemoryGrid | None = None
    ) -> None:
        params, buffers = scenario.federation.initial()
        given = grid or MemoryGrid(scenario.protocol)
        self._grid = cast(Grid, given)
        inner = build_strategy(scenario.strategy, scenario.protocol.clients)
        self._strategy = CheckedStrategy(
            inner, recorder, buffers, scenario.protocol.seed, given.clients, protocol=scenario.protocol
        )
        self._arrays = ArrayRecord(params)

    def advance(self, round: int) -> None:
        """One round: weights out, every client trains, updates in, aggregation."""
        self._arrays = one_round(self._strategy, self._grid, round, self._arrays, 600.0)


def in_a_process(work: Callable[[Run], Result], run: Run) -> Result:
    """Run some work in a spawned process: a forked one starts with its parent's peak."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, run).result()


def train(run: Run, grid: type[MemoryGrid] = MemoryGrid) -> list[MemoryUse]:
    """Train a run's scenario in this process; return its memory after each round."""
    torch.set_num_threads(1)
    scenario, seen = run.scenario(), []
    with flower(), run.ledger() as ledger:
        recorder = UpdateRecorder(ledger, run.tape(), scenario.plan)
        federation = InMemory(scenario, recorder, grid(scenario.protocol))
        for round in range(1, scenario.protocol.rounds + 1):
            federation.advance(round)
            seen.append(own_memory(round))
    return seen


def audit(run: Run) -> list[MemoryUse]:
    """Attack a run in this process; return its memory after each round's last job."""
    seen: list[MemoryUse] = []
    with run.ledger() as ledger:
        jobs = ledger.progress().total // run.scenario().protocol.rounds

        def look() -> None:
            progress = ledger.progress()
            while len(seen) < (progress.done + progress.failed) // jobs:
                seen.append(own_memory(len(seen) + 1))

        serve(run, LocalExecutor(), tick=look, force=True)  # the updates are random: no training gives them
        look()
    return seen
