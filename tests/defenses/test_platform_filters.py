"""Platforms' filters: what they compute, against numpy and Flower's own code."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.supercore.differential_privacy import add_localdp_gaussian_noise_to_params
from torch import Tensor

from fedgauge.client.rng import generator
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.platform_filters import _first_accepted, local_dp, percentile_privacy, svt_privacy


def drawn(scale: float, *shape: int) -> Tensor:
    return scale * torch.randn(*shape, generator=generator("filters", *map(str, shape)), dtype=torch.float64)


@pytest.mark.parametrize("percentile", [0.0, 10.0, 37.5, 90.0, 100.0])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_percentile_is_numpys_and_large_entries_are_cut(percentile: float, steps: int) -> None:
    update = {"a": drawn(0.02, 7, 5), "b": drawn(0.02, 11)}
    found = percentile_privacy(percentile, 0.01, steps).apply(update, None)
    values = np.concatenate([t.numpy().ravel() for t in update.values()]) / steps
    cutoff = np.percentile(np.abs(values), percentile)
    expected = np.clip(np.where(np.abs(values) < cutoff, 0.0, values), -0.01, 0.01) * steps
    assert np.allclose(torch.cat([t.flatten() for t in found.values()]).numpy(), expected)
    assert found["a"].shape == (7, 5)


def test_the_sparse_vector_sends_at_most_a_part_with_noise_and_bound() -> None:
    update = {"a": drawn(1.0, 40, 30), "b": drawn(1.0, 100)}
    link = svt_privacy(fraction=0.2, gamma=0.5, noise_var=2.0, version="2.7")
    found = torch.cat([t.flatten() for t in link.apply(update, generator("svt")).values()])
    sent = found[found != 0]
    assert 0.5 * 0.2 * 1300 < len(sent) <= 0.2 * 1300  # drawn with replacement
    assert float(found.abs().max()) <= 0.5
    again = torch.cat([t.flatten() for t in link.apply(update, generator("svt")).values()])
    assert again.equal(found)


def test_without_noise_the_sparse_vector_sends_the_cut_values_above_its_threshold() -> None:
    """As epsilon and noise_var grow, the noise goes, and what is sent is an entry above tau, cut at gamma."""
    update = {"a": drawn(1.0, 500)}
    link = svt_privacy(fraction=0.1, epsilon=1e9, noise_var=1e9, gamma=0.8, tau=0.5)
    (found,) = link.apply(update, generator("exact")).values()
    sent = found != 0
    assert torch.allclose(found[sent], update["a"][sent].clamp(-0.8, 0.8), atol=1e-6)
    assert float(update["a"][sent].abs().min()) >= 0.5 - 1e-6


def test_the_noise_of_the_sparse_vector_is_its_versions() -> None:
    """On paper, c = 4 entries sent at epsilon 10: r = 8^(2/3) = 4; 2.7: 2 / 10, 4 c / (10 r), 2 / .5; 2.8: (1 + r) / 10,
    2 c (1 + r) / (10 r), 2 / .5, or 2 c / epsilon_release; given epsilons replace the parts of 10."""
    new = svt_privacy(epsilon=10.0, noise_var=0.5)
    assert replace(new, version="2.7").scales(4) == pytest.approx((0.2, 0.4, 4.0))
    assert new.scales(4) == pytest.approx((0.5, 1.0, 4.0))
    own = replace(new, epsilon_query=2.0, epsilon_release=4.0)
    assert own.scales(4) == replace(own, epsilon_threshold=8.0).scales(4) == pytest.approx((1 / 8, 4.0, 2.0))


def test_the_large_entries_that_the_sparse_vector_sends_are_its_versions() -> None:
    """1,000 of 10,000 entries are large, and epsilon is 1,000: nearly all that 2.7 sends are large, few of 2.8's."""
    update = {"w": torch.where(torch.arange(10_000) < 1000, 1e-3, 0.0)}

    def large(version: str) -> float:
        link = svt_privacy(0.1, 1000.0, 1e9, 1e-3, 5e-4, version=version)
        sent = link.apply(update, generator("large"))["w"].abs() > 5e-4
        chosen = link.apply({"w": update["w"] + 1e-5}, generator("large"))["w"] != 0
        return float(sent.sum() / chosen.sum())

    assert large("2.7") == 1.0
    assert 0.1 < large("2.8") < 0.2


def test_without_replacement_the_sparse_vector_sends_its_whole_part() -> None:
    found = svt_privacy(0.5, gamma=1.0, replace=False).apply({"a": drawn(1.0, 200)}, generator("whole"))["a"]
    assert int((found != 0).sum()) == 100
    assert float(found.abs().max()) > 1.0, "2.8 adds its noise after the bound"


@pytest.mark.parametrize("missing", [-3.0, -0.2, 0.0, 0.4, 2.0, 1e4])
def test_the_pass_that_accepts_an_entry_is_as_if_each_had_noise_of_its_own(missing: float) -> None:
    n, scale = 20_000, 0.7
    found = _first_accepted(torch.full((n,), missing), scale, generator("passes", str(missing)))
    once = scipy.stats.laplace.sf(missing, scale=scale)
    for passes in (1, 2, 5):
        expected = 1 - (1 - once) ** passes
        seen = float((found <= passes).double().mean())
        assert abs(seen - expected) <= 5 * math.sqrt(expected * (1 - expected) / n), passes
    assert found.min() >= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("steps", [1, 7])
def test_a_bound_beyond_the_precision_cuts_nothing_and_makes_no_infinity(dtype: torch.dtype, steps: int) -> None:
    largest = torch.finfo(dtype).max
    update = {"a": torch.tensor([1.0, -largest, largest / 8, 0.0], dtype=dtype)}
    for gamma in (1e5, 3e38):
        if gamma >= largest:
            assert torch.equal(percentile_privacy(0.0, gamma, steps).apply(update, None)["a"], update["a"])
        noisy = svt_privacy(1.0, gamma=gamma, steps=steps).apply(update, generator("wide"))["a"]
        assert noisy.dtype == dtype and noisy.isfinite().all()


def test_local_noise_is_flowers() -> None:
    epsilon, sensitivity, delta = 2.0, 0.3, 1e-4
    link = local_dp(epsilon, sensitivity, delta)
    assert isinstance(link, gaussian)
    theirs = add_localdp_gaussian_noise_to_params(
        ndarrays_to_parameters([np.zeros(200_000)]), sensitivity, epsilon, delta
    )
    seen = float(parameters_to_ndarrays(theirs)[0].std())
    assert abs(seen / link.sigma - 1) < 5 / math.sqrt(2 * 200_000)
