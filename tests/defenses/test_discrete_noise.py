"""Discrete noise: the right distributions, drawn exactly, and rounding that tells nothing of what the noise hides."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Generator

from fedgauge.client.transforms import UpdateTransform
from fedgauge.client.update import Update, norm
from fedgauge.defenses import discrete_draws
from fedgauge.defenses.clip import clip
from fedgauge.defenses.discrete_draws import STEPS, RandomBits, Whole, laplace_draws, normal_draws
from fedgauge.defenses.noise import discrete, gaussian, laplace


def bits(seed: int = 0) -> RandomBits:
    return RandomBits(seed.to_bytes(32, "little"))


@pytest.mark.parametrize(("draws", "law"), [(normal_draws, stats.norm()), (laplace_draws, stats.laplace())])
def test_draws_have_their_distribution_and_reach_every_residue(
    draws: Callable[[RandomBits, int], Whole], law: stats.rv_continuous
) -> None:
    found = draws(bits(), 200_000)
    spread = (found + np.random.default_rng(0).random(len(found)) - 0.5) / STEPS
    assert stats.kstest(spread, law.cdf).pvalue > 1e-6
    assert stats.chisquare(np.bincount(found % 64, minlength=64)).pvalue > 1e-6


@pytest.mark.parametrize(("draws", "power"), [(normal_draws, 2), (laplace_draws, 1)])
def test_draws_have_the_very_probabilities(
    draws: Callable[[RandomBits, int], Whole], power: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a coarse grid, sigma or scale 4, where the discrete distribution differs from the continuous one."""
    monkeypatch.setattr(discrete_draws, "FINENESS", 2)
    monkeypatch.setattr(discrete_draws, "STEPS", 4)
    found, n = draws(bits(1), 200_000), np.arange(-60, 61)
    expected = np.exp(-((np.abs(n) / 4) ** power) / power)
    kept = np.abs(n) <= 10
    counts = np.array([(found == k).sum() for k in n[kept]])
    probabilities = expected[kept] / expected.sum()
    counts = np.append(counts, len(found) - counts.sum())
    probabilities = np.append(probabilities, 1 - probabilities.sum())
    assert stats.chisquare(counts, len(found) * probabilities).pvalue > 1e-6


def test_exponentials_are_exact_in_their_parts() -> None:
    n = 100_000
    for numerator in (0, 1, 5, 8):
        share = bits(2).exp_minus(np.full(n, numerator), 3).mean()
        assert share == pytest.approx(math.exp(-numerator / 8), abs=6 * 0.5 / math.sqrt(n))
    assert bits(3).exp_minus_one(n).mean() == pytest.approx(math.exp(-1), abs=6 * 0.5 / math.sqrt(n))
    assert bits(4).one_in(3, n).mean() == pytest.approx(1 / 3, abs=6 * 0.5 / math.sqrt(n))


@pytest.mark.parametrize("noise", [discrete(gaussian(0.1)), discrete(laplace(0.1))], ids=repr)
def test_who_knows_the_generator_does_not_know_the_noise(noise: UpdateTransform) -> None:
    """The zeros of a mask behind the noise gave the generator's state, and that gave the noise."""
    rng, untouched = Generator().manual_seed(1), Generator().manual_seed(1)
    update = {"w": torch.zeros(100)}
    first, again = noise.apply(update, rng)["w"], noise.apply(update, Generator().manual_seed(1))["w"]
    assert not torch.equal(first, again)
    assert torch.equal(rng.get_state(), untouched.get_state()), "nor does it draw its key from there"


# ----------------------------------------------------------------------------------------- the side channel of floats

ENTRIES, RELEASES = 20_000, 40


def told_apart(noise: Callable[[Update, Generator], Update], sigma: float) -> int:
    """In how many of 40 releases rounding alone names the batch, of two whose updates are far below the noise.

    Where noise nearly cancels an entry u, the sum is a multiple of float32's spacing at u / 2 if the entry was u; from another
    entry it is any number.
    """
    rng = Generator().manual_seed(0)
    right = 0
    for release in range(RELEASES):
        pair = [sigma / 30 * torch.randn(ENTRIES, generator=rng) for _ in range(2)]
        secret = release % 2
        seen = noise({"w": pair[secret]}, rng)["w"]
        broken = [impossible(seen, u) for u in pair]
        coin = bool(torch.rand((), generator=rng) < 0.5)
        right += (coin if broken[0] == broken[1] else broken[0] > broken[1]) == bool(secret)
    return right


def impossible(seen: torch.Tensor, u: torch.Tensor) -> int:
    """How many entries cannot be u plus a float."""
    near = seen.abs() < u.abs() / 4
    spacing = torch.exp2(torch.floor(torch.log2(u.abs() / 2)) - 23).double()
    return int((torch.remainder(seen.double(), spacing) != 0)[near].sum())


def test_noise_in_floating_point_names_the_batch_in_every_release() -> None:
    """The reason for discrete noise: what a simulation measures with protects nobody."""
    assert told_apart(gaussian(0.3).apply, 0.3) == RELEASES
    assert told_apart(laplace(0.3).apply, 0.3) == RELEASES


@pytest.mark.parametrize("noise", [gaussian(0.3).deployed, laplace(0.3).deployed], ids=repr)
def test_discrete_noise_leaves_it_to_chance(noise: UpdateTransform) -> None:
    assert isinstance(noise, discrete)
    drawn = bits()
    right = told_apart(lambda update, _: noise.with_bits(update, drawn), 0.3)
    assert stats.binomtest(right, RELEASES).pvalue > 1e-4


@pytest.mark.parametrize("u", [0.0, 1e-30, 0.1, -7.3, 1e5])
def test_every_entry_leads_to_multiples_of_one_step(u: float) -> None:
    noise = discrete(gaussian(0.25))
    step = 0.25 / STEPS
    seen = noise.apply({"w": torch.full((1000,), u, dtype=torch.float64)}, None)["w"]
    assert bool((seen / step == (seen / step).round()).all())


@pytest.mark.parametrize("batch_size", [1, 64, 1024])
def test_single_precision_enlarges_what_is_clipped_by_less_than_is_accounted_for(batch_size: int) -> None:
    from fedgauge.defenses.accounting import FLOAT32

    rng = Generator().manual_seed(0)
    size = 2**22 // batch_size
    clipped = [clip(1.0).apply({"w": 5 * torch.randn(size, generator=rng)}, None)["w"] for _ in range(batch_size)]
    assert max(float(norm({"w": t.double()})) for t in clipped) <= 1 + FLOAT32 / 4
    together, one = torch.stack(clipped), -clipped[0]
    moved: Update = {"w": together.mean(0).double() - torch.cat([one[None], together[1:]]).mean(0).double()}
    assert float(norm(moved)) <= 2 / batch_size * (1 + FLOAT32 / 2)
