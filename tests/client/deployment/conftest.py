"""An owner's file and the server's terms, as the tests of deployed clients write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.client.deployment.server_terms import ServerTerms

SGD = {"use": "local_sgd", "rate": 0.1}
DATA = {"use": "mnist5k", "batch_size": 4, "auxiliary": 64}
MLP = {"use": "mlp", "hidden": [8]}
SERVERS = {"seed": 3, "rounds": 5, "clients": 3, "data": DATA, "model": MLP, "chain": [SGD]}


def terms(**changes: Any) -> ServerTerms:
    return ServerTerms.parse(json.dumps(SERVERS | changes))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(**changes: Any) -> Path:
        tables = {"client": 1, "data": DATA, "chain": [SGD], **changes}
        path = tmp_path / "client.toml"
        path.write_text(tomli_w.dumps({k: v for k, v in tables.items() if v is not None}))
        return path

    return make


Write = Callable[..., Path]
