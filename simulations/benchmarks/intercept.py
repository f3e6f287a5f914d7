"""What curiosity costs a federation: the tap's time (tape and ledger) beside the round that it listens to.

A round, in this process on one thread: the strategy's messages, each client's real local training (`client/app.py`), the
door's checks, Flower's FedAvg. A real federation adds transport, start-up and evaluation, which make the part smaller.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from fedgauge.client.components import Table
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.strategy.curious import UpdateRecorder
from fedgauge.server.strategy.validator import RoundReplies
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread
from fedgauge.simulations.run.create import new_run
from fedgauge.simulations.run.in_memory import InMemory, flower

WIDE: Table = {"use": "mlp", "hidden": [3000, 2900]}  # 11.1 M parameters on a digit
LENET: Table = {"use": "lenet"}


@dataclass
class TimedTap(UpdateRecorder):
    """The real tap, with a clock for CPU seconds and one for the wall's."""

    spent: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, intake: RoundReplies) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        super().__call__(intake)
        self.spent.append((time.process_time() - cpu, time.perf_counter() - wall))


@dataclass(frozen=True, eq=False)
class InterceptCase:
    """A federation whose interception is measured: steps local steps over batches of `batch` images."""

    name: str
    clients: int
    model: Table
    batch: int
    steps: int

    def scenario(self) -> Scenario:
        """Its scenario: FedAvg on mnist5k, attacked in every round."""
        local = {"use": "local_sgd", "rate": 0.05, "steps": self.steps, "batch_size": self.batch}
        return Scenario.from_tables(
            {
                "rounds": 10_000,
                "clients": self.clients,
                "data": {"use": "mnist5k", "batch_size": self.batch * self.steps},
                "model": self.model,
                "chain": [local],
                "attack": [{"use": "inverting_gradients"}],
            }
        )


SMALL = InterceptCase("4 clients, lenet, one step of 1 image", 4, LENET, 1, 1)
EPOCH = InterceptCase("10 clients, 11.1 M parameters, one epoch of 10 steps of 30 images", 10, WIDE, 30, 10)
LARGE = (
    EPOCH,
    InterceptCase("10 clients, 11.1 M parameters, one step of 64 images", 10, WIDE, 64, 1),
    InterceptCase("10 clients, 11.1 M parameters, one step of 1 image", 10, WIDE, 1, 1),
)


def intercept(
    progress: Progress,
    small: InterceptCase = SMALL,
    large: Sequence[InterceptCase] = LARGE,
    rounds: int = 30,
    large_rounds: int = 5,
) -> BenchmarkReport:
    """The tap's milliseconds a round for small updates, its part of a round for large ones."""
    repeat = {small: rounds, **dict.fromkeys(large, large_rounds)}
    with TemporaryDirectory(prefix="fedgauge-") as folder, one_thread(), flower():
        spent = _measure(repeat, Path(folder), progress)
    figures = [
        Figure(f"{small.name}: tap", 1e3 * median(s.tap_wall for s in spent[small]), "ms a round", at_most=50.0),
        Figure(f"{small.name}: tap, CPU", 1e3 * median(s.tap_cpu for s in spent[small]), "ms a round"),
    ]
    for case in large:
        s = spent[case]
        cpu, wall = (median(v) for v in zip(*[(o.cpu, o.wall) for o in s], strict=True))
        part = 100 * median(o.tap_cpu for o in s) / cpu
        figures += [
            Figure(f"{case.name}: tap / round", part, "% of CPU seconds", at_most=5.0 if case is EPOCH else None),
            Figure(f"{case.name}: tap / round", 100 * median(o.tap_wall for o in s) / wall, "% of wall seconds"),
            Figure(f"{case.name}: round without tap", cpu, "CPU seconds"),
        ]
    settings = dict(
        data="mnist5k", strategy="FedAvg", threads=1, seed=0, rounds=rounds, large_rounds=large_rounds,
        round="messages, every client's local training, door, FedAvg; without transport, start-up and evaluation",
        tap="one safetensors file a client and one of the weights, digests, one SQLite transaction; the disk's page cache",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


@dataclass(frozen=True)
class RoundSeconds:
    """Seconds of one round: of the tap, and of everything else."""

    tap_cpu: float
    tap_wall: float
    cpu: float
    wall: float


def _measure(
    repeat: Mapping[InterceptCase, int], folder: Path, progress: Progress
) -> dict[InterceptCase, list[RoundSeconds]]:
    """Each case's rounds, in turns; a first round of each is not counted: it loads the data."""
    federations = {case: _start(case, folder / str(i)) for i, case in enumerate(repeat)}
    spent: dict[InterceptCase, list[RoundSeconds]] = {case: [] for case in repeat}
    done, total = 0, sum(n + 1 for n in repeat.values())
    for round in range(1, max(repeat.values()) + 2):
        for case, (federation, tap) in federations.items():
            if round > repeat[case] + 1:
                continue
            cpu, wall = time.process_time(), time.perf_counter()
            federation.advance(round)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            tap_cpu, tap_wall = tap.spent[-1]
            tap.tape.forget(round, range(case.clients))  # gigabytes otherwise
            if round > 1:
                spent[case].append(RoundSeconds(tap_cpu, tap_wall, cpu - tap_cpu, wall - tap_wall))
            progress(done := done + 1, total)
    return spent


def _start(case: InterceptCase, folder: Path) -> tuple[InMemory, TimedTap]:
    scenario = case.scenario()
    run = new_run(scenario, "intercept", folder)
    tap = TimedTap(run.ledger(), run.tape(), scenario.plan)
    return InMemory(scenario, tap), tap
