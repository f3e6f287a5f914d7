"""Canaries: the exact curve of normal distributions, and estimates that come out at a known epsilon."""

import math

import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgauge.attacks.membership.canary_epsilon import cosines, gaussian_epsilon
from fedgauge.client.rng import generator
from fedgauge.client.update import Update, canary, norm
from fedgauge.defenses.noise import gaussian
from tests.attacks.refusals import check_named
from tests.theory.canary_world import combine_iterates, empirical_epsilon, normal_epsilon

LIKE: Update = {"w": torch.zeros(64, 100), "b": torch.zeros(100)}


@given(mean=st.floats(-3, 3), deviation=st.floats(0.5, 2.0), epsilon=st.floats(0.1, 4.0))
def test_unequal_variances_against_the_integral(mean: float, deviation: float, epsilon: float) -> None:
    """delta(epsilon) = integral of max(p - e^epsilon q, 0), either way round, by quadrature."""
    p, q = scipy.stats.norm(mean, deviation), scipy.stats.norm()
    grid = torch.linspace(-30, 30, 20_001, dtype=torch.float64).numpy()

    def delta_of(one: object, other: object) -> float:
        above = one.pdf(grid) - math.exp(epsilon) * other.pdf(grid)  # type: ignore[attr-defined]
        return float(scipy.integrate.trapezoid(above.clip(min=0), grid))

    delta = max(delta_of(p, q), delta_of(q, p))
    if 1e-7 < delta < 1:
        assert normal_epsilon(mean, deviation, delta) == pytest.approx(epsilon, rel=1e-3, abs=1e-3)


def test_the_same_distribution_gives_nothing_away() -> None:
    assert normal_epsilon(0.0, 1.0, 1e-5) == gaussian_epsilon(0.0, 1e-5) == 0


@given(ratio=st.floats(0.01, 100), delta=st.floats(1e-12, 0.5))
def test_equal_variances_are_the_special_case(ratio: float, delta: float) -> None:
    assert gaussian_epsilon(ratio, delta) == pytest.approx(normal_epsilon(ratio, 1.0, delta), rel=1e-9, abs=1e-9)


def test_canaries_are_unit_updates_in_all_directions() -> None:
    drawn = [canary(LIKE, generator("canary", i)) for i in range(40)]
    assert all(one.keys() == LIKE.keys() and one["w"].shape == (64, 100) for one in drawn)
    assert [float(norm(one)) for one in drawn] == pytest.approx([1.0] * 40, rel=1e-5)
    others = torch.cat([cosines(drawn[0], drawn[1:]), cosines(drawn[1], drawn[2:])]) * math.sqrt(6500)
    assert scipy.stats.kstest(others.numpy(), "norm").pvalue > 0.01, "the null distribution is N(0, 1/d)"


def test_a_cosine_is_one_with_itself() -> None:
    one = canary(LIKE, generator("canary"))
    opposite = {k: -3 * t for k, t in one.items()}
    assert cosines(one, [one, opposite]).tolist() == pytest.approx([1.0, -1.0], rel=1e-5)
    check_named("zero", lambda: cosines(LIKE, [one]))


def audited(sigma: float, rounds: int, run: int, count: int = 60) -> tuple[float, float]:
    """Final model and all iterates, of canaries through the noise that the package adds."""
    rng = generator("audited", sigma, rounds, run)
    planted = [canary(LIKE, rng) for _ in range(count)]
    total = {k: torch.stack([one[k] for one in planted]).sum(0) for k in LIKE}
    released = [gaussian(sigma).apply(total, rng) for _ in range(rounds)]
    final = {k: torch.stack([r[k] for r in released]).sum(0) for k in LIKE}
    statistics = (cosines(final, planted), combine_iterates([cosines(r, planted) for r in released]))
    one, other = (empirical_epsilon(found, 6500, 1e-5, equal=True) for found in statistics)
    return one, other


@pytest.mark.parametrize(("sigma", "rounds"), [(1.0, 1), (2.0, 1), (4.0, 4)])
def test_the_estimate_lies_about_the_true_epsilon(sigma: float, rounds: int) -> None:
    truth = gaussian_epsilon(math.sqrt(rounds) / sigma, 1e-5)
    found = torch.tensor([audited(sigma, rounds, run) for run in range(30)])
    for runs in found.T:
        error = float(runs.std() / math.sqrt(30))
        assert abs(float(runs.mean()) - truth) < 3 * error
        assert error < 0.1 * truth


def test_too_little_noise_is_found_out() -> None:
    """A mechanism that promises sigma = 2 and adds 1."""
    promised = gaussian_epsilon(1 / 2, 1e-5)
    assert min(audited(1.0, 1, run)[0] for run in range(5)) > 1.3 * promised


def test_too_few_canaries_are_refused() -> None:
    for cosines_of in (torch.ones(1), torch.tensor([0.1, math.nan])):
        with pytest.raises(ValueError, match="canaries"):
            empirical_epsilon(cosines_of, 10, 1e-5)
