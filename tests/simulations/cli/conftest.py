"""Runs for the tests of the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.client.federation import Federation
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run.create import new_run

TABLES = {
    "seed": 1,
    "rounds": 2,
    "clients": 2,
    "data": {"use": "mnist5k", "batch_size": 1},
    "model": {"use": "mlp", "hidden": [16]},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "analytic"}],
    "audit": {"executor": "local"},
}


@pytest.fixture
def taped(tmp_path: Path) -> Run:
    """A run as training leaves it: two rounds on the tape, nothing attacked yet."""
    return taped_run(tmp_path / "runs", TABLES)


@pytest.fixture
def attacked(taped: Run) -> Run:
    serve(taped, LocalExecutor())
    return taped


def taped_run(runs: Path, tables: Mapping[str, Any]) -> Run:
    scenario = Scenario.from_tables(tables)
    run = new_run(scenario, "small", runs)
    federation = Federation(scenario.protocol)
    params, buffers = federation.initial()
    tape = run.tape()
    with run.ledger() as ledger:
        for r in (1, 2):
            tape.write_round(r, params, buffers)
            updates = {c: federation.client_update(params, buffers, c, r) for c in range(2)}
            digests = {c: tape.write_update(r, c, u) for c, u in updates.items()}
            ledger.record_intake(r, [Participation(c, "accepted", "", 1, d) for c, d in digests.items()], scenario.plan)
            ledger.record_round(r, 0.1 * r, 2.0, 1.0, 0.01)
        ledger.set_meta(state="trained")
    return run


def scenario_file(folder: Path, **changes: object) -> Path:
    path = folder / "wrong.toml"
    path.write_text(tomli_w.dumps({**TABLES, **changes}))
    return path
