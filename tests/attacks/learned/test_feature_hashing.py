"""Feature hashing: a linear map that fits into memory."""

from dataclasses import replace

import pytest
import torch

from fedgauge.attacks.base import Budget
from fedgauge.attacks.learned import feature_hashing, learning_to_invert
from fedgauge.attacks.learned.feature_hashing import Sketch
from fedgauge.attacks.learned.ridge import ridge_inversion
from fedgauge.client.rng import generator
from tests.attacks.learned.small_threats import STREAMS, digits


def test_a_sketch_by_hand() -> None:
    sketch = Sketch(torch.tensor([0, 1, 0, 2]), torch.tensor([1.0, -1.0, -1.0, 1.0]), 3)
    assert sketch(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[-2.0, -2.0, 4.0]]
    assert sketch.counts.tolist() == [2, 1, 1]
    unsigned = replace(sketch, signs=None)
    assert unsigned(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[4.0, 2.0, 4.0]]


def test_signs_keep_inner_products_in_the_mean_and_plain_sums_do_not() -> None:
    a, b = torch.rand(2, 200, generator=generator("pair")).double()
    draws = {
        signed: torch.stack(
            [(s(a[None]) * s(b[None])).sum() for i in range(400) for s in [Sketch.draw(200, 20, signed, generator(i))]]
        )
        for signed in (True, False)
    }
    error = float(draws[True].std()) / 20  # of the mean of 400
    assert abs(float(draws[True].mean() - a @ b)) < 4 * error
    assert float(draws[False].mean()) > float(a @ b) + 20 * error


def test_a_table_too_large_for_memory_is_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_hashing, "free_bytes", lambda device: 8000)
    feature_hashing.check_memory(10, 100, torch.device("cpu"))
    with pytest.raises(ValueError, match="set buckets to at most 100$"):
        feature_hashing.check_memory(10, 101, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"buckets must lie in 1\.\.99"):
        Sketch.draw(100, 100, True, generator("x"))


def test_a_table_of_updates_too_large_for_memory_is_not_applicable_with_the_buckets_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, wave, _ = digits()
    monkeypatch.setattr(feature_hashing, "free_bytes", lambda device: 8 * 360 * 500)
    for make in (ridge_inversion(), learning_to_invert.learning_to_invert(hidden=8)):
        (found, *_) = make.reconstruct(wave, known, Budget(1), STREAMS)
        assert found.status == "not_applicable"
        assert found.reason.endswith("set buckets to at most 500")
    (fits, *_) = ridge_inversion(buckets=500).reconstruct(wave, known, Budget(1), STREAMS)
    assert fits.status == "converged"
