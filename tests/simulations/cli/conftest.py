"""Runs for the tests of the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run.create import new_run
from tests.small_runs import fill_tape

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
    """A run as training leaves it, with every client's updates of two rounds."""
    scenario = Scenario.from_tables(tables)
    return fill_tape(new_run(scenario, "small", runs), scenario, 2)


def scenario_file(folder: Path, **changes: object) -> Path:
    path = folder / "wrong.toml"
    path.write_text(tomli_w.dumps({**TABLES, **changes}))
    return path
