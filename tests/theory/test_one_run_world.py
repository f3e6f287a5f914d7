"""The world of bounds from one run: next to the exact epsilon, and in the order of their assumptions."""

import pytest

from tests.theory import one_run_world as module
from tests.theory.one_run_world import BOUNDS, one_run_world


def test_rows_are_next_to_the_exact_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MUS", (1.0,))
    rows = {(row.attack, row.metric): row for row in one_run_world(n=5, iterations=1000)}
    found = [rows[name, "epsilon"] for name in BOUNDS.values()]
    assert [row.here for row in found] == sorted(row.here for row in found if row.here is not None)
    assert all(row.reference == pytest.approx(4.8866, abs=1e-4) and row.n == 5 for row in found)
    assert rows["no assumption", "runs above it (%)"].here == 0
