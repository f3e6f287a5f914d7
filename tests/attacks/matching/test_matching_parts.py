"""The parts of the matching engine: distances, the prior, the batched optimiser; each against a known answer."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine import distances
from fedgauge.attacks.engine.distances import (
    Distance,
    InnerProductDistance,
    InnerProducts,
    absolute,
    cosine,
    gaussian_likelihood,
    laplace_likelihood,
    layer_cosine,
    likelihood,
    signs,
    squared,
    visible,
    visible_columns,
    without,
    without_products,
)
from fedgauge.attacks.engine.optimizers import Evaluate, adam, lbfgs, minimise, per_iteration_count
from fedgauge.attacks.matching import priors
from fedgauge.attacks.matching.priors import (
    LatentPrior,
    Prior,
    batch_statistics,
    gaussian,
    generator_prior,
    laplacian,
    magnitude,
    total_variation,
)
from fedgauge.client.chain import Chain, chain
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.training import local_sgd
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


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_distances_are_those_of_the_flat_vectors(one: int, other: int) -> None:
    seen, expected = an_update(one), an_update(other)
    a, b = flat(seen), flat(expected)
    assert float(cosine()(seen, expected)) == pytest.approx(1 - float(F.cosine_similarity(a, b, dim=0)), abs=1e-14)
    numpy = float(np.sum((a.numpy() - b.numpy()) ** 2) / np.sum(a.numpy() ** 2))
    assert float(squared()(seen, expected)) == pytest.approx(numpy, rel=1e-12)


@pytest.mark.parametrize("distance", [cosine(), squared()])
def test_an_update_is_at_distance_zero_of_itself(distance: Distance) -> None:
    assert abs(float(distance(an_update(0), an_update(0)))) < 1e-15
    assert float(distance(an_update(0), an_update(1))) > 0.1


def test_distances_by_hand() -> None:
    x, y = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}
    assert (float(cosine()(x, y)), float(squared()(x, y))) == (1.0, 5.0)
    opposite = {"w": torch.tensor([-3.0, 0.0])}
    assert (float(cosine()(x, opposite)), float(squared()(x, opposite))) == (2.0, 16.0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_what_scaling_does(scale: float) -> None:
    seen, expected = an_update(0), an_update(1)
    larger = {k: scale * t for k, t in expected.items()}
    assert float(cosine()(seen, larger)) == pytest.approx(float(cosine()(seen, expected)), rel=1e-12)
    both = {k: scale * t for k, t in seen.items()}
    assert float(squared()(both, larger)) == pytest.approx(float(squared()(seen, expected)), rel=1e-12)


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


# ---------------------------------------------------------------------------------------------------------- the priors


def tv(x: Tensor) -> Tensor:
    return total_variation(1.0)._anisotropic(x)


def test_total_variation_by_hand() -> None:
    x = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 2.0]])
    # |dx|: 1, 2, 0, 0; |dy|: 2, 1, 1
    assert float(tv(x)) == pytest.approx(3 / 4 + 4 / 3)
    assert float(tv(torch.full((2, 3, 5, 5), 0.7))) == 0.0


def test_total_variation_averages_over_images_and_channels() -> None:
    x = torch.rand(2, 3, 6, 7, dtype=torch.float64)
    each = [float(tv(x[b, c])) for b in range(2) for c in range(3)]
    assert float(tv(x)) == pytest.approx(float(np.mean(each)), rel=1e-12)
    a = x.numpy()
    numpy = np.abs(np.diff(a, axis=3)).mean() + np.abs(np.diff(a, axis=2)).mean()
    assert float(tv(x)) == pytest.approx(numpy, rel=1e-12)


# ------------------------------------------------------------------------------------------------------ the optimiser


def test_rates_are_cut_and_decay() -> None:
    cuts = adam(0.1, cuts=(3 / 8, 5 / 8, 7 / 8))
    assert [cuts.rate_at(i, 8) for i in range(8)] == pytest.approx([0.1] * 3 + [0.01] * 2 + [1e-3] * 2 + [1e-4])
    assert [adam(0.5, decay=0.9).rate_at(i, 3) for i in range(3)] == pytest.approx([0.5, 0.45, 0.405])
    assert adam(0.1).rate_at(99, 100) == 0.1


def slopes_of_a_path(steps: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(3, 2, 5, generator=rng, dtype=torch.float64) for _ in range(steps)]


@pytest.mark.parametrize(
    ("settings", "oracle"),
    [
        (adam(0.1, cuts=(0.5,)), torch.optim.Adam),
        (adam(0.2, decay=0.9), torch.optim.Adam),
        (adam(0.1, weight_decay=0.3, cuts=(0.5,)), torch.optim.AdamW),
    ],
    ids=["cuts", "decay", "AdamW"],
)
def test_adam_is_torchs_bit_for_bit(settings: adam, oracle: type[torch.optim.Optimizer]) -> None:
    ours, theirs = (torch.ones(3, 2, 5, dtype=torch.float64) for _ in range(2))
    moments = (torch.zeros_like(ours), torch.zeros_like(ours))
    decay = {"weight_decay": settings.weight_decay} if settings.weight_decay else {}
    optimizer = oracle([theirs], lr=1.0, **decay)  # type: ignore[call-arg]
    for n, slope in enumerate(slopes_of_a_path(12)):
        settings.step(ours, slope, moments, [n] * 3, 12)
        theirs.grad = slope
        optimizer.param_groups[0]["lr"] = settings.rate_at(n, 12)
        optimizer.step()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("settings", [adam(0.1, cuts=(0.5,), decay=0.99), adam(0.1, weight_decay=0.3)])
def test_each_problem_steps_by_its_own_count(settings: adam) -> None:
    """Problems that join later go the way they would have gone alone."""
    slopes, joins = slopes_of_a_path(12), [0, 5, 2]
    alone = []
    for k, first in enumerate(joins):
        x, moments = (
            torch.ones(1, 2, 5, dtype=torch.float64),
            (torch.zeros(1, 2, 5).double(), torch.zeros(1, 2, 5).double()),
        )
        for n in range(12 - first):
            settings.step(x, slopes[first + n][k : k + 1], moments, [n], 12)
        alone.append(x)
    x, moments = (
        torch.ones(3, 2, 5, dtype=torch.float64),
        (torch.zeros(3, 2, 5).double(), torch.zeros(3, 2, 5).double()),
    )
    for now, slope in enumerate(slopes):
        there = torch.tensor([k for k, first in enumerate(joins) if now >= first])
        part, both = x[there], (moments[0][there], moments[1][there])
        settings.step(part, slope[there], both, [now - joins[k] for k in there.tolist()], 12)
        x[there], moments[0][there], moments[1][there] = part, *both
    torch.testing.assert_close(x, torch.cat(alone), rtol=1e-14, atol=0)


def test_what_each_count_makes_of_a_function() -> None:
    like = torch.zeros(3, 2, 2)
    assert per_iteration_count(lambda n: n / 2, [4, 4, 4], like) == 2.0
    found = per_iteration_count(lambda n: n / 2, [4, 0, 1], like)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, torch.tensor([2.0, 0.0, 0.5]).view(3, 1, 1))


@pytest.mark.parametrize("arguments", [{"patience": -1}, {"tolerance": 1.0}, {"tolerance": float("nan")}])
def test_a_stall_without_sense_is_refused(arguments: dict[str, float]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name} must "):
        adam(0.1, **arguments)  # type: ignore[arg-type]


def rosenbrock(p: Tensor) -> Tensor:
    """(N, D) -> (N,): a bent valley, minimum 0 at ones."""
    return (100 * (p[:, 1:] - p[:, :-1].square()).square() + (1 - p[:, :-1]).square()).sum(1)


Function = Callable[[Tensor], Tensor]


def evaluation(function: Function, calls: list[int] | None = None) -> Evaluate:
    def evaluate(points: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        assert len(points) == len(problems)
        if calls is not None:
            for k in problems.tolist():
                calls[k] += 1
        leaf = points.clone().requires_grad_()
        value = function(leaf)
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    return evaluate


def starts(count: int, size: int) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def allowance(count: int, evaluations: int) -> Tensor:
    return torch.full((count,), evaluations)


def test_lbfgs_finds_the_minimum_of_a_bent_valley_and_counts_what_it_spends() -> None:
    calls = [0] * 16
    found = minimise(evaluation(rosenbrock, calls), starts(16, 4), allowance(16, 1000), lbfgs(plateau=0))
    low = found.f < 1e-12
    assert int(low.sum()) >= 12, "in four dimensions there is a second, local minimum near (-1, 1, 1, 1)"
    assert float((found.x[low] - 1).abs().max()) < 1e-5
    assert found.spent.tolist() == calls


def test_lbfgs_needs_as_many_steps_as_scipys_on_a_quadratic() -> None:
    from scipy.optimize import minimize

    a = torch.linspace(1, 100, 12, dtype=torch.float64)
    start = starts(1, 12)
    found = minimise(
        evaluation(lambda p: 0.5 * (a * p.square()).sum(1)), start, allowance(1, 200), lbfgs(history=10, plateau=0)
    )
    oracle = minimize(
        lambda p: (0.5 * (a.numpy() * p**2).sum(), a.numpy() * p), start[0].numpy(), jac=True, method="L-BFGS-B",
        options={"maxcor": 10, "ftol": 0, "gtol": 1e-10},
    )  # fmt: skip
    assert float(found.f) < 1e-18
    reached = minimise(
        evaluation(lambda p: 0.5 * (a * p.square()).sum(1)), start, allowance(1, 2 * oracle.nfev), lbfgs(10, 0)
    )
    assert float(reached.f) < 1e-15


@pytest.mark.parametrize("capacity", [1, 3, None])
def test_lbfgs_problems_do_not_feel_each_other(capacity: int | None) -> None:
    start = starts(5, 3)
    together = minimise(evaluation(rosenbrock), start, allowance(5, 60), lbfgs(), capacity)
    for k in range(5):
        alone = minimise(evaluation(rosenbrock), start[k : k + 1], allowance(1, 60), lbfgs())
        torch.testing.assert_close(together.x[k], alone.x[0], rtol=0, atol=1e-12)
        assert together.spent[k] == alone.spent[0]


def test_lbfgs_never_rises_and_keeps_to_its_budget() -> None:
    wild: Function = lambda p: (p.square().sum(1) + 3 * torch.sin(5 * p).sum(1)).exp()  # noqa: E731
    start = 2 * starts(8, 3)
    before = wild(start)
    for evaluations in (1, 2, 7, 40):
        found = minimise(evaluation(wild), start, allowance(8, evaluations), lbfgs())
        assert bool((found.spent <= evaluations).all())
        assert bool((found.f <= before).all())
        before = found.f


def test_lbfgs_ends_what_is_not_finite_and_goes_on_with_the_rest() -> None:
    start = starts(3, 2)
    start[1] = torch.nan
    found = minimise(evaluation(rosenbrock), start, allowance(3, 300), lbfgs(plateau=0))
    assert found.ended[1]
    assert found.spent[1] == 1
    assert float(found.f[[0, 2]].max()) < 1e-10


def test_lbfgs_steps_back_from_where_the_function_ends() -> None:
    bounded: Function = lambda p: -torch.log(1 - p.square().sum(1)) + p.sum(1)  # noqa: E731  NaN outside the unit disc
    found = minimise(evaluation(bounded), torch.zeros(2, 2, dtype=torch.float64), allowance(2, 100), lbfgs(plateau=0))
    # by hand: p = t (1, 1) with 2t / (1 - 2 t^2) = -1/1, so 2 t^2 - 2 t - 1 = 0
    torch.testing.assert_close(found.x, torch.full((2, 2), (1 - 3**0.5) / 2, dtype=torch.float64), rtol=0, atol=1e-7)


# ------------------------------------------------------------------------------------------------------ every distance

DISTANCES: dict[str, Distance] = {
    "cosine": cosine(),
    "layer_cosine": layer_cosine(0.7),
    "squared": squared(),
    "gaussian_likelihood": gaussian_likelihood(0.3),
    "absolute": absolute(),
    "laplace_likelihood": laplace_likelihood(0.3),
    "visible": visible(squared()),
    "without": without(cosine(), ("b",)),
    "without_products": without_products(cosine(), ("b",)),
    "visible_columns": visible_columns(cosine(), ("a",)),
    "signs": signs("hinge"),
}
every = pytest.mark.parametrize("name", DISTANCES)


def written(module: ModuleType, kind: type) -> set[str]:
    """The concrete classes of a kind that a module defines."""
    found = {n: c for n, c in vars(module).items() if inspect.isclass(c) and c.__module__ == module.__name__}
    return {n for n, c in found.items() if issubclass(c, kind) and not inspect.isabstract(c)}


def test_every_distance_and_prior_of_the_package_is_held_to_the_contract() -> None:
    assert set(DISTANCES) == written(distances, Distance)
    assert set(PRIORS) == written(priors, Prior)


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
    if not isinstance(distance, InnerProductDistance):
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


# --------------------------------------------------------------------------------------------------------- every prior

PRIORS: dict[str, Prior] = {
    "total_variation": total_variation(1.0, isotropic=True),
    "magnitude": magnitude(1.0),
    "batch_statistics": batch_statistics(1.0),
    "gaussian": gaussian(),
    "laplacian": laplacian(1.0, mean=0.5, scale=0.2),
    "generator_prior": generator_prior(latent=3, width=2, training=5),
}


def knowledge() -> Knowledge:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3)).eval()
    images = torch.rand(40, 1, 6, 6)
    auxiliary = Batch(images, torch.zeros(40, dtype=torch.int64))
    return Knowledge(model, chain(local_sgd(0.1)), (1, 6, 6), 3, 2, (0.4,), (0.3,), auxiliary=auxiliary)


@pytest.mark.parametrize("name", PRIORS)
def test_a_prior_is_a_finite_scalar_with_a_derivative_and_the_same_under_vmap(name: str) -> None:
    known = knowledge()
    bound = PRIORS[name].bind(known, detached_params(known.model))
    z = torch.randn(2, bound.numbers) if isinstance(bound, LatentPrior) else None
    energy = partial(bound.energy, z=z) if isinstance(bound, LatentPrior) else bound
    x = torch.randn(3, 2, 1, 6, 6, generator=generator(0)).requires_grad_()
    values = torch.stack([energy(one) for one in x])
    (slopes,) = torch.autograd.grad(values.sum(), x)
    assert values.shape == (3,)
    assert torch.isfinite(values).all()
    assert torch.isfinite(slopes).all()
    assert float(slopes.abs().max()) > 0
    torch.testing.assert_close(vmap(energy)(x), values)


def test_the_gaussian_prior_is_a_density() -> None:
    known, mean = knowledge(), torch.rand(36, dtype=torch.float64)
    root = torch.randn(36, 36, dtype=torch.float64, generator=generator(0))
    covariance = root @ root.T + torch.eye(36, dtype=torch.float64)
    energy = gaussian(1.0, mean, covariance).bind(known, {})
    oracle = torch.distributions.MultivariateNormal(mean, covariance)
    pixels = torch.rand(2, 1, 6, 6, dtype=torch.float64)
    expected = (oracle.log_prob(mean) - oracle.log_prob(pixels.flatten(1))).sum()
    assert float(energy(known.normalise(pixels))) == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(ValueError, match="auxiliary"):
        gaussian().bind(replace(known, auxiliary=None), {})


def test_batch_statistics_vanish_where_the_running_ones_are_the_batchs() -> None:
    known = knowledge()
    x = torch.randn(2, 1, 6, 6, generator=generator(0))
    conv, norm = known.model[0], known.model[1]  # type: ignore[index]  # a Sequential
    features = conv(x).transpose(0, 1).flatten(1)
    norm.running_mean.copy_(features.mean(1).detach())
    norm.running_var.copy_(features.var(1, correction=0).detach())
    energy = batch_statistics(1.0).bind(known, detached_params(known.model))
    assert float(energy(x)) < 1e-4
    assert float(energy(x + 1)) > 0.1


def test_squared_and_isotropic_total_variation_by_hand() -> None:
    x = torch.tensor([[0.0, 3.0], [4.0, 0.0]])[None, None]
    known = knowledge()
    # dx: 3, -4; dy: 4, -3
    assert float(total_variation(1.0, power=2).bind(known, {})(x)) == 9 + 16 + 16 + 9
    assert float(total_variation(1.0, isotropic=True).bind(known, {})(x)) == pytest.approx(5.0)
    with pytest.raises(ValueError, match="power"):
        total_variation(1.0, power=3)
