"""Deployments for the tests: folders, and processes that are not Flower's."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.deploy.local_start import LocalDeployment


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A deployment of three clients; not to be changed."""
    return Deployment.create(tmp_path_factory.mktemp("here") / "federation", 3, ["fed.example", "192.0.2.7"])


@pytest.fixture
def fresh(made: Deployment, tmp_path: Path) -> Deployment:
    """A copy of it."""
    shutil.copytree(made.folder, tmp_path / "federation")
    return Deployment.open(tmp_path / "federation")


@pytest.fixture
def local(fresh: Deployment) -> Iterator[LocalDeployment]:
    """A local start with small programs in the place of Flower's."""
    made = LocalDeployment(fresh, "a-run")
    yield made
    made.close()


def program(local: LocalDeployment, name: str, code: str) -> None:
    local.commands[name] = (sys.executable, "-c", code)
    local.begin(name)


SLEEP = "import time; time.sleep(120)"


linux = pytest.mark.skipif(sys.platform != "linux", reason="finds children by /proc: Linux")
