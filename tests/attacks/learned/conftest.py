"""An empty tensor cache for the learned attacks' tests."""

from pathlib import Path

import pytest

from fedgauge.attacks.engine.cache import TensorCache


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path / "cache")
