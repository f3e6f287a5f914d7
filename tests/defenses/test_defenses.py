"""Each defense on inputs whose answer is known on paper, and its draws against the distribution it names."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch, Update, norm
from fedgauge.defenses.clip import clip
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian, laplace
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign
from tests.tensors import seeded


def vector(*entries: float) -> Update:
    return {"w": torch.tensor(entries, dtype=torch.float64)}


# --------------------------------------------------------------------------------------------------------------- clip


@pytest.mark.parametrize("max_norm", [5.0, 5.1, 1e30])
def test_clip_leaves_a_small_update_as_it_is_to_the_bit(max_norm: float) -> None:
    assert clip(max_norm).apply(vector(3.0, 4.0), None)["w"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [1e-3, 1e-4])
def test_clip_bounds_half_precision_as_close_as_single(dtype: torch.dtype, value: float) -> None:
    """Squares below 2^-24 vanish in float16, and rounding up after the clip may double float16's smallest entries."""
    update = {"w": torch.full((1_000_000,), value, dtype=dtype)}
    clipped = clip(0.04).apply(update, None)["w"]
    assert float(clipped.double().norm()) == pytest.approx(0.04, rel=1e-5)
    one = per_example(clip(0.04))(lambda params, batch, rng: {k: t * batch.x.sum() for k, t in update.items()})
    both = one({}, Batch(torch.ones(2, 1, dtype=dtype), torch.zeros(2)), None)["w"]
    assert float(both.double().norm()) == pytest.approx(0.04, rel=1e-5), "their mean, too, is rounded behind the noise"


@given(arrays(np.float64, 5, elements=st.floats(-1e6, 1e6)), st.floats(1e-3, 1e3))
def test_clip_bounds_the_norm_and_keeps_the_direction(entries: np.ndarray, max_norm: float) -> None:
    update = {"w": torch.from_numpy(entries)}
    clipped, size = clip(max_norm).apply(update, None)["w"].numpy(), float(np.linalg.norm(entries))
    assert np.linalg.norm(clipped) <= max_norm * (1 + 1e-12)
    assert clipped == pytest.approx(entries * min(1.0, max_norm / size) if size else entries, rel=1e-12)


# -------------------------------------------------------------------------------------------------------------- prune


def test_prune_keeps_the_largest_of_each_tensor() -> None:
    update = {"w": torch.tensor([[0.1, -3.0], [2.0, 0.5]]), "b": torch.tensor([0.01, -0.02])}
    pruned = prune(0.5).apply(update, None)
    assert pruned["w"].tolist() == [[0.0, -3.0], [2.0, 0.0]]
    assert pruned["b"].tolist() == pytest.approx([0.0, -0.02])


def test_prune_keeps_at_least_one_entry_and_all_of_a_tie() -> None:
    assert prune(0.01).apply(vector(1.0, -2.0, 0.5), None)["w"].tolist() == [0.0, -2.0, 0.0]
    assert prune(0.01).apply(vector(2.0, -2.0, 0.5), None)["w"].tolist() == [2.0, -2.0, 0.0]
    assert prune(1.0).apply(vector(0.0, -2.0, 0.5), None)["w"].tolist() == [0.0, -2.0, 0.5]


@given(st.integers(1, 60), st.floats(0.01, 1.0), st.integers(0, 1000))
def test_prune_keeps_its_part(n: int, keep: float, seed: int) -> None:
    entries = torch.randn(n, generator=seeded(seed), dtype=torch.float64)
    pruned = prune(keep).apply({"w": entries}, None)["w"]
    kept = max(1, round(keep * n))
    largest = np.argsort(-np.abs(entries.numpy()))[:kept]
    expected = np.zeros(n)
    expected[largest] = entries.numpy()[largest]
    assert pruned.tolist() == expected.tolist()


# --------------------------------------------------------------------------------------------------------------- sign


def test_sign_is_one_bit_an_entry() -> None:
    assert sign(0.5).apply(vector(-1e-30, 0.0, 7.0), None)["w"].tolist() == [-0.5, 0.0, 0.5]


def test_the_stand_in_for_the_sign_by_hand() -> None:
    # u / (|u| + mean |u|), mean |u| = 2
    soft = sign(2.0).mean(lambda params, batch, rng: vector(-2.0, 0.0, 4.0))({}, None, None)["w"]  # type: ignore[arg-type]
    assert soft.tolist() == pytest.approx([-1.0, 0.0, 4 / 3], rel=1e-9)


# --------------------------------------------------------------------------------------------------------------- mask


def ones(n: int = 100_000) -> Update:
    return {"w": torch.ones(n, dtype=torch.float64), "b": torch.ones(n, dtype=torch.float64)}


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("seed", [None, 7])
def test_mask_keeps_each_entry_with_its_probability(keep: float, seed: int | None) -> None:
    masked = mask(keep, seed).apply(ones(), seeded())
    for t in masked.values():
        assert set(t.tolist()) <= {0.0, 1.0}, "a kept entry is not rescaled"
        assert stats.binomtest(int(t.sum()), len(t), keep).pvalue > 1e-4
    agreement = float((masked["w"] == masked["b"]).double().mean())
    assert agreement == pytest.approx(keep**2 + (1 - keep) ** 2, abs=0.01), "tensors have masks of their own"


def test_a_known_mask_is_one_for_all_rounds_and_clients() -> None:
    drawn = [mask(0.5, seed=3).apply(ones(), seeded(client))["w"] for client in range(3)]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], mask(0.5, seed=4).apply(ones(), None)["w"])
    # an entry of zero does not move the mask
    zero_first = {"w": torch.cat([torch.zeros(1, dtype=torch.float64), ones()["w"][1:]]), "b": ones()["b"]}
    assert torch.equal(mask(0.5, seed=3).apply(zero_first, None)["w"][1:], drawn[0][1:])


def test_a_secret_mask_is_fresh_each_time() -> None:
    rng = seeded()
    first, second = (mask(0.5).apply(ones(), rng)["w"] for _ in range(2))
    assert float((first == second).double().mean()) == pytest.approx(0.5, abs=0.01)


# -------------------------------------------------------------------------------------------------------------- noise

N = 200_000
NOISES = [
    (gaussian(0.5), stats.norm(0, 0.5)),
    (laplace(0.5), stats.laplace(0, 0.5)),
]


@pytest.mark.parametrize(("noise", "law"), NOISES, ids=["gaussian", "laplace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_follows_its_law(noise: Any, law: Any, dtype: torch.dtype) -> None:
    update = {"w": torch.full((N,), 2.0, dtype=dtype), "b": torch.full((N,), -1.0, dtype=dtype)}
    noisy = noise.apply(update, seeded())
    drawn = {k: (noisy[k] - update[k]).double().numpy() for k in update}
    for draws in drawn.values():
        assert abs(draws.mean()) < 5 * law.std() / N**0.5
        # the sample variance errs by sqrt((kurtosis - 1) / n), kurtosis 3 + excess
        spread = ((2 + law.stats("k")) / N) ** 0.5
        assert abs(draws.var() / law.var() - 1) < 5 * spread
        assert stats.kstest(draws, law.cdf).pvalue > 1e-4
    assert abs(np.corrcoef(drawn["w"], drawn["b"])[0, 1]) < 5 / N**0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_laplace_draw_is_finite(dtype: torch.dtype) -> None:
    drawn = laplace(1.0).apply({"w": torch.zeros(3_000_000, dtype=dtype)}, seeded())["w"]
    assert drawn.dtype == dtype
    assert torch.isfinite(drawn).all()
    assert float(norm({"w": drawn})) == pytest.approx((2 * 3_000_000) ** 0.5, rel=0.01)
