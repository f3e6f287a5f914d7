"""Cost of recording for a federation: the time of recorder and tap (tape and ledger) against the rest of the round.

A round, in this process on one thread: the strategy's messages, each client's real local training (`client/app.py`), the
server's check, Flower's FedAvg. A real federation adds transport, start-up and evaluation, so its share is smaller.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import cast

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedgauge.client.components import Table
from fedgauge.server.app import one_round
from fedgauge.server.recorder import UpdateRecorder
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.strategy.build import build_strategy
from fedgauge.server.strategy.checked import CheckedStrategy, RoundReplies
from fedgauge.server.tap import tap
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure
from fedgauge.simulations.run.create import new_run
from fedgauge.simulations.run.environment import one_thread
from fedgauge.simulations.run.in_memory import MemoryGrid, flower

WIDE: Table = {"use": "mlp", "hidden": [3000, 2900]}  # 11.1 M parameters on a digit


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


@dataclass(frozen=True, eq=False)
class InterceptCase:
    """A measured federation; each client takes `steps` local steps on batches of `batch` images."""

    name: str
    clients: int
    model: Table
    batch: int
    steps: int
    rounds: int = 5
    at_most: float | None = None  # of a round, in percent
    milliseconds: float | None = None  # a round, at most

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


CASES = (
    InterceptCase("4 clients, lenet, one step of 1 image", 4, {"use": "lenet"}, 1, 1, 30, milliseconds=50.0),
    InterceptCase("10 clients, 11.1 M parameters, one epoch of 10 steps of 30 images", 10, WIDE, 30, 10, at_most=5.0),
    InterceptCase("10 clients, 11.1 M parameters, one step of 64 images", 10, WIDE, 64, 1),
    InterceptCase("10 clients, 11.1 M parameters, one step of 1 image", 10, WIDE, 1, 1),
)


def intercept(cases: Sequence[InterceptCase] = CASES) -> BenchmarkReport:
    """Milliseconds a round and the share of a round that recorder and tap take; each case's first round is not counted."""
    with TemporaryDirectory(prefix="fedgauge-") as folder, one_thread(), flower():
        figures = [f for i, case in enumerate(cases) for f in _figures(case, Path(folder) / str(i))]
    settings = dict(
        data="mnist5k", strategy="FedAvg", threads=1, seed=0, rounds={case.name: case.rounds for case in cases},
        round="messages, every client's local training, check, FedAvg; without transport, start-up and evaluation",
        recording="one safetensors file a client and one of the weights, digests, one SQLite transaction; the disk's page cache",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


def _figures(case: InterceptCase, folder: Path) -> Iterator[Figure]:
    recorded = _recorded(case, folder)
    own = median(seconds for seconds, _ in recorded)
    yield Figure(f"{case.name}: recording", 1e3 * own, "ms a round", at_most=case.milliseconds)
    yield Figure(f"{case.name}: recording / round", _share(recorded), "% of wall seconds", at_most=case.at_most)
    tapped = _share(_tapped(case, folder / "app"))
    yield Figure(f"{case.name}: tap of a user's app / round", tapped, "% of wall seconds", at_most=case.at_most)


def _share(seconds: Sequence[tuple[float, float]]) -> float:
    """Percentage of the rest of a round that recording takes, from (recording, whole round)."""
    return 100 * median(own / (whole - own) for own, whole in seconds)


def _recorded(case: InterceptCase, folder: Path) -> list[tuple[float, float]]:
    """Seconds of the recorder and of the round, for each round."""
    scenario = case.scenario()
    run = new_run(scenario, "intercept", folder)
    recorder = UpdateRecorder(run.ledger(), run.tape(), scenario.plan)
    recording: list[float] = []
    whole: list[float] = []

    def timed(intake: RoundReplies) -> None:
        started = time.perf_counter()
        recorder(intake)
        recording.append(time.perf_counter() - started)

    federation = InMemory(scenario, timed)
    for round in range(1, case.rounds + 2):
        started = time.perf_counter()
        federation.advance(round)
        whole.append(time.perf_counter() - started)
        recorder.tape.forget(round, range(case.clients))  # otherwise the tape takes gigabytes
    return list(zip(recording, whole, strict=True))[1:]


def _tapped(case: InterceptCase, folder: Path) -> list[tuple[float, float]]:
    """The same of a tap, as the run itself records them."""
    folder.mkdir(parents=True)
    scenario = case.scenario()
    (folder / "audit.toml").write_text(scenario.to_toml())
    grid = tap(cast(Grid, MemoryGrid(scenario.protocol)), folder / "audit.toml", folder / "run")
    federation, run = InMemory(scenario, lambda intake: None, cast(MemoryGrid, grid)), Run.open(folder / "run")
    for round in range(1, case.rounds + 2):
        federation.advance(round)
        run.tape().forget(round, range(case.clients))
    grid._fedgauge_recorder.flush()  # type: ignore[attr-defined]  # it writes in a separate thread
    with run.ledger() as ledger:
        return [(row["intercept_seconds"], row["seconds"]) for row in ledger.rounds()[1:]]
