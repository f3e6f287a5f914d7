"""The generative prior: a generator of the auxiliary images, and searches of its latents, weights and inner features."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedgauge.attacks.base import Budget, Knowledge, Observation, Wave
from fedgauge.attacks.generative.gi_gip import gi_gip
from fedgauge.attacks.generative.gifd import gifd, l1_ball
from fedgauge.attacks.learned.generators import GeneratorTraining, convolutional
from fedgauge.attacks.matching.priors import PairedEnergy, gaussian
from fedgauge.attacks.modality.image_metrics import mse
from fedgauge.client.chain import chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, lenet
from fedgauge.client.rng import generator
from fedgauge.client.transforms import Link
from fedgauge.client.update import Batch
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign

SHAPE = (1, 10, 9)  # no multiple of the strides
STREAMS: list[Any] = [partial(generator, "generative", k) for k in range(2)]


def discs(n: int) -> torch.Tensor:
    """Images (n, C, H, W) of three numbers each: a bright disc's place and size."""
    place = torch.rand(n, 3, generator=generator("discs", n))
    rows, columns = torch.arange(10.0)[:, None], torch.arange(9.0)
    at = [(p * 5 + 2)[:, None, None] for p in place.T]
    distance = ((rows - at[0]).square() + (columns - at[1]).square()).sqrt()
    return torch.sigmoid(2 * (1 + place[:, 2, None, None] * 2 - distance))[:, None]


def world(auxiliary: torch.Tensor | None = None) -> tuple[Knowledge, Wave, torch.Tensor]:
    """A LeNet, and two clients with an image each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = lenet(SHAPE, 4).eval()
    x = discs(300) if auxiliary is None else auxiliary
    known = Knowledge(
        model, chain(local_sgd(1.0)), SHAPE, 4, 1, (0.3,), (0.4,), auxiliary=Batch(x, torch.arange(len(x)) % 4)
    )
    truth, y, params = discs(2), torch.tensor([0, 3]), detached_params(model)
    client = known.chain(gradient(model, normalise=known.normalise))
    seen = [Observation(1, k, params, client(params, Batch(truth[[k]], y[[k]]), None)) for k in range(2)]
    return replace(known, labels=y[:, None]), Wave.stack(seen), truth


@pytest.mark.slow
def test_a_generator_makes_images_of_the_kind_that_it_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, _, _ = world()
    assert known.auxiliary is not None
    training = GeneratorTraining(latent=4, width=8, steps=400, rate=5e-3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder, again = (training.decoder(known) for _ in range(2))
    assert all(map(torch.equal, decoder.state_dict().values(), again.state_dict().values()))
    assert len(list(tmp_path.rglob("generator-*.safetensors"))) == 1
    made = decoder(torch.randn(200, 4, generator=generator("z")))
    assert made.shape == (200, *SHAPE)
    assert 0 <= float(made.min()) <= float(made.max()) <= 1
    x = known.auxiliary.x
    apart = torch.cdist(made.flatten(1), x.flatten(1)).amin(1).square().mean() / 90
    assert float(apart) < 0.5 * float(mse(x, x.mean(0).expand_as(x)).mean())


@pytest.mark.slow
def test_what_the_search_finds_is_nearer_than_what_it_starts_from_and_than_the_mean_image() -> None:
    known, wave, truth = world()
    attack = gi_gip(latent=4, width=8, training=400, rate=0.1)
    errors = []
    for iterations in (1, 150):
        found = attack.reconstruct(wave, known, Budget(iterations, restarts=2), STREAMS)
        images = torch.cat([r.x for r in found if r.x is not None])
        errors.append((float(mse(truth, images).mean()), sum(r.objective for r in found)))
    assert known.auxiliary is not None
    floor = float(mse(truth, known.auxiliary.x.mean(0).expand_as(truth)).mean())
    assert errors[1][1] < 0.2 * errors[0][1]
    assert errors[1][0] < 0.5 * min(floor, errors[0][0])


def test_each_problem_has_a_generator_of_its_own() -> None:
    known, wave, _ = world()
    attack = gi_gip(latent=4, width=8, training=20, share=0.0, weight_rate=0.01)
    together = attack.reconstruct(wave, known, Budget(5), STREAMS)
    alone = [
        attack.reconstruct(wave.of([k]), replace(known, labels=known.labels[[k]]), Budget(5), [STREAMS[k]])[0]
        for k in (0, 1)
    ]  # type: ignore[index]  # given above
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a.x, b.x, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attack", [gi_gip(), gifd()])
def test_missing_auxiliary_images_are_reported(attack: Any) -> None:
    known, wave, _ = world()
    found = attack.reconstruct(wave, replace(known, auxiliary=None), Budget(1), STREAMS)
    assert {r.status for r in found} == {"not_applicable"} and "auxiliary" in found[0].reason


def test_a_decoder_fills_every_size() -> None:
    for shape in ((3, 32, 32), (1, 5, 7)):
        decoder: nn.Module = convolutional(shape, 3, 2)
        assert decoder(torch.zeros(2, 3)).shape == (2, *shape)


@pytest.mark.parametrize("defense", ["sign", "prune"])
def test_the_objective_is_the_adapted_one_of_learning_to_inverts_appendix(defense: str) -> None:
    """By hand, of what was found: signs by a squared hinge, what pruning left by the cosine over its entries alone."""
    known, wave, _ = world()
    link: Link = sign() if defense == "sign" else prune(0.05)
    known = replace(known, chain=chain(link, local_sgd(1.0)))
    y, params = torch.tensor([0, 3]), wave.params
    client = known.chain(gradient(known.model, normalise=known.normalise))
    seen = [client(params, Batch(discs(2)[[k]], y[[k]]), None) for k in range(2)]
    wave = Wave.stack([Observation(1, k, params, update) for k, update in enumerate(seen)])
    attack = gi_gip(latent=4, width=8, training=20, tv=0.0)
    plain = chain(local_sgd(1.0))(gradient(known.model, normalise=known.normalise))
    for k, found in enumerate(attack.reconstruct(wave, known, Budget(6), STREAMS)):
        assert found.x is not None
        own, bare = (
            torch.cat([t.flatten() for t in update.values()])
            for update in (seen[k], plain(params, Batch(found.x, y[[k]]), None))
        )
        if defense == "sign":
            soft = [t / (t.abs() + t.abs().mean()) for t in plain(params, Batch(found.x, y[[k]]), None).values()]
            dummy = torch.cat([t.flatten() for t in soft])  # a sign has no derivative: this stands in for it
            expected = (-dummy * own).clamp_min(0).square().sum() / dummy.square().sum()
        else:
            expected = 1 - torch.cosine_similarity(own, bare * (own != 0), dim=0)
        assert found.objective == pytest.approx(float(expected), rel=1e-3)
        assert float(expected) > 1e-4


# ------------------------------------------------------------------------------------------------ GIFD


@given(seed=st.integers(0, 10**6), part=st.floats(0.01, 1.5))
def test_the_projection_is_the_nearest_point_of_the_ball(seed: int, part: float) -> None:
    """At the nearest point p of x, <x - p, q - p> <= 0 for each q of the ball, so for its corners."""
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    radius = part * x.abs().sum(1)
    p = l1_ball(x, radius)
    assert bool((p.abs().sum(1) <= radius + 1e-9).all())
    corners = torch.cat([torch.eye(7), -torch.eye(7)]).double() * radius[:, None, None]
    assert float(((x - p)[:, None] * (corners - p[:, None])).sum(2).max()) < 1e-9
    if part >= 1:
        assert torch.equal(p, x)


def test_the_layers_are_the_generators() -> None:
    decoder = convolutional((1, 10, 9), 4, 3)
    z = torch.randn(5, 4)
    first = decoder.inner(z, 0)
    for layer, at in enumerate((z, first, decoder.inner(first, 1))):
        torch.testing.assert_close(decoder.image(at, layer), decoder(z))


def test_inner_features_reach_lower_objectives_than_latents_and_smaller_balls() -> None:
    """Of a generator that has learned little latents make few images; a ball that allows nothing ends there."""
    known, wave, _ = world()
    runs = [
        sum(r.objective for r in gifd(4, 8, 60, rate=0.05, radius=radius).reconstruct(wave, known, Budget(n), STREAMS))
        for radius, n in ((1e-6, 90), (0.5, 90))
    ]
    assert runs[1] < 0.7 * runs[0]


def test_a_normal_prior_makes_images_likelier_by_the_densities_of_their_classes() -> None:
    known, wave, _ = world()
    assert known.labels is not None
    bound = gaussian(by_class=True).bind(known, wave.params)
    assert isinstance(bound, PairedEnergy)
    energies = []
    for weight in (0.0, 1.0):
        found = gifd(4, 8, 60, tv=0.0, normal=weight).reconstruct(wave, known, Budget(60), STREAMS)
        images = [known.normalise(r.x) for r in found if r.x is not None]
        energies.append(sum(float(bound.energy(x, y)) for x, y in zip(images, known.labels, strict=True)))
    assert energies[1] < 0.9 * energies[0]
