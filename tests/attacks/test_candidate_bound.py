"""What is called a bound holds for images that are not Gaussian; what is called an estimate does not."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Generator, Tensor
from torch.func import vmap

from fedgauge.attacks import candidate_bound as bounds
from fedgauge.attacks.base import Budget, Knowledge, Wave
from fedgauge.attacks.candidate_bound import bayes_error, candidate_bound
from fedgauge.attacks.gaussian_prior import ClassPrior, class_priors
from fedgauge.attacks.grading.baselines import class_mean_image, mean_image, random_image
from fedgauge.attacks.limits import bayes_limit, observed
from fedgauge.client.chain import chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.transforms import UpdateDistribution
from fedgauge.client.update import Batch
from fedgauge.defenses.noise import gaussian, laplace
from tests.theory.gaussian_world import covariance_of, gaussian_of, van_trees

World = Callable[[int, Generator], Batch]
LINKS = {
    "normal": lambda width: chain(gaussian(width), local_sgd(1.0)),
    "laplace": lambda width: chain(laplace(width), local_sgd(1.0)),
}


def images(x: Tensor, y: Tensor) -> Batch:
    return Batch(x.view(len(x), 1, 2, 2).float(), y)


def labels(count: int, rng: Generator) -> Tensor:
    return torch.randint(2, (count,), generator=rng)


def two_points(count: int, rng: Generator) -> Batch:
    """One of two images in each class."""
    y, which = labels(count, rng), torch.randint(2, (count,), generator=rng)
    return images(torch.tensor([[[0.1] * 4, [0.9] * 4], [[0.0, 1, 0, 1], [1, 0, 1, 0]]])[y, which], y)


def mixture(count: int, rng: Generator) -> Batch:
    """Narrow heaps around four images of each class."""
    y, which = labels(count, rng), torch.randint(4, (count,), generator=rng)
    heaps = torch.rand(2, 4, 4, generator=generator("heaps"))
    return images((heaps[y, which] + 0.02 * torch.randn(count, 4, generator=rng)).clamp(0, 1), y)


def uniform(count: int, rng: Generator) -> Batch:
    return images(torch.rand(count, 4, generator=rng), labels(count, rng))


def sparse(count: int, rng: Generator) -> Batch:
    """One bright pixel, of any brightness; in the other class two."""
    y = labels(count, rng)
    x = torch.zeros(count, 4)
    for k in range(2):
        place = torch.randint(4, (count,), generator=rng)
        x[torch.arange(count), place] = torch.rand(count, generator=rng) * ((y == 1) | (k == 0))
    return images(x, y)


def posterior_means(known: Knowledge, wave: Wave, y: Tensor, of: Batch) -> Tensor:
    """The Bayes attack with many draws of the true prior as its prior: the strongest that knows the distribution."""
    forward, noise = observed(known)
    one = vmap(lambda x, y: forward(wave.params, Batch(x[None], y[None]), None))
    expected, seen = one(of.x, of.y), wave.update
    rows = torch.cat([t.flatten(1) for t in expected.values()], 1).double()
    points = torch.cat([t.flatten(1) for t in seen.values()], 1).double()
    width = noise.sigma or noise.scale
    fits = bounds._log_likelihood(points / width, rows / width, noise)
    fits = fits.masked_fill(of.y[None] != y[:, None], -math.inf)
    return (fits.softmax(1) @ of.x.flatten(1).double()).view(len(y), *of.x.shape[1:])


@pytest.mark.product
@pytest.mark.parametrize("noise", ["normal", "laplace"])
@pytest.mark.parametrize("world", [two_points, mixture, uniform, sparse])
@pytest.mark.parametrize("width", [0.03, 0.2, 1.0])
def test_no_attack_or_baseline_exceeds_the_bound(
    world: World, noise: str, width: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "LEAST", 0.0)
    model = mlp((1, 2, 2), 2, hidden=(3,), activation="tanh")
    params, count = detached_params(model), 600
    known = Knowledge(model, LINKS[noise](width), (1, 2, 2), 2, 1, (0.0,), (1.0,))
    bound = [
        candidate_bound(replace(known, auxiliary=world(60, generator("auxiliary", k))), params, generator("bound", k))
        for k in range(4)  # it holds on average over what auxiliary images are drawn
    ]
    private, rng = world(count, generator("private")), generator("noise")
    client = known.chain(gradient(model))
    each = [client(params, Batch(x[None], y[None]), rng) for x, y in zip(private.x, private.y, strict=True)]
    wave = Wave(1, tuple(range(count)), params, {k: torch.stack([u[k] for u in each]) for k in each[0]})
    told = replace(known, auxiliary=world(400, generator("known")), labels=private.y[:, None])
    streams = [lambda *purpose, k=k: generator("guess", k, *purpose) for k in range(count)]
    guesses = {
        type(guess).__name__: torch.cat(
            [r.x for r in guess.reconstruct(wave, told, Budget(1), streams) if r.x is not None]
        )
        for guess in (mean_image(), class_mean_image(), random_image())
    }
    assert told.auxiliary is not None
    guesses["bayes"] = posterior_means(known, wave, private.y, told.auxiliary)
    best = math.inf
    for name, x in guesses.items():
        errors = (x - private.x).double().square().flatten(1).mean(1)
        margin = 3 * float(errors.std()) / count**0.5 + 2 * float(torch.tensor(bound).std())
        assert float(errors.mean()) + margin + 1e-9 >= sum(bound) / 4, name
        best = min(best, float(errors.mean()))
    # of two images in a class all are candidates, so that the bound is what the best attack gets
    if world is two_points:
        assert sum(bound) / 4 == pytest.approx(best, rel=0.15, abs=0.004)


def two_point_error(density: Callable[[float], float], shift: float) -> float:
    """Of x = +1 or -1 seen as +shift or -shift in noise: the mean of 1 - tanh(half the log likelihood ratio)^2."""

    def left(z: float) -> float:
        up, down = density(z - shift), density(z + shift)
        return 2 * up * down / (up + down) if up + down > 0 else 0.0

    return float(scipy.integrate.quad(left, -30, 30, points=[-shift, shift], limit=400)[0])


@pytest.mark.product
@pytest.mark.parametrize("shift", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(("noise", "law"), [
    (UpdateDistribution(sigma=0.7), scipy.stats.norm.pdf),
    (UpdateDistribution(scale=0.7), scipy.stats.laplace.pdf),
])  # fmt: skip
def test_the_error_of_two_candidates_is_the_integral(
    shift: float, noise: UpdateDistribution, law: Callable[[float], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "DRAWS", 4000)
    updates, x = torch.tensor([[shift], [-shift]]) * 0.7, torch.tensor([[1.0], [-1.0]])
    found = bayes_error(updates, x, noise, generator("two"))
    assert found == pytest.approx(two_point_error(law, shift), rel=0.05)
    if noise.sigma:  # in many dimensions only the distance matters
        wide = torch.zeros(2, 50)
        wide[:, 7] = updates[:, 0] + 9
        assert bayes_error(wide, x, noise, generator("two")) == pytest.approx(found, rel=0.1)


def test_the_gaussian_estimate_is_no_bound_for_two_images() -> None:
    """So it is not called a bound: of +1 or -1 in noise .5 the best linear guess has .2, and the best guess far less."""
    line = van_trees(torch.tensor([[4.0]]).double(), gaussian_of(torch.zeros(1), torch.ones(1, 1)))
    assert line == pytest.approx(0.2)
    assert two_point_error(scipy.stats.norm.pdf, 2.0) < line / 2


def test_little_noise_gives_no_bound() -> None:
    model = mlp((1, 2, 2), 2, hidden=(3,), activation="tanh")
    known = Knowledge(
        model, LINKS["normal"](1e-6), (1, 2, 2), 2, 1, (0.0,), (1.0,), auxiliary=uniform(40, generator("few"))
    )
    for attacker, named in ((known, "256"), (replace(known, auxiliary=None), "auxiliary")):
        with pytest.raises(ValueError, match=named):
            candidate_bound(attacker, detached_params(model), generator("bound"))


def test_classes_with_images_have_separate_priors() -> None:
    rng = generator("classes")
    x = torch.randn(63, 1, 2, 2, generator=rng)
    y = torch.cat([torch.zeros(30), torch.ones(30), torch.tensor([2.0, 2.0, 3.0])]).long()
    x[30:60] = 0.1 * x[30:60] + 5
    first, second, rest = class_priors(Batch(x, y))
    assert [own.labels.tolist() for own in (first, second, rest)] == [[0], [1], [2, 3]]
    assert [own.share for own in (first, second, rest)] == pytest.approx([30 / 63, 30 / 63, 3 / 63])
    assert float(covariance_of(second.prior).trace()) == pytest.approx(float(x[30:60].var(0, correction=0).sum()))
    # deviations within classes of n images are short by n - 1 in n; one of a single image has none
    spread = sum(
        float((x[y == c] - x[y == c].mean(0)).square().sum()) * n / (n - 1) for c, n in ((0, 30), (1, 30), (2, 2))
    )
    assert float(covariance_of(rest.prior).trace()) == pytest.approx(spread / 62, rel=1e-3)
    (alone,) = class_priors(Batch(x[60:], torch.arange(3)))
    assert float(covariance_of(alone.prior).trace()) == pytest.approx(float(x[60:].var(0, correction=0).sum()))
    many = class_priors(Batch(torch.rand(400, 1, 2, 2, generator=rng), torch.arange(400) % 20))
    assert [len(own.labels) for own in many] == [20], "all share one covariance"


def test_each_class_adds_the_error_of_its_own_prior() -> None:
    """In noise that hides all, what is left is the variance around the class's mean."""
    model = mlp((1, 2, 2), 2, hidden=(3,), activation="tanh").double()
    auxiliary = Batch(torch.rand(40, 1, 2, 2, generator=generator("x")).double(), torch.arange(40) % 2)
    known = Knowledge(model, LINKS["normal"](1e6), (1, 2, 2), 2, 3, (0.0,), (1.0,), auxiliary=auxiliary)
    narrow, wide = (gaussian_of(torch.zeros(4), torch.eye(4) * v) for v in (0.01, 0.05))
    priors = [ClassPrior(torch.tensor([0]), 0.25, narrow), ClassPrior(torch.tensor([1]), 0.75, wide)]
    assert bayes_limit(known, detached_params(model), priors, generator("sum")) == pytest.approx(0.04)
