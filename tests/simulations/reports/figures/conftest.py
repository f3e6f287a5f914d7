"""A run with scores, which most tests of figures draw."""

import pytest

from fedgauge.server.store.run import Run
from tests.simulations.reports.figures.graded_runs import graded


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return graded(tmp_path_factory.mktemp("runs") / "graded")
