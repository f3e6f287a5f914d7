"""A complete run, and a copy to damage."""

import shutil
from pathlib import Path

import pytest

from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from tests.simulations.reports.report_pages import taped
from tests.small_runs import scenario


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A complete run: really attacked, with the replay check done."""
    run = taped(tmp_path_factory.mktemp("runs") / "complete", scenario())
    serve(run, LocalExecutor())
    return run


@pytest.fixture
def copied(attacked: Run, tmp_path: Path) -> Run:
    """The complete run, to be damaged."""
    shutil.copytree(attacked.folder, tmp_path / "copied")
    return Run.open(tmp_path / "copied")
