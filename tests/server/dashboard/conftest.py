"""What the tests of the page share."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedgauge.server.dashboard.web import make_app
from fedgauge.server.store.run import Run
from tests.server.dashboard.pages import Get, Http, no_json


@pytest.fixture
def folder(attacked_run: Run, tmp_path: Path) -> Path:
    """A folder with one complete run, to be added to and damaged."""
    shutil.copytree(attacked_run.folder, tmp_path / "runs" / "complete")
    return tmp_path / "runs"


@pytest.fixture
def get(folder: Path) -> Iterator[Get]:
    """Asks the page's server over the folder."""
    with Http(make_app(folder), base_url="http://localhost") as http:

        def ask(address: str, status: int = 200) -> Any:
            answer = http.get(address, follow_redirects=False)
            assert answer.status_code == status, answer.text
            return answer.json(parse_constant=no_json) if "json" in answer.headers["content-type"] else answer.text

        yield ask
