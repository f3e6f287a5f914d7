"""GIFD: the projection is the nearest point, layers split the generator, and inner features reach what latents cannot."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgauge.attacks.base import Budget
from fedgauge.attacks.generative.gifd import gifd, l1_ball
from fedgauge.attacks.learned.generators import Decoder
from fedgauge.attacks.matching.priors import LabelledEnergy, gaussian
from tests.attacks.generative.test_gi_gip import STREAMS, world


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
    decoder = Decoder((1, 10, 9), 4, 3)
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
    assert isinstance(bound, LabelledEnergy)
    energies = []
    for weight in (0.0, 1.0):
        found = gifd(4, 8, 60, tv=0.0, normal=weight).reconstruct(wave, known, Budget(60), STREAMS)
        images = [known.normalise(r.x) for r in found if r.x is not None]
        energies.append(sum(float(bound.energy(x, y)) for x, y in zip(images, known.labels, strict=True)))
    assert energies[1] < 0.9 * energies[0]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="radius"):
        gifd(radius=0)
