"""Amplified epsilons do not fall with rounds, and noise too little for any grid gives none."""

import math
from collections.abc import Callable

import pytest

from fedgauge.client.chain import chain
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import local_sgd
from fedgauge.client.transforms import Link, per_example
from fedgauge.defenses.accounting import Accountant, PrivacySpent, mechanism, privacy_statement
from fedgauge.defenses.amplification import sampled_epsilon
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian, laplace

DELTA = 1e-5


def spent_of(*links: Link) -> PrivacySpent:
    return Accountant(mechanism(chain(*links), 8), 8, DELTA, 100).spent(2, 1000)


@pytest.mark.parametrize(("part", "noise"), [(64 / 3000, 0.6), (0.99, 5.0)])
def test_epsilons_rise_with_the_rounds(part: float, noise: float) -> None:
    epsilons = [sampled_epsilon(part, noise, n, DELTA) for n in (1, 2, 3, 17, 65, 66)]
    assert epsilons == sorted(set(epsilons))


@pytest.mark.parametrize("noise", [gaussian, laplace])
@pytest.mark.parametrize("each", [True, False])
def test_the_less_noise_the_larger_the_epsilon_down_to_none(noise: Callable[[float], Link], each: bool) -> None:
    bounded = per_example(clip(1.0)) if each else clip(1.0)
    found = [spent_of(bounded, local_sgd(0.1), noise(10.0**-n)) for n in (0, 3, 4, 5, 6, 60, 154, 160, 300, 308)]
    for of in ("record", "client"):
        values = [getattr(spent, of) for spent in found]
        assert values == sorted(values) and values[0] > 0, of
        assert values[-2:] == [math.inf, math.inf], of
        assert math.isfinite(values[3]), of


def test_a_clip_and_a_rate_whose_product_is_zero_let_nothing_move() -> None:
    assert spent_of(clip(1e-200), local_sgd(1e-200), gaussian(1.0)) == PrivacySpent(0.0, 0.0)


def test_a_run_with_next_to_no_noise_has_no_epsilon(make_federation: Callable[..., Federation]) -> None:
    links = [{"use": "clip", "max_norm": 1.0}, {"use": "local_sgd", "rate": 0.1}, {"use": "gaussian", "sigma": 1e-200}]
    found = privacy_statement(make_federation(model={"use": "mlp", "hidden": [2]}, chain=links), {0: 2})
    assert (found.record, found.client) == (None, None)
