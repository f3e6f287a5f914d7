"""The limit in a run: which chains have one, what an audit says of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, nn

from fedgauge.attacks import limits
from fedgauge.attacks.gaussian_prior import ClassPrior, public_priors
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.limits import (
    bayes_limit,
    known_noise,
)
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.attacks.source import FederationSource
from fedgauge.client.chain import Chain, chain
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import local_sgd
from fedgauge.client.rng import generator
from fedgauge.client.transforms import UpdateDistribution, per_example
from fedgauge.client.update import Batch
from fedgauge.defenses.clip import clip
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian, identity, laplace
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign
from tests.attacks.refusals import check_named, with_truth
from tests.theory.gaussian_world import covariance_of

Make = Callable[..., Any]
LIMIT = PlannedAttack("bayes_limit", {"use": "bayes_limit"})
BOUND = PlannedAttack("candidate_bound", {"use": "candidate_bound"})
SGD = local_sgd(0.1)


def seeded(*purpose: int | str) -> Generator:
    return generator("limits", *purpose)


@pytest.mark.parametrize(("links", "noise"), [
    (chain(gaussian(0.5), SGD), UpdateDistribution(sigma=0.05)),
    (chain(SGD, laplace(0.5)), UpdateDistribution(scale=0.5)),
    (chain(per_example(clip(1.0)), gaussian(0.5), SGD), UpdateDistribution(sigma=0.05)),
    (chain(gaussian(0.5), local_sgd(0.1, steps=4)), UpdateDistribution(sigma=0.1)),
    (chain(gaussian(0.5), SGD, mask(0.25)), UpdateDistribution(sigma=0.05, sparse=True, shrink=0.25)),
    (chain(gaussian(0.5), SGD, mask(0.25, seed=1)), UpdateDistribution(sigma=0.05, sparse=True)),
    (chain(gaussian(0.5), SGD, identity()), UpdateDistribution(sigma=0.05)),
    (chain(gaussian(0.5), SGD, sign()), UpdateDistribution(sigma=0.05, signed=True)),
])  # fmt: skip
def test_chains_with_noise_of_a_known_density(links: Chain, noise: UpdateDistribution) -> None:
    found = known_noise(links)
    assert found is not None
    assert found.sigma == pytest.approx(noise.sigma)
    assert replace(found, sigma=noise.sigma) == noise


@pytest.mark.parametrize("links", [
    chain(SGD),
    chain(per_example(clip(1.0)), SGD),
    chain(gaussian(0.0), SGD),
    chain(SGD, sign()),
    chain(SGD, mask(0.5)),
    chain(sign(), gaussian(0.5), SGD),  # a mixture
    chain(gaussian(0.5), SGD, prune(0.5)),  # what it keeps tells of the values
    chain(per_example(prune(0.5)), gaussian(0.5), SGD),
    chain(per_example(gaussian(0.5)), SGD),
])  # fmt: skip
def test_chains_without_one(links: Chain) -> None:
    assert known_noise(links) is None


NOISY: list[dict[str, Any]] = [
    {"use": "gaussian", "sigma": 0.1},
    {"use": "local_sgd", "rate": 0.1},
]


def limit_of(fed: Federation, priors: Sequence[ClassPrior] = ()) -> float:
    auditor = Auditor(FederationSource(fed))
    return bayes_limit(auditor.knowledge(LIMIT), fed.initial()[0], priors or public_priors(fed.shards), seeded("run"))


def within_classes(priors: Sequence[ClassPrior]) -> float:
    """The variance of a pixel around its class's mean."""
    shares = sum(own.share for own in priors)
    return sum(own.share * float(covariance_of(own.prior).trace()) / len(own.prior.mean) for own in priors) / shares


def noisy(sigma: float) -> list[dict[str, Any]]:
    return [{**NOISY[0], "sigma": sigma}, NOISY[1]]


def test_more_noise_raises_the_limit_up_to_the_priors_variance(make_federation: Make) -> None:
    model = {"use": "mlp", "hidden": [16], "activation": "tanh"}
    priors = public_priors(make_federation().shards)[:3]
    found = [limit_of(make_federation(model=model, chain=noisy(s)), priors) for s in (1e-4, 1e-2, 1.0, 1e6)]
    assert found == sorted(found)
    assert found[0] < 1e-6
    variance = within_classes(priors)
    assert 0.8 * variance < found[-1] <= variance, "blocks of nearly equal variances lose little"


@pytest.mark.parametrize("model", [
    {"use": "lenet"},
    {"use": "convnet", "width": 1, "norm": "group"},
    {"use": "convnet", "width": 1, "mode": "train"},
])  # fmt: skip
def test_every_kind_of_network_has_one(
    model: dict[str, Any], make_federation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DRAWS", 8)
    fed = make_federation(model=model, data={"batch_size": 2, "auxiliary": 50}, chain=NOISY)
    before = [t.clone() for t in fed.model.state_dict().values()]
    found = limit_of(fed)
    assert 0 < found < within_classes(public_priors(fed.shards))
    assert all(torch.equal(a, b) for a, b in zip(before, fed.model.state_dict().values(), strict=True))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_draws_that_follow_the_errors_average_as_uniform_ones_do(batch_size: int, make_federation: Make) -> None:
    model = {"use": "mlp", "hidden": [8]}
    fed = make_federation(model=model, data={"batch_size": batch_size, "auxiliary": 60}, chain=NOISY)
    known = Auditor(FederationSource(fed)).knowledge(LIMIT)
    params = {k: 30 * t for k, t in fed.initial()[0].items()}  # sure of itself: its errors are nearly all or nothing
    errors = limits._errors(known, params, torch.arange(60))
    assert known.auxiliary is not None
    chances = fed.model.train().requires_grad_(False)
    logits = torch.func.functional_call(chances, params, (known.normalise(known.auxiliary.x),))
    right = logits.argmax(1) == known.auxiliary.y
    assert float(errors[right].max()) < float(errors[~right].max())
    drawn = list(limits._draws(known, params, torch.arange(10), 6000, seeded("draws")))
    weights = torch.tensor([weight for *_, weight in drawn])
    assert float(weights.max()) <= 2
    assert float(weights.mean()) == pytest.approx(1, abs=0.03)
    marks = known.auxiliary.x.flatten(1).sum(1).double()
    targets = torch.tensor([float(batch.x[place].sum()) for batch, place, _ in drawn])
    assert float((weights * targets).mean()) == pytest.approx(float(marks.mean()), rel=0.03)
    assert {len(batch.y) for batch, *_ in drawn} == {batch_size}
    assert {place for _, place, _ in drawn} == set(range(batch_size))
    only = list(limits._draws(known, params, torch.tensor([3]), 10, seeded("three")))
    assert {int(batch.y[place]) for batch, place, _ in only} == {3}


def test_missing_limits_have_a_reason(make_federation: Make) -> None:
    fed = make_federation(chain=[NOISY[1]])
    check_named("density", lambda: limit_of(fed))
    fed = make_federation(model={"use": "mlp", "hidden": [4]}, chain=NOISY)
    auditor = Auditor(FederationSource(fed))
    known, params = auditor.knowledge(LIMIT), fed.initial()[0]
    forgetful = replace(known, model=nn.Sequential(nn.Dropout(0.5), fed.model))
    for attacker, named in ((replace(known, auxiliary=None), "auxiliary"), (forgetful, "draws")):
        with pytest.raises(ValueError, match=named):
            bayes_limit(attacker, params, public_priors(fed.shards), seeded("run"))


@pytest.mark.parametrize("planned", [LIMIT, BOUND])
def test_a_limit_has_one_row_for_each_client_and_needs_no_truth(
    planned: PlannedAttack, make_federation: Make, observe: Make
) -> None:
    fed = make_federation(model={"use": "mlp", "hidden": [4]}, data={"batch_size": 2}, chain=noisy(1.0))

    def forbidden(client: int, round: int) -> Batch:
        raise AssertionError("a limit needs no truth")

    both = Auditor(with_truth(fed, forbidden)).audit(planned, observe(fed, (0, 1)), {0: 1, 1: 0})
    (alone,) = Auditor(with_truth(fed, forbidden)).audit(planned, observe(fed, (1,)))
    assert [a.client for a in both] == [0, 1]
    values = []
    for outcome in (*both, alone):
        assert [(r.attack, r.example, r.metric, r.status) for r in outcome.rows] == [
            (planned.name, WHOLE_BATCH, "mse", "converged")
        ]
        assert outcome.rows[0].value is not None
        assert outcome.reconstruction.x is None
        values.append(outcome.rows[0].value)
    assert len(set(values)) == 1, "one bound a round, however its clients are packed"
