"""The sample of a large gallery keeps to its limit and hides no extreme."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgauge.server.store.pictures import SMALL, png
from fedgauge.simulations.reports.sampling import sample_keys
from tests.simulations.reports.report_pages import pixels

STRENGTHS = st.dictionaries(
    st.integers(1, 60),
    st.dictionaries(
        st.tuples(st.integers(0, 5), st.integers(0, 3)), st.floats(0, 100) | st.just(math.nan), min_size=1, max_size=24
    ),
    min_size=1,
    max_size=20,
)


@given(STRENGTHS, st.integers(1, 60))
def test_the_choice_keeps_to_its_room_and_hides_no_extreme(
    strengths: Mapping[int, Mapping[tuple[int, int], float]], room: int
) -> None:
    chosen = sample_keys(strengths, room)
    assert chosen == sample_keys(strengths, room)
    shown = sum(map(len, chosen.values()))
    if sum(map(len, strengths.values())) <= room:
        assert {r: list(keys) for r, keys in chosen.items()} == {r: list(keys) for r, keys in strengths.items()}
        return
    assert 0 < shown <= max(3, room)
    for round, keys in chosen.items():
        graded = {k: v for k, v in strengths[round].items() if not math.isnan(v)}
        assert set(keys) <= set(strengths[round])
        if graded:
            most = [k for k, why in keys.items() if why == "leaked most"]
            assert graded[most[0]] == max(graded.values())
            least = [k for k, why in keys.items() if why == "leaked least"] or most
            assert graded[least[0]] == min(graded.values())
    everything = [v for keys in strengths.values() for v in keys.values() if not math.isnan(v)]
    if everything:
        assert max(everything) in [v for r in chosen for v in strengths[r].values()]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_the_pixels(channels: int) -> None:
    x = torch.rand(channels, 5, 7, generator=torch.Generator().manual_seed(0))
    expected = (x * 255).round().byte().permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(pixels(png(x)).reshape(5, 7, channels), expected)
    assert pixels(png(torch.tensor([[[-1.0, 2.0]]]))).tolist() == [[0, 255]]


def test_a_large_picture_is_made_small_by_averaging() -> None:
    x = torch.rand(3, 200, 100, generator=torch.Generator().manual_seed(0))
    small = pixels(png(x, SMALL))
    assert small.shape == (67, 34, 3)  # by three, as 200 / 96 is above 2
    assert int(small[0, 0, 0]) == round(float(x[0, :3, :3].mean()) * 255)
