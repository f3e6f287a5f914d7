"""Runs for the tests of the command line."""

import shutil
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


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return taped_run(tmp_path_factory.mktemp("trained"), TABLES)


@pytest.fixture(scope="session")
def attacked_once(trained_once: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = copied(trained_once, tmp_path_factory.mktemp("attacked"))
    serve(run, LocalExecutor())
    return run


@pytest.fixture
def taped(trained_once: Run, tmp_path: Path) -> Run:
    """A run as training leaves it: two rounds on the tape, nothing attacked yet."""
    return copied(trained_once, tmp_path / "runs")


@pytest.fixture
def attacked(attacked_once: Run, tmp_path: Path) -> Run:
    return copied(attacked_once, tmp_path / "runs")


def copied(run: Run, runs: Path) -> Run:
    return Run.open(shutil.copytree(run.folder, runs / run.folder.name))


def taped_run(runs: Path, tables: Mapping[str, Any]) -> Run:
    """A run as training leaves it, with every client's updates of two rounds."""
    scenario = Scenario.from_tables(tables)
    return fill_tape(new_run(scenario, "small", runs), scenario, 2)


def scenario_file(folder: Path, **changes: object) -> Path:
    path = folder / "wrong.toml"
    path.write_text(tomli_w.dumps({**TABLES, **changes}))
    return path
