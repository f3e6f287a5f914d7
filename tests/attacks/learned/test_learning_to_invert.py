"""Learning To Invert: training, and what it refuses."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from fedgauge.attacks.base import Budget
from fedgauge.attacks.engine.cache import TensorCache
from fedgauge.attacks.learned.learning_to_invert import hungarian, learning_to_invert
from fedgauge.client.rng import generator
from tests.attacks.learned.small_threats import STREAMS, digits


@pytest.mark.parametrize("size", range(2, 8))
def test_outputs_are_paired_at_the_least_cost(size: int) -> None:
    costs = torch.rand(3, size, size, generator=generator("pairs", size))
    for cost, order in zip(costs, hungarian(costs), strict=True):
        least = min(float(cost[range(size), list(p)].sum()) for p in permutations(range(size)))
        assert float(cost[range(size), order].sum()) == pytest.approx(least)


def test_a_network_is_trained_once_for_all_waves_of_a_round_and_packing_changes_nothing() -> None:
    known, wave, _ = digits()
    attack = learning_to_invert(hidden=24, batch=32)
    together = attack.reconstruct(wave, known, Budget(30), STREAMS)
    assert (kept := sorted((TensorCache.own().folder).glob("image-inverter-*.safetensors")))
    apart = [attack.reconstruct(wave.of([k]), known, Budget(30), STREAMS[k : k + 1])[0] for k in range(4)]
    assert sorted((TensorCache.own().folder).glob("image-inverter-*.safetensors")) == kept
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a.x, b.x)


def test_the_next_round_s_network_begins_with_the_last_one_s_weights() -> None:
    known, wave, _ = digits()
    attack = learning_to_invert(hidden=64, batch=32, rate=1e-3)
    cold, kept = attack.advance(wave, known, Budget(120), STREAMS, [{}] * 4)
    moved = replace(
        wave, params={k: t + 1e-3 * torch.randn(t.shape, generator=generator(k)) for k, t in wave.params.items()}
    )
    warm, _ = attack.advance(moved, known, Budget(120), STREAMS, kept)
    anew, _ = attack.advance(moved, known, Budget(30), STREAMS, [{}] * 4)
    assert warm[0].iterations == anew[0].iterations == 30
    assert warm[0].objective <= cold[0].objective * 1.02
    assert warm[0].objective < anew[0].objective * 0.95


def test_training_that_runs_out_of_time_says_so() -> None:
    known, wave, _ = digits()
    (found, *_) = learning_to_invert(hidden=24, batch=32).reconstruct(wave, known, Budget(10**6, seconds=0.2), STREAMS)
    assert found.status == "out_of_budget" and found.reason
    assert found.x is not None


def test_a_network_for_another_batch_size_is_not_the_start() -> None:
    """By label, a network has the same shape for every batch size."""
    attack = learning_to_invert(hidden=8, batch=16, by_label=True)
    known, wave, _ = digits(batch_size=1)
    _, kept = attack.advance(wave, known, Budget(8), STREAMS, [{}] * 4)
    other, theirs, _ = digits(batch_size=2)
    found, _ = attack.advance(theirs, other, Budget(8), STREAMS, kept)
    assert [r.iterations for r in found] == [8] * 4, "the whole budget, from scratch"
