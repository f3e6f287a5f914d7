"""Runs, a clock and a ledger for the tests of what a command shows while it works."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.attacks.score_rows import WHOLE_BATCH, ScoreRecord
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run.create import new_run
from tests.simulations.cli.conftest import TABLES as SMALL

TABLES = SMALL | {"rounds": 4, "audit": {"executor": "local", "rounds": [1, 2]}}


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of every view."""
    clock = Clock()
    monkeypatch.setattr("fedgauge.simulations.live.view.monotonic", clock)
    return clock


def begun(folder: Path, **changes: object) -> Run:
    return new_run(Scenario.from_tables({**TABLES, **changes}), "small", folder / "runs")


@pytest.fixture
def taped(tmp_path: Path) -> Run:
    """A run as training leaves it: two rounds on the tape, nothing attacked yet."""
    run = begun(tmp_path)
    scenario = run.scenario()
    params, buffers = scenario.federation.initial()
    tape = run.tape()
    with run.ledger() as ledger:
        ledger.record_round(0, 0.125, 2.5, 0.5)
        for r in (1, 2):
            tape.write_round(r, params, buffers)
            updates = {c: scenario.federation.client_update(params, buffers, c, r) for c in range(2)}
            digests = {c: tape.write_update(r, c, u) for c, u in updates.items()}
            ledger.record_intake(r, [Participation(c, "accepted", "", 1, d) for c, d in digests.items()], scenario.plan)
            ledger.record_round(r, 0.25 * r, 2.0, 1.0)
        ledger.set_meta(state="trained")
    return run


NAMES = ("matching", "other")


PLAN = AttackPlan(
    (
        *(PlannedAttack(name, {"use": "inverting_gradients"}) for name in NAMES),
        PlannedAttack("mean_image", {"use": "mean_image"}),
    ),
    wave=2,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run without rounds, with the attacks of PLAN."""
    data = {**TABLES["data"], "batch_size": 2}
    made = Run.create(tmp_path / "run", Scenario.from_tables({**TABLES, "data": data}))
    with made.ledger() as opened:
        opened.set_meta(main_metric="psnr")
        opened.add_attacks(PLAN, {p.name: "" for p in PLAN.attacks})
    return made


@pytest.fixture
def ledger(run: Run) -> Iterator[Ledger]:
    with run.ledger() as opened:
        yield opened


def work(ledger: Ledger, psnr: Callable[[], float | None], waves: int | None = None, crash: bool = False) -> None:
    """Score waves as the pool does: two examples a client, and those of another client as its baseline."""
    while waves != 0 and (lease := ledger.lease()) is not None:
        waves = None if waves is None else waves - 1
        if crash:
            ledger.fail(lease, "WorkerCrashed: gone")
            continue
        baseline = lease.attack.role == "baseline"
        of = [lease.attack.name] if baseline else [lease.attack.name, f"wrong_client({lease.attack.name})"]
        values = {(c, a, e): psnr() for c in lease.clients for a in of for e in (0, 1)}
        rows: dict[int, list[ScoreRecord]] = {c: [] for c in lease.clients}
        for (c, a, e), v in values.items():
            status = "diverged" if v is None else "converged"
            rows[c].append(ScoreRecord(lease.round, c, a, e, "psnr", v, status, 0.1))
            rows[c].append(ScoreRecord(lease.round, c, a, e, "mse", v, status, 0.1))
        for c in lease.clients:
            rows[c].append(
                ScoreRecord(lease.round, c, lease.attack.name, WHOLE_BATCH, "label_accuracy", 1.0, "converged", 0.1)
            )
        ledger.finish(lease, rows)


def intake(ledger: Ledger, round: int, clients: int = 5) -> None:
    seen = [Participation(c, "accepted", "", 2, f"digest {round} {c}") for c in range(clients)]
    ledger.record_intake(round, seen, PLAN)
