"""An empty tensor cache for the learned attacks' tests."""

from pathlib import Path

import pytest

from fedgauge.attacks.learned.cache import TensorCache


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path / "cache")
