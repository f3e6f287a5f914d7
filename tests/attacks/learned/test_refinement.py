"""Refinement: the linear answer moves to the likeliest image, behind any chain, and never to a worse one on held-out images."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Budget, Knowledge, Wave
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.attacks.learned.learning_to_invert import learning_to_invert
from fedgauge.attacks.learned.refinement import UpdateLikelihood, WhitenedPrior
from fedgauge.attacks.learned.ridge import ridge_inversion
from fedgauge.client.chain import Chain, chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.rng import generator
from fedgauge.client.transforms import GroupMean, per_example
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign
from tests.attacks.learned import small_threats
from tests.attacks.learned.small_threats import error_of

SHAPE = (1, 14, 14)
STREAMS: list[Any] = [partial(generator, "refined", k) for k in range(8)]
CHAINS = {
    "bare": chain(local_sgd(0.5)),
    "noise": chain(gaussian(0.01), local_sgd(1.0)),
    "sign": chain(sign(), local_sgd(1.0)),
    "prune": chain(prune(0.2), local_sgd(1.0)),
    "local steps": chain(local_sgd(0.1, 3)),
}


def digits(links: Chain, batch_size: int = 1) -> tuple[Knowledge, Wave, list[Tensor]]:
    """A smooth MLP; labels are given."""
    return small_threats.digits(batch_size, links, 8, given=True, hidden=(24, 24), activation="sigmoid")


def test_white_coordinates_are_white_and_lead_back() -> None:
    x = torch.rand(4000, 1, 3, 3, generator=generator("w")) @ torch.rand(3, 3, generator=generator("m"))
    white = WhitenedPrior.of(x)
    z = white.coordinates(x.flatten(1))
    torch.testing.assert_close(white.images(z), x.flatten(1), atol=1e-4, rtol=0)
    covariance = torch.cov(z.T, correction=0)
    assert float(covariance.diagonal().max()) < 1.03
    assert float((covariance - covariance.diagonal().diag()).abs().max()) < 0.02


@pytest.mark.parametrize(
    "links",
    [
        *CHAINS.values(),
        chain(per_example(sign()), local_sgd(1.0)),
        Chain((local_sgd(0.5), GroupMean(2))),
        chain(local_sgd(0.1, 2, 1)),
    ],
    ids=[*CHAINS, "sign of each", "sum of two", "slices"],
)  # fmt: skip
def test_differentiable_updates_are_the_noise_free_ones_and_their_slopes_are_right(links: Chain) -> None:
    """Against central differences, in double precision; the sign's soft form and the dropped entries' places are fixed ones."""
    known, wave, _ = digits(links, batch_size=2)
    known = replace(known, model=known.model.double())
    params = {k: t.double() for k, t in wave.params.items()}
    simulator = Simulator(known, params, quiet=True)
    x = torch.rand(3, 2, *SHAPE, generator=generator("x"), dtype=torch.float64)
    y = torch.tensor([[0, 1], [3, 3], [2, 9]])
    (quiet,) = simulator.updates(x, y, generator("draws"))
    found = simulator.differentiable(x.clone().requires_grad_(), y)
    for k, t in found.items():
        torch.testing.assert_close(t.detach(), quiet[k])
    seen = {k: t + 0.01 for k, t in quiet.items()}
    misfit = UpdateLikelihood(known, params)
    step = 1e-6 * torch.randn(x.shape, generator=generator("step"), dtype=torch.float64)

    def value(at: Tensor) -> Tensor:
        squares = misfit.squares(at.requires_grad_(), y, seen)
        return torch.stack([t.detach().sum(1) / (2 + misfit.size(seen[k])) for k, t in squares.items()]).sum()

    told = float((misfit.slopes(x, y, seen, dict.fromkeys(params, (1.0, 0.5))) * 2 * step).sum())
    assert float(value(x + step) - value(x - step)) == pytest.approx(told, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [("bare", 2), ("local steps", 1), *(pytest.param(name, 1, marks=pytest.mark.full) for name in ("noise", "prune"))],
)
def test_refined_answers_are_nearer_than_the_linear_ones(name: str, batch_size: int) -> None:
    known, wave, truth = digits(CHAINS[name], batch_size)
    linear = ridge_inversion().reconstruct(wave, known, Budget(1), STREAMS)
    refined = learning_to_invert(architecture="refined").reconstruct(wave, known, Budget(30), STREAMS)
    assert error_of(refined, truth) < 0.9 * error_of(linear, truth)
    assert refined[0].objective < linear[0].objective


def test_where_refinement_does_not_win_on_held_out_images_the_linear_answer_stays() -> None:
    """Strokes are no normal images, and signs tell too little to make up for that."""
    known, wave, _ = digits(CHAINS["sign"])
    linear = ridge_inversion().reconstruct(wave, known, Budget(1), STREAMS)
    refined = learning_to_invert(architecture="refined").reconstruct(wave, known, Budget(60), STREAMS)
    assert refined[0].objective <= linear[0].objective + 1e-6
    for a, b in zip(linear, refined, strict=True):
        assert (b.iterations, b.status) == (0, "converged")
        assert torch.equal(a.x, b.x)  # type: ignore[arg-type]  # both have images


def test_packing_changes_no_refinement_and_the_clock_ends_it() -> None:
    known, wave, _ = digits(CHAINS["bare"])
    attack = learning_to_invert(architecture="refined")
    together = attack.reconstruct(wave, known, Budget(20), STREAMS)
    assert known.labels is not None
    alone = [
        attack.reconstruct(wave.of([k]), replace(known, labels=known.labels[[k]]), Budget(20), STREAMS[k : k + 1])[0]
        for k in (0, 5)
    ]
    for a, b in zip((together[0], together[5]), alone, strict=True):
        torch.testing.assert_close(a.x, b.x, atol=1e-3, rtol=0)
    (late, *_) = attack.reconstruct(wave, known, Budget(20, seconds=1e-9), STREAMS)
    assert (late.status, late.iterations) == ("out_of_budget", 0)
