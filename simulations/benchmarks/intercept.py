"""Cost of recording for a federation: the time of recorder and tap (tape and ledger) against the rest of the round.

A round, in this process on one thread: the strategy's messages, each client's real local training (`client/app.py`), the
server's check, Flower's FedAvg. A real federation adds transport, start-up and evaluation, so its share is smaller.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import cast

from fedgauge.client.components import Table
from fedgauge.server.recorder import UpdateRecorder
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.strategy.checked import RoundReplies
from fedgauge.server.tap import tap
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread
from fedgauge.simulations.run.create import new_run
from fedgauge.simulations.run.in_memory import InMemory, MemoryGrid, flower

WIDE: Table = {"use": "mlp", "hidden": [3000, 2900]}  # 11.1 M parameters on a digit
LENET: Table = {"use": "lenet"}


@dataclass
class TimedRecorder(UpdateRecorder):
    """The real recorder, with its CPU and wall-clock seconds."""

    spent: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, intake: RoundReplies) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        super().__call__(intake)
        self.spent.append((time.process_time() - cpu, time.perf_counter() - wall))


@dataclass(frozen=True, eq=False)
class InterceptCase:
    """A federation whose recording is measured; each client takes `steps` local steps on batches of `batch` images."""

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
    """Milliseconds per round for small updates, and for large ones the share of a round that the recorder and the tap take."""
    repeat = {small: rounds, **dict.fromkeys(large, large_rounds)}
    with TemporaryDirectory(prefix="fedgauge-") as folder, one_thread(), flower():
        spent = _measure(repeat, Path(folder), progress)
        taps = {case: _tapped(case, Path(folder) / f"tap-{i}", large_rounds) for i, case in enumerate(large)}
    figures = [
        Figure(
            f"{small.name}: recording", 1e3 * median(s.recorder_wall for s in spent[small]), "ms a round", at_most=50.0
        ),
        Figure(f"{small.name}: recording, CPU", 1e3 * median(s.recorder_cpu for s in spent[small]), "ms a round"),
    ]
    for case in large:
        s = spent[case]
        cpu, wall = (median(v) for v in zip(*[(o.cpu, o.wall) for o in s], strict=True))
        part = 100 * median(o.recorder_cpu for o in s) / cpu
        figures += [
            Figure(f"{case.name}: recording / round", part, "% of CPU seconds", at_most=5.0 if case is EPOCH else None),
            Figure(
                f"{case.name}: recording / round", 100 * median(o.recorder_wall for o in s) / wall, "% of wall seconds"
            ),
            Figure(
                f"{case.name}: tap of a user's app / round",
                taps[case],
                "% of wall seconds",
                at_most=5.0 if case is EPOCH else None,
            ),
            Figure(f"{case.name}: round without recording", cpu, "CPU seconds"),
        ]
    settings = dict(
        data="mnist5k", strategy="FedAvg", threads=1, seed=0, rounds=rounds, large_rounds=large_rounds,
        round="messages, every client's local training, check, FedAvg; without transport, start-up and evaluation",
        recording="one safetensors file a client and one of the weights, digests, one SQLite transaction; the disk's page cache",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


@dataclass(frozen=True)
class RoundSeconds:
    """Seconds of one round: of the recorder, and of everything else."""

    recorder_cpu: float
    recorder_wall: float
    cpu: float
    wall: float


def _measure(
    repeat: Mapping[InterceptCase, int], folder: Path, progress: Progress
) -> dict[InterceptCase, list[RoundSeconds]]:
    """The rounds of all cases, in turns; each case's first round loads the data and is not counted."""
    federations = {case: _start(case, folder / str(i)) for i, case in enumerate(repeat)}
    spent: dict[InterceptCase, list[RoundSeconds]] = {case: [] for case in repeat}
    done, total = 0, sum(n + 1 for n in repeat.values())
    for round in range(1, max(repeat.values()) + 2):
        for case, (federation, recorder) in federations.items():
            if round > repeat[case] + 1:
                continue
            cpu, wall = time.process_time(), time.perf_counter()
            federation.advance(round)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            recorder_cpu, recorder_wall = recorder.spent[-1]
            recorder.tape.forget(round, range(case.clients))  # otherwise the tape takes gigabytes
            if round > 1:
                spent[case].append(RoundSeconds(recorder_cpu, recorder_wall, cpu - recorder_cpu, wall - recorder_wall))
            progress(done := done + 1, total)
    return spent


def _start(case: InterceptCase, folder: Path) -> tuple[InMemory, TimedRecorder]:
    scenario = case.scenario()
    run = new_run(scenario, "intercept", folder)
    recorder = TimedRecorder(run.ledger(), run.tape(), scenario.plan)
    return InMemory(scenario, recorder), recorder


def _tapped(case: InterceptCase, folder: Path, rounds: int) -> float:
    """Percentage of a round's wall seconds that a tap takes, as the run itself records them; the first round is not counted."""
    folder.mkdir()
    scenario = case.scenario()
    (folder / "audit.toml").write_text(scenario.to_toml())
    grid = tap(MemoryGrid(scenario.protocol), folder / "audit.toml", folder / "run")
    federation, run = InMemory(scenario, lambda intake: None, cast(MemoryGrid, grid)), Run.open(folder / "run")
    for round in range(1, rounds + 2):
        federation.advance(round)
        run.tape().forget(round, range(case.clients))
    grid._fedgauge_recorder.flush()  # type: ignore[attr-defined]  # it writes in a thread of its own
    with run.ledger() as ledger:
        cost = [(row["intercept_seconds"], row["seconds"]) for row in ledger.rounds()[1:]]
    return float(100 * median(own / (seconds - own) for own, seconds in cost))
