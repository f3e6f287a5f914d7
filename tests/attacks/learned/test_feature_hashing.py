"""Feature hashing: a linear map that fits into memory."""

import pytest
import torch

from fedgauge.attacks.base import Budget
from fedgauge.attacks.learned import learning_to_invert, shadow_updates
from fedgauge.attacks.learned.ridge import ridge_inversion
from fedgauge.attacks.learned.shadow_updates import UpdateFeatures, sketch
from fedgauge.client.rng import generator
from tests.attacks.learned.small_threats import STREAMS, digits


@pytest.mark.parametrize("signed", [True, False])
def test_hashing_is_a_matrix_of_one_sign_in_each_row_and_adds_up_variances(signed: bool) -> None:
    bins, signs = sketch(30, 7, signed)
    matrix = torch.nn.functional.one_hot(bins, 7) * signs[:, None]
    rows, features = torch.randn(5, 30, generator=generator("rows")), UpdateFeatures(False, 7, signed)
    torch.testing.assert_close(features.hashed(rows), rows @ matrix)
    torch.testing.assert_close(features.noise(30).square(), matrix.square().sum(0))
    assert signs.unique().tolist() == ([-1, 1] if signed else [1])


def test_signs_keep_inner_products_in_the_mean_and_plain_sums_do_not() -> None:
    a, b = torch.rand(2, 200, generator=generator("pair")).double()
    draws = {}
    for signed in (True, False):
        drawn = [sketch(200, 20, signed, str(i)) for i in range(400)]
        hashed = [torch.zeros(2, 20).double().index_add_(1, bins, torch.stack([a, b]) * signs) for bins, signs in drawn]
        draws[signed] = torch.stack([x @ y for x, y in hashed])
    error = float(draws[True].std()) / 20  # of the mean of 400
    assert abs(float(draws[True].mean() - a @ b)) < 4 * error
    assert float(draws[False].mean()) > float(a @ b) + 20 * error


def test_a_table_too_large_for_memory_is_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_updates, "free_bytes", lambda device: 8000)
    shadow_updates.check_memory(10, 100, torch.device("cpu"))
    with pytest.raises(ValueError, match="100$"):
        shadow_updates.check_memory(10, 101, torch.device("cpu"))
    with pytest.raises(ValueError, match="99"):
        sketch(100, 100, True)


def test_a_table_of_updates_too_large_for_memory_is_not_applicable_with_the_buckets_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, wave, _ = digits()
    monkeypatch.setattr(shadow_updates, "free_bytes", lambda device: 8 * 360 * 500)
    for make in (ridge_inversion(), learning_to_invert.learning_to_invert(hidden=8)):
        (found, *_) = make.reconstruct(wave, known, Budget(1), STREAMS)
        assert found.status == "not_applicable"
        assert found.reason.endswith("set buckets to at most 500")
    (fits, *_) = ridge_inversion(buckets=500).reconstruct(wave, known, Budget(1), STREAMS)
    assert fits.status == "converged"
