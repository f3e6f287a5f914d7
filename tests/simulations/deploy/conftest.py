"""Folders of deployments for the tests."""

import shutil
import sys
from pathlib import Path

import pytest

from fedgauge.simulations.deploy.folder import Deployment


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A deployment of three clients; not to be changed."""
    return Deployment.create(tmp_path_factory.mktemp("here") / "federation", 3, ["fed.example", "192.0.2.7"])


@pytest.fixture
def fresh(made: Deployment, tmp_path: Path) -> Deployment:
    """A copy of it."""
    shutil.copytree(made.folder, tmp_path / "federation")
    return Deployment.open(tmp_path / "federation")


linux = pytest.mark.skipif(sys.platform != "linux", reason="finds children by /proc: Linux")
