"""The sample of a large gallery, and its pictures."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgauge.server.views.gallery import png, sampled
from tests.server.dashboard.pages import pixels


@given(st.lists(st.floats(0, 100) | st.just(math.nan), min_size=1, max_size=60), st.integers(3, 60))
def test_a_sample_keeps_to_its_limit_and_has_both_extremes(strengths: list[float], limit: int) -> None:
    places = {(1, 0, i): strength for i, strength in enumerate(strengths)}
    chosen = sampled(places, limit)
    assert len(chosen) == min(len(strengths), limit) and chosen == sorted(set(chosen))
    shown, graded = [places[place] for place in chosen], [value for value in strengths if not math.isnan(value)]
    assert not graded or max(graded) in shown
    assert len(graded) < len(strengths) or min(graded) in shown


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_the_pixels(channels: int) -> None:
    x = torch.rand(channels, 5, 7, generator=torch.Generator().manual_seed(0))
    expected = (x * 255).round().byte().permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(pixels(png(x)).reshape(5, 7, channels), expected)
    assert pixels(png(torch.tensor([[[-1.0, 2.0]]]))).tolist() == [[0, 255]]


def test_a_large_picture_is_made_small_by_averaging() -> None:
    x = torch.rand(3, 200, 100, generator=torch.Generator().manual_seed(0))
    small = pixels(png(x))
    assert small.shape == (67, 34, 3)  # by three, as 200 / 96 is above 2
    assert int(small[0, 0, 0]) == round(float(x[0, :3, :3].mean()) * 255)
