"""The limit: closed forms, and a Gaussian world in which the likelihood ratio reaches the curve and nothing exceeds it."""

import math
from dataclasses import replace

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.likelihood import RestOfBatch
from fedgauge.attacks.membership.limit import detectability, power
from fedgauge.attacks.membership.scores import SCORES, Scoring
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.defenses.dp_sgd import dp_sgd
from fedgauge.defenses.noise import gaussian, laplace
from fedgauge.defenses.precode import precode
from tests.attacks.refusals import check_named

DRAWS = 4000  # updates with the candidate, and as many without
ALPHAS = (0.01, 0.1, 0.3)


def test_power_on_paper() -> None:
    assert power(0.05, 1.0) == pytest.approx(scipy.stats.norm.cdf(scipy.stats.norm.ppf(0.05) + 1))
    assert power(0.3, 0.0) == pytest.approx(0.3)
    assert (power(0.0, 5.0), power(1.0, 5.0), power(0.0, math.inf)) == (0.0, 1.0, 1.0)


# ------------------------------------------------------------------------------------------------- Gaussian world


def world(links: Chain, size: int = 3) -> tuple[Knowledge, Batch]:
    """A small network, and a candidate with two others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    rng = generator("gaussian world of members")
    batch = Batch(torch.randn(size, 1, 1, 6, generator=rng).double(), torch.randint(3, (size,), generator=rng))
    return Knowledge(model, links, (1, 1, 6), 3, size, (), ()), batch


def known_rest(others: CandidateGradients) -> RestOfBatch:
    """Exactly these other examples, nothing of which varies; without the candidate, its term of the mean is zero."""
    mean = torch.cat(list(others.rows())).mean(0)
    none = torch.zeros_like(mean)
    return RestOfBatch(mean, none, mean.new_zeros(0, len(mean)), mean.new_zeros(0), none)


def scores(known: Knowledge, batch: Batch, present: bool, method: str = "likelihood_ratio") -> Tensor:
    """(DRAWS,) scores of the first example, in updates with and without its gradient."""
    params = detached_params(known.model)
    mean = known.chain.mean(gradient(known.model))
    whole = mean(params, batch, None)
    if not present:  # the same sum without the candidate's term
        others = mean(params, Batch(batch.x[1:], batch.y[1:]), None)
        whole = {k: t * (len(batch.x) - 1) / len(batch.x) for k, t in others.items()}
    density = known.chain.update_distribution
    assert density is not None
    rng = generator("noise of members", int(present))
    seen = {k: t + density.sigma * torch.randn(DRAWS, *t.shape, generator=rng, dtype=t.dtype) for k, t in whole.items()}
    wave = Wave(1, tuple(range(DRAWS)), params, seen)
    first = CandidateGradients(known, params, Batch(batch.x[:1], batch.y[:1]))
    rest = known_rest(CandidateGradients(known, params, Batch(batch.x[1:], batch.y[1:])))
    return SCORES[method](Scoring(first, wave, rest))[:, 0]


def sigma_for(mu: float, links: Chain) -> float:
    known, batch = world(links)
    first = CandidateGradients(known, detached_params(known.model), Batch(batch.x[:1], batch.y[:1]))
    return float(detectability(first)[0]) / mu


@pytest.mark.parametrize("mu", [pytest.param(0.3, marks=pytest.mark.full), 2.5])
def test_the_likelihood_ratio_reaches_the_curve_and_nothing_exceeds_it(mu: float) -> None:
    sigma = sigma_for(mu, chain(gaussian(1.0), local_sgd(0.1)))
    known, batch = world(chain(gaussian(sigma), local_sgd(0.1)))
    for method in ("likelihood_ratio", "matched_filter", "gradient_difference", "loss_change"):
        positive, negative = (scores(known, batch, present, method) for present in (True, False))
        for alpha in ALPHAS:
            threshold = negative.quantile(1 - alpha)
            reached = float((positive > threshold).double().mean())
            best = power(alpha, mu)
            slope = (power(alpha + 1e-4, mu) - power(alpha - 1e-4, mu)) / 2e-4
            error = math.sqrt((best * (1 - best) + slope**2 * alpha * (1 - alpha)) / DRAWS)
            assert reached <= best + 3 * error, f"{method} exceeds the limit at {alpha}"
            if method == "likelihood_ratio":
                assert reached >= best - 3 * error, f"{reached} of {best} at {alpha}"


def test_rounds_add_up_to_the_composed_curve() -> None:
    sigma = sigma_for(0.5, chain(gaussian(1.0), local_sgd(0.1)))
    known, batch = world(chain(gaussian(sigma), local_sgd(0.1)))
    positive, negative = (scores(known, batch, present).view(-1, 16).sum(1) for present in (True, False))
    reached = float((positive > negative.quantile(0.9)).double().mean())
    assert reached == pytest.approx(power(0.1, 0.5 * 16**0.5), abs=0.1)  # 250 of each


def test_clipping_bounds_what_an_example_can_move() -> None:
    links = chain(dp_sgd(0.5, 1.0, 3), local_sgd(0.1))
    known, batch = world(links)
    found = detectability(CandidateGradients(known, detached_params(known.model), batch))
    assert found.max() <= 1 + 1e-6, "one over the noise multiplier"
    assert found.min() > 0


@pytest.mark.parametrize(
    ("links", "inside"),  # the chain's noise, and whether the network has more
    [(chain(local_sgd(0.1)), False), (chain(laplace(0.1), local_sgd(0.1)), False)]
    + [(chain(gaussian(0.1), local_sgd(0.1)), True)],
)
def test_without_normal_noise_alone_there_is_no_exact_curve(links: Chain, inside: bool) -> None:
    known, batch = world(links)
    known = replace(known, model=precode(known.model, latent=2)) if inside else known
    check_named("normal", lambda: detectability(CandidateGradients(known, detached_params(known.model), batch)))
