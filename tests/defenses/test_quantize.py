"""Quantisation against its papers' bounds, and by hand."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from fedgauge.defenses.quantize import quantize
from tests.tensors import seeded


def one(link: quantize, t: Tensor, rng: Generator) -> Tensor:
    return link.apply({"w": t}, rng)["w"]


def test_three_four_five_in_two_bits() -> None:
    # one level at the norm 5: 3 goes up with probability 3/5, 4 with 4/5, and nothing else can come out
    draws = torch.stack(
        [one(quantize(2), torch.tensor([3.0, -4.0, 0.0]), rng) for rng in [seeded()] for _ in range(4000)]
    )
    assert set(draws[:, 0].tolist()) == {0.0, 5.0}
    assert set(draws[:, 1].tolist()) == {-5.0, 0.0}
    assert set(draws[:, 2].tolist()) == {0.0}
    up = (draws[:, :2] != 0).double().mean(0).tolist()
    assert up == pytest.approx([0.6, 0.8], abs=5 * math.sqrt(0.24 / 4000))


def test_int8_by_hand() -> None:
    # the largest entry is level 127, so a level is 0.5; what lies on a level stays
    t = torch.tensor([63.5, -32.0, 0.5, 0.0, -63.5], dtype=torch.float64)
    assert one(quantize(8, "uniform"), t, seeded()).tolist() == t.tolist()
    between = {float(one(quantize(8, "uniform"), torch.tensor([63.5, 10.2]), seeded(s))[1]) for s in range(200)}
    assert between == {10.0, 10.5}


@settings(max_examples=60)
@given(st.integers(2, 16), st.sampled_from(["qsgd", "uniform"]), st.integers(1, 50), st.integers(0, 1000))
def test_entries_are_levels_next_to_the_true_value(bits: int, kind: Any, n: int, seed: int) -> None:
    t = torch.randn(n, generator=seeded(seed), dtype=torch.float64)
    link = quantize(bits, kind)
    size = float(t.norm() if kind == "qsgd" else t.abs().max())
    found = one(link, t, seeded(seed)) / size * link.levels
    assert torch.allclose(found, found.round(), atol=1e-6)
    assert found.abs().max() <= link.levels * (1 + 1e-12)
    assert ((found - t / size * link.levels).abs() < 1 + 1e-6).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_keeps_lemma_3_1(bits: int) -> None:
    """Unbiased; E|Q(v) - v|^2 <= min(n / s^2, sqrt(n) / s) |v|^2; E|Q(v)|_0 <= s (s + sqrt(n)) (Alistarh et al., 2017)."""
    n, s, draws = 400, 2 ** (bits - 1) - 1, 3000
    v = torch.rand(n, generator=seeded(1), dtype=torch.float64) + 0.5
    v[::2] *= -1
    rng = seeded(2)
    found = torch.stack([one(quantize(bits), v, rng) for _ in range(draws)])
    level = float(v.norm()) / s
    part = (v.abs() / level).frac()
    spread = level * (part * (1 - part)).sqrt()  # of a coin between the two levels around an entry
    assert ((found.mean(0) - v).abs() < 5 * spread / math.sqrt(draws)).all()
    variance = float((found - v).square().sum(1).mean())
    assert variance == pytest.approx(float(spread.square().sum()), rel=0.05)
    assert variance <= min(n / s**2, math.sqrt(n) / s) * float(v.square().sum())
    assert float((found != 0).double().sum(1).mean()) <= s * (s + math.sqrt(n))


@pytest.mark.parametrize("kind", ["qsgd", "uniform"])
def test_the_largest_entry_never_rounds_above_the_top_level(kind: Any) -> None:
    for seed in range(300):
        t = torch.tensor([float(torch.rand((), generator=seeded(seed)))])
        assert float(one(quantize(8, kind), t, seeded(seed))[0]) == pytest.approx(float(t[0]), rel=1e-6)
