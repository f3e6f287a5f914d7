"""Distances: numbers by hand, and what every one of them promises."""

import inspect
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from fedgauge.attacks.engine import gradient_distances as distances
from fedgauge.attacks.engine.gradient_distances import (
    Distance,
    InnerProducts,
    cosine,
    each,
    gaussian_likelihood,
    kept_by_size,
    laplace_likelihood,
    largest,
    likelihood,
    rounding_likelihood,
    signs,
    squared,
    visible,
    visible_columns,
    without,
)
from fedgauge.client.chain import Chain, chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Update
from fedgauge.defenses.clip import clip
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian as gaussian_noise
from fedgauge.defenses.noise import laplace
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign


def an_update(seed: int) -> Update:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 4), "b": (4,), "c": (2, 1, 3, 3)}
    return {k: torch.randn(s, generator=rng, dtype=torch.float64) for k, s in shapes.items()}


def flat(update: Update) -> Tensor:
    return torch.cat([t.flatten() for t in update.values()])


def test_dropped_entries_are_at_most_as_large_as_the_smallest_kept_one() -> None:
    """|3 - 2.5|^2 + (3 - 2)^2 in the first tensor; where all were dropped, the smallest of the update counts: (5 - 2)^2."""
    seen = {"a": torch.tensor([3.0, 0.0, -2.0, 0.0]), "b": torch.zeros(2)}
    expected = {"a": torch.tensor([2.5, 1.0, -2.0, -3.0]), "b": torch.tensor([5.0, -1.0])}
    assert float(kept_by_size(0.1)(seen, expected)) == pytest.approx((0.25 + 1 + 9) / (2 * 0.1**2 * 13))
    assert float(kept_by_size()({"b": torch.zeros(2)}, {"b": torch.zeros(2)})) == 0


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_distances_are_those_of_the_flat_vectors(one: int, other: int) -> None:
    seen, expected = an_update(one), an_update(other)
    a, b = flat(seen), flat(expected)
    assert float(cosine()(seen, expected)) == pytest.approx(1 - float(F.cosine_similarity(a, b, dim=0)), abs=1e-14)
    numpy = float(np.sum((a.numpy() - b.numpy()) ** 2) / np.sum(a.numpy() ** 2))
    assert float(squared()(seen, expected)) == pytest.approx(numpy, rel=1e-12)


@pytest.mark.parametrize("distance", [cosine(), squared()])
@pytest.mark.parametrize("which", ["seen", "expected", "both"])
def test_a_zero_update_has_a_finite_distance_and_derivative(distance: Distance, which: str) -> None:
    zero = {k: torch.zeros_like(t) for k, t in an_update(0).items()}
    seen = zero if which in {"seen", "both"} else an_update(0)
    expected = zero if which in {"expected", "both"} else an_update(1)
    leaves = {k: t.clone().requires_grad_() for k, t in expected.items()}
    value = distance(seen, leaves)
    value.backward()
    assert torch.isfinite(value)
    assert all(t.grad is not None and torch.isfinite(t.grad).all() for t in leaves.values())


DISTANCES: dict[str, Distance] = {
    "cosine": cosine(),
    "squared": squared(),
    "gaussian_likelihood": gaussian_likelihood(0.3),
    "laplace_likelihood": laplace_likelihood(0.3),
    "rounding_likelihood": rounding_likelihood(3),
    "kept_by_size": kept_by_size(),
    "largest": largest(squared(), 0.4),
    "each": each(cosine()),
    "visible": visible(squared()),
    "without": without(cosine(), ("b",)),
    "visible_columns": visible_columns(cosine(), ("a",)),
    "signs": signs("hinge"),
}
every = pytest.mark.parametrize("name", DISTANCES)


def written(module: ModuleType, kind: type) -> set[str]:
    """The concrete classes of a kind that a module defines."""
    found = {n: c for n, c in vars(module).items() if inspect.isclass(c) and c.__module__ == module.__name__}
    return {n for n, c in found.items() if issubclass(c, kind) and not inspect.isabstract(c)}


def test_every_distance_of_the_package_is_held_to_the_contract() -> None:
    assert set(DISTANCES) == written(distances, Distance)


@every
def test_a_distance_is_lowest_at_the_update_itself_and_stationary_there(name: str) -> None:
    seen = an_update(0)
    leaves = {k: t.clone().requires_grad_() for k, t in seen.items()}
    value = DISTANCES[name](seen, leaves)
    assert value.shape == ()
    slopes = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    assert all(float(g.abs().max()) < 1e-12 for g in slopes)
    for seed in range(1, 6):
        assert float(DISTANCES[name](seen, an_update(seed))) > float(value.detach()) + 1e-3


@every
def test_a_distance_means_the_same_under_vmap(name: str) -> None:
    pairs = [(an_update(i), an_update(i + 10)) for i in range(3)]
    stacked = [{k: torch.stack([p[side][k] for p in pairs]) for k in pairs[0][0]} for side in (0, 1)]
    together = vmap(DISTANCES[name])(*stacked)
    torch.testing.assert_close(together, torch.stack([DISTANCES[name](*pair) for pair in pairs]))


@every
def test_a_distance_by_products_is_the_distance(name: str) -> None:
    distance = DISTANCES[name]
    if not distance.by_products:
        return
    pairs = [(an_update(i), an_update(i + 10)) for i in range(3)]
    plain = torch.stack([distance(*pair) for pair in pairs])
    products = {
        k: InnerProducts(
            *(torch.stack([(p[i][k] * p[j][k]).sum() for p in pairs]) for i, j in ((0, 1), (0, 0), (1, 1)))
        )
        for k in pairs[0][0]
    }
    torch.testing.assert_close(distance.of(products), plain)
    if distance.joint:
        rows = [torch.stack([flat(p[side]) for p in pairs]) for side in (0, 1)]
        torch.testing.assert_close(distance.between(*([t] for t in rows), rows[0].square().sum(1)), plain)


def test_only_the_largest_entries_are_compared() -> None:
    seen = {"a": torch.tensor([[4.0, -3.0], [0.5, 1.0]]), "b": torch.tensor([0.1, -0.2])}
    other = {"a": torch.tensor([[4.0, 0.0], [9.0, 9.0]]), "b": torch.tensor([7.0, -0.2])}
    # of half the entries 4, -3 and -0.2 are left, and one of them is off by 3
    assert float(largest(squared(), 0.5)(seen, other)) == pytest.approx(9 / 25.04)
    assert float(largest(squared(), 1.0)(seen, other)) == pytest.approx(float(squared()(seen, other)))


def test_a_likelihood_is_the_density_of_its_noise() -> None:
    seen, expected = an_update(0), an_update(1)
    a, b = flat(seen), flat(expected)
    normal = torch.distributions.Normal(b, 0.3).log_prob(a).sum() - torch.distributions.Normal(b, 0.3).log_prob(b).sum()
    assert float(gaussian_likelihood(0.3)(seen, expected)) == pytest.approx(-float(normal), rel=1e-12)
    laplace = torch.distributions.Laplace(b, 0.3)
    assert float(laplace_likelihood(0.3)(seen, expected)) == pytest.approx(
        -float((laplace.log_prob(a) - laplace.log_prob(b)).sum()), rel=1e-12
    )
    half = {k: t / 2 for k, t in expected.items()}
    assert float(gaussian_likelihood(0.3, 0.5)(seen, half)) == pytest.approx(-float(normal), rel=1e-12)


def test_the_chain_chooses_the_likelihood() -> None:
    sgd = local_sgd(0.1)
    chains: dict[Distance, Chain] = {
        cosine(): chain(sgd),
        gaussian_likelihood(0.1 * 0.2): chain(gaussian_noise(0.2), sgd),
        gaussian_likelihood(0.2): chain(sgd, gaussian_noise(0.2)),
        laplace_likelihood(0.2): chain(sgd, laplace(0.2)),
        visible(gaussian_likelihood(0.2, 0.25)): chain(sgd, gaussian_noise(0.2), mask(0.25)),
        visible(gaussian_likelihood(0.2)): chain(sgd, gaussian_noise(0.2), mask(0.25, seed=1)),
        visible(cosine()): chain(sgd, prune(0.1)),
        signs("hinge"): chain(sgd, sign()),
    }
    for distance, links in chains.items():
        assert likelihood(links.update_distribution, 1) == distance, links
    assert likelihood(chain(sgd, sign()).update_distribution, 3) == signs("tanh")
    assert likelihood(chain(gaussian_noise(0.2), clip(1.0), sgd).update_distribution, 1) == cosine(), (
        "not known in closed form"
    )


def test_noise_of_several_steps_adds_up_as_a_sum_of_draws_does() -> None:
    links = chain(gaussian_noise(0.3), local_sgd(0.1, steps=4))
    zero: Update = {"w": torch.zeros(20000)}
    seen = links(lambda params, batch, rng: zero)(zero, Batch(torch.zeros(1), torch.zeros(1)), generator(0))
    known = links.update_distribution
    assert known is not None
    assert known.sigma == pytest.approx(0.1 * 0.3 * 2)
    assert float(seen["w"].std()) == pytest.approx(known.sigma, rel=0.02)
