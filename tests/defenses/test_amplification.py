"""Many rounds' amplified epsilons beside dp-accounting's own composition, and noise too little for any grid."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import common, pld_pmf

from fedgauge.client.chain import Chain, chain
from fedgauge.client.federation import Federation
from fedgauge.client.training import local_sgd
from fedgauge.client.transforms import Link, per_example
from fedgauge.defenses.accounting import Accountant, PrivacySpent, mechanism, privacy_statement
from fedgauge.defenses.amplification import ADDED, GRID, LEAST, _rounds_of, sampled_delta, sampled_epsilon
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian, laplace

DELTA = 1e-5


def of_the_library(part: float, noise: float, rounds: int, delta: float) -> float:
    """By dp-accounting alone, of all rounds at once."""
    most = 1.0
    while sampled_delta(np.array([most]), part, noise)[0] > LEAST:
        most *= 2
    deltas = sampled_delta(np.linspace(-most, most, 2 * GRID + 1), part, noise)
    one = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(most / GRID, -GRID, GRID, deltas)
    with np.errstate(over="ignore"):
        return float(one.self_compose(rounds).get_epsilon_for_delta(delta))


@pytest.fixture
def afresh() -> None:
    """Nothing of other tests is known."""
    _rounds_of.cache_clear()
    sampled_epsilon.cache_clear()


@pytest.mark.parametrize(("part", "noise"), [(64 / 3000, 0.6), (0.99, 5.0)])
def test_rounds_one_by_one_have_the_epsilons_of_all_at_once(afresh: None, part: float, noise: float) -> None:
    told = [sampled_epsilon(part, noise, n, DELTA) for n in range(1, 69)]
    assert told == sorted(told)
    for rounds in (1, 2, 3, 65, 66, 67, 68):
        whole = of_the_library(part, noise, rounds, DELTA)
        assert told[rounds - 1] == pytest.approx(whole, rel=1e-6), rounds
    sampled_epsilon.cache_clear()
    assert sampled_epsilon(part, noise, 7, DELTA) == pytest.approx(told[6], rel=1e-6), (
        "in whatever order they are asked for"
    )


def test_an_epsilon_does_not_depend_on_what_was_asked_before(afresh: None) -> None:
    """With a small delta, an export, which asks round by round, and a page, which asks once, differed by 1 %."""
    one_by_one = [sampled_epsilon(0.02, 0.7, n, 1e-12) for n in range(1, 21)]
    for rounds in (20, 7, 19):
        _rounds_of.cache_clear()
        sampled_epsilon.cache_clear()
        assert sampled_epsilon(0.02, 0.7, rounds, 1e-12) == one_by_one[rounds - 1], rounds


def test_one_round_more_is_not_composed_anew(afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[int] = []
    original: Any = common.self_convolve

    def counted(probs: Any, rounds: int, tail: float) -> Any:
        composed.append(rounds)
        return original(probs, rounds, tail)

    monkeypatch.setattr(common, "self_convolve", counted)
    for rounds in range(1, 133):
        sampled_epsilon(0.01, 0.7, rounds, DELTA)
    assert composed == list(range(ADDED, 133, ADDED))


# -------------------------------------------------------------------------------------------------- next to no noise


def accountant(links: Chain) -> Accountant:
    return Accountant(mechanism(links, 8), 8, DELTA, 100)


@pytest.mark.parametrize("noise", [gaussian, laplace])
@pytest.mark.parametrize("each", [True, False])
def test_the_less_noise_the_larger_the_epsilon_down_to_none(noise: Callable[[float], Link], each: bool) -> None:
    """Too little noise for the grid was an OverflowError, or an epsilon of 0."""
    found = []
    for exponent in (0, 3, 4, 5, 6, 60, 154, 160, 300, 308):
        bounded = per_example(clip(1.0)) if each else clip(1.0)
        links = chain(bounded, local_sgd(0.1), noise(10.0**-exponent))
        found.append(accountant(links).spent(2, 1000))
    for of in ("record", "client"):
        values = [getattr(spent, of) for spent in found]
        assert values == sorted(values) and values[0] > 0, of
        assert values[-2:] == [math.inf, math.inf], of
        assert math.isfinite(values[3]), of


def test_a_clip_and_a_rate_whose_product_is_zero_let_nothing_move() -> None:
    """It was a ZeroDivisionError."""
    spent = accountant(chain(clip(1e-200), local_sgd(1e-200), gaussian(1.0))).spent(2, 1000)
    assert spent.record == spent.client == 0.0


def test_a_run_with_next_to_no_noise_is_told_that_no_epsilon_holds(make_federation: Callable[..., Federation]) -> None:
    """The statement that pages and reports show was a traceback."""
    links = [{"use": "clip", "max_norm": 1.0}, {"use": "local_sgd", "rate": 0.1}, {"use": "gaussian", "sigma": 1e-200}]
    found = privacy_statement(make_federation(model={"use": "mlp", "hidden": [2]}, chain=links), {0: 2})
    assert (found.record, found.client, found.state) == (None, None, "none")
    assert found.words.startswith("no epsilon: the noise is next to nothing")


def test_clients_alike_are_accounted_once(
    make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 clients in a ledger of a third of a megabyte cost a page twenty seconds."""
    asked: list[tuple[int, int]] = []
    original = Accountant.spent

    def counted(self: Accountant, rounds: int, shard: int) -> PrivacySpent:
        asked.append((rounds, shard))
        return original(self, rounds, shard)

    monkeypatch.setattr(Accountant, "spent", counted)
    links = [{"use": "clip", "max_norm": 1.0}, {"use": "local_sgd", "rate": 0.1}, {"use": "gaussian", "sigma": 1.0}]
    federation = make_federation(model={"use": "mlp", "hidden": [2]}, chain=links)
    found = privacy_statement(federation, {client: 1 + client % 2 for client in range(5000)})
    assert found == privacy_statement(federation, {0: 2, 4999: 2})
    assert len(asked) <= 8, len(asked)
