"""Does memory grow with rounds? Measured for the process that trains and records, and for the one that attacks.

Each is a fresh process, so that its peak is its own. A server that kept the updates of past rounds would grow by all of them.
"""

import ctypes
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.recorder import UpdateRecorder
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress
from fedgauge.simulations.run import processes
from fedgauge.simulations.run.create import new_run
from fedgauge.simulations.run.in_memory import InMemory, flower
from fedgauge.simulations.run.launch import TrainingProcess

MB = 2**20
Result = TypeVar("Result")


@dataclass(frozen=True)
class MemoryUse:
    """A process's resident memory after some rounds, and its peak so far, in MiB."""

    rounds: int
    resident: float
    peak: float


def own_memory(rounds: int) -> MemoryUse:
    """This process's memory, after freed memory was returned to the system, so that the allocator's slack is not counted."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory_of(os.getpid(), rounds)


def memory(progress: Progress, clients: int = 100, rounds: int = 3, iterations: int = 5) -> BenchmarkReport:
    """Resident and peak memory after each round, of training and of the audit, in this process's children."""
    with TemporaryDirectory(prefix="fedgauge-") as folder:
        scenario, run = _run(Path(folder), clients, rounds, iterations)
        trained = in_a_process(train, run)
        progress(1, 2)
        attacked = in_a_process(audit, run)
        progress(2, 2)
        figures = _complete(run) + _figures("strategy and recorder", trained, run) + _figures("audit", attacked, run)
    return BenchmarkReport(
        tuple(figures), _settings(clients, rounds, iterations, "in memory; real client app, validator, recorder")
    )


def memory_of_flower(progress: Progress, clients: int = 100, rounds: int = 10, iterations: int = 5) -> BenchmarkReport:
    """The same through Flower: memory of the ServerApp's process at the end of rounds.

    It is measured from outside, with the allocator's slack (about 10 MiB either way), hence the larger number of rounds.
    """
    with TemporaryDirectory(prefix="fedgauge-") as folder:
        scenario, run = _run(Path(folder), clients, rounds, iterations)
        trained = _watch(run, scenario, lambda done: progress(done, rounds + 1))
        attacked = in_a_process(audit, run)
        progress(rounds + 1, rounds + 1)
        figures = _complete(run) + _figures("ServerApp's process", trained, run) + _figures("audit", attacked, run)
    return BenchmarkReport(
        tuple(figures), _settings(clients, rounds, iterations, "Flower's engine, 2 clients at a time")
    )


def train(run: Run) -> list[MemoryUse]:
    """Train a run's scenario in this process; its memory after each round."""
    torch.set_num_threads(1)
    scenario, seen = run.scenario(), []
    with flower(), run.ledger() as ledger:
        federation = InMemory(scenario, UpdateRecorder(ledger, run.tape(), scenario.plan))
        for round in range(1, scenario.protocol.rounds + 1):
            federation.advance(round)
            seen.append(own_memory(round))
    return seen


def audit(run: Run) -> list[MemoryUse]:
    """Attack a run in this process; its memory after each round's last job."""
    seen: list[MemoryUse] = []
    with run.ledger() as ledger:
        jobs = ledger.progress().total // run.scenario().protocol.rounds

        def look() -> None:
            progress = ledger.progress()
            while len(seen) < (progress.done + progress.failed) // jobs:
                seen.append(own_memory(len(seen) + 1))

        serve(run, LocalExecutor(), tick=look)
        look()
    return seen


def memory_of(pid: int, rounds: int) -> MemoryUse:
    """A process's VmRSS and VmHWM (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {key: int(value.split()[0]) / 1024 for key, _, value in (x.partition(":") for x in lines) if "kB" in value}
    return MemoryUse(rounds, values["VmRSS"], values["VmHWM"])


def _watch(run: Run, scenario: Scenario, progress: Callable[[int], None]) -> list[MemoryUse]:
    """Train through Flower; the ServerApp's memory whenever the ledger has another round."""
    seen: list[MemoryUse] = []
    server = 0
    with run.ledger() as ledger, TrainingProcess(run) as training:
        while not training.finished():
            done = _rounds(ledger)
            if done > (seen[-1].rounds if seen else 0):
                server = server or server_process(training.mark)
                seen.append(memory_of(server, done))
                progress(done)
            time.sleep(0.05)
        training.verify()
    return seen


def server_process(mark: str) -> int:
    """The process of a training that runs the ServerApp."""
    return next(
        pid for pid in processes.marked(mark) if b"simulation_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def _rounds(ledger: Ledger) -> int:
    return max((row["round"] for row in ledger.rounds()), default=0)


def _run(folder: Path, clients: int, rounds: int, iterations: int) -> tuple[Scenario, Run]:
    tables = {
        "rounds": rounds,
        "clients": clients,
        "data": {"use": "mnist5k"},
        "model": {"use": "lenet"},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
        "attack": [{"use": "inverting_gradients", "iterations": iterations}],
        "audit": {"executor": "local"},
    }
    scenario = Scenario.from_tables(tables)
    return scenario, new_run(scenario, "memory", folder)


def in_a_process(work: Callable[[Run], Result], run: Run) -> Result:
    """What some work on a run gives, spawned, as a forked process starts with its parent's peak."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, run).result()


def _complete(run: Run) -> list[Figure]:
    """Check that the run did its work, as memory also stays flat if nothing happens."""
    with run.ledger() as ledger:
        jobs = ledger.progress()
        accepted = sum(row["status"] == "accepted" for row in ledger.observations())
    return [
        Figure("updates accepted", accepted, ""),
        Figure("attack jobs done", jobs.done, "", at_least=jobs.total, note=f"{jobs.failed} failed"),
    ]


def _figures(name: str, seen: list[MemoryUse], run: Run) -> list[Figure]:
    first, last = seen[0], seen[-1]
    figures = [
        Figure(f"{name}: {kind} after round {m.rounds}", getattr(m, kind), "MiB")
        for kind in ("resident", "peak")
        for m in seen
        if m.rounds in (1, 3, last.rounds)
    ]
    kept = sum(p.stat().st_size for p in (run.folder / "tape").glob("round-00001-client-*")) / MB
    kept *= last.rounds - first.rounds
    words = f"a process that kept each round's updates would grow by {kept:.1f}"
    resident, peak = last.resident - first.resident, 100 * (last.peak / first.peak - 1)
    return [
        *figures,
        Figure(f"{name}: growth of resident", resident, "MiB", at_most=kept / 2, note=words),
        Figure(f"{name}: growth of peak", peak, "%", at_most=5.0),
    ]


def _settings(clients: int, rounds: int, iterations: int, how: str) -> dict[str, object]:
    return dict(
        model="lenet", data="mnist5k, 1 example a round", clients=clients, rounds=rounds, seed=0, federation=how,
        attacks=f"inverting_gradients, {iterations} iterations, and the baselines; LocalExecutor",
    )  # fmt: skip
