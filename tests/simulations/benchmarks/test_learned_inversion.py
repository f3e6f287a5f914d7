"""The benchmark of learning: it counts what it says, over a real federation in memory."""

import json

import pytest

from fedgauge.simulations.benchmarks.__main__ import BENCHMARKS
from fedgauge.simulations.benchmarks.learned_inversion import learning


@pytest.mark.full
@pytest.mark.slow
def test_generation_training_and_a_federation_are_measured() -> None:
    told: list[tuple[int, int]] = []
    report = learning(
        lambda done, total: told.append((done, total)),
        images=8, hidden=16, batch=8, repetitions=1, rounds=2, steps=40,
    )  # fmt: skip
    generation, training, worst, mean, steps = report.figures
    assert [done for done, _ in told] == list(range(1, told[0][1] + 1))
    assert generation.value is not None and generation.value > 0
    assert training.value is not None and 0 < training.value < 100, (
        "a network this small is far from the rate of products"
    )
    assert worst.value is not None and 0.5 < worst.value < 2
    assert worst.note.count(" / ") == 1 + 2, "both errors of both rounds"
    assert worst.value == mean.value, "the second round alone"
    assert steps.value == 25.0
    json.dumps(dict(report.settings), allow_nan=False)
    assert BENCHMARKS["learning"] is learning
