"""The analytic attack is exact where it applies, and says so where it does not."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.exact.analytic import analytic
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import Activation, detached_params, mlp
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch
from fedgauge.defenses.clip import clip
from fedgauge.defenses.mask import mask
from fedgauge.defenses.prune import prune

SHAPE, CLASSES = (1, 6, 6), 5
MEAN, STD = (0.13,), (0.31,)


def attack(model: nn.Module, batch: Batch, links: Chain | None = None) -> Reconstruction:
    links = links or chain(local_sgd(0.1))
    params = detached_params(model)
    update = links(gradient(model, normalise=lambda x: (x - MEAN[0]) / STD[0]))(params, batch, None)
    known = Knowledge(model, links, SHAPE, CLASSES, len(batch.x), MEAN, STD)
    return analytic().reconstruct(Wave.stack([Observation(1, 0, params, update)]), known, Budget(1), [])[0]


def example(seed: int, n: int = 1) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(n, *SHAPE, generator=rng), torch.randint(CLASSES, (n,), generator=rng))


def exact(found: Reconstruction, batch: Batch) -> None:
    assert found.status == "converged", found.reason
    assert found.x is not None and found.y is not None
    assert float(psnr(batch.x, found.x)) > 100
    assert found.y.tolist() == batch.y.tolist()


def hears(model: nn.Module, batch: Batch) -> bool:
    """Whether any gradient reaches the first layer, by plain autograd: a layer of dead ReLUs lets none through."""
    loss = nn.functional.cross_entropy(model((batch.x - MEAN[0]) / STD[0]), batch.y)
    (reached,) = torch.autograd.grad(loss, [next(model.parameters())])
    return bool(reached.abs().max() > 0)


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 35.0), (torch.float16, 50.0)])
def test_clients_of_mixed_precision_are_read_to_their_rounding(dtype: torch.dtype, least: float) -> None:
    """Passes under autocast, and single precision in the attack: what is left is the rounding of half precision."""
    model, batch = mlp(SHAPE, CLASSES, [16]), example(3)
    params, links = detached_params(model), chain(local_sgd(0.1))
    with torch.autocast("cpu", dtype=dtype):
        update = links(gradient(model, normalise=lambda x: (x - MEAN[0]) / STD[0]))(params, batch, None)
    update = {k: t.float() for k, t in update.items()}
    known = Knowledge(model, links, SHAPE, CLASSES, 1, MEAN, STD)
    (found,) = analytic().reconstruct(Wave.stack([Observation(1, 0, params, update)]), known, Budget(1), [])
    assert found.x is not None and found.y is not None
    assert least < float(psnr(batch.x, found.x)) < 100
    assert found.y.tolist() == batch.y.tolist()


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


@settings(max_examples=40)
@given(
    hidden=st.lists(st.integers(8, 40), max_size=5),
    activation=st.sampled_from(["relu", "sigmoid", "tanh"]),
    seed=st.integers(0, 10**6),
)
def test_one_example_of_any_fully_connected_network_is_read_off(
    hidden: list[int], activation: Activation, seed: int
) -> None:
    torch.manual_seed(seed)
    model, batch = mlp(SHAPE, CLASSES, hidden=hidden, activation=activation), example(seed)
    found = attack(model, batch)
    if hears(model, batch):
        exact(found, batch)
    else:
        assert found.status == "not_applicable", (
            "a layer of dead ReLUs lets no gradient through: Prop. 3.1 asks for one"
        )


@settings(max_examples=40)
@given(
    widths=st.lists(st.integers(8, 50), min_size=1, max_size=3),
    activation=st.sampled_from(["relu", "sigmoid", "tanh", None]),
    seed=st.integers(0, 10**6),
    padded=st.booleans(),
)
def test_a_stack_without_biases_is_inverted_from_its_first_biased_layer_down(
    widths: list[int], activation: str | None, seed: int, padded: bool
) -> None:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in zip([36, *widths[:-1]], widths, strict=True):
        layers += [nn.Linear(fan_in, fan_out, bias=False), *([nn.Identity()] if padded else [])]
        layers += [ACTIVATIONS[activation]()] if activation else []
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 12), nn.Tanh(), nn.Linear(12, CLASSES, bias=False))
    found = attack(model, example(seed))
    if not hears(model, example(seed)):
        assert found.status == "not_applicable"
        return
    assert found.status == "converged", found.reason
    assert found.x is not None
    assert float(psnr(example(seed).x, found.x)) > 100


@pytest.mark.parametrize("seed", [0, 1])
def test_what_a_mask_or_pruning_leaves_connected_is_read(seed: int) -> None:
    """A matrix of rank one is known from a few entries of each column; a pixel of which none is left is the mean."""
    torch.manual_seed(seed)
    model, batch = mlp(SHAPE, CLASSES, hidden=[200], activation="tanh"), example(seed)
    for link in (mask(0.2), mask(0.2, seed=seed)):
        exact(attack(model, batch, chain(local_sgd(0.1), link)), batch)
    for link in (mask(0.03, seed=seed), prune(0.2)):  # pruning hides pixels near the mean
        found = attack(model, batch, chain(local_sgd(0.1), link)).x
        assert found is not None
        unread = (found - MEAN[0]).abs() < 1e-6
        assert 0 < int(unread.sum()) < 30 and torch.allclose(found[~unread], batch.x[~unread], atol=1e-5)


@pytest.mark.parametrize(
    "links",
    [chain(local_sgd(0.3, 4)), chain(per_example(clip(0.01)), local_sgd(0.1)), chain(local_sgd(0.1), clip(1e-3))],
)
def test_local_steps_and_clipping_hide_nothing(links: Chain) -> None:
    exact(attack(mlp(SHAPE, CLASSES), example(1), links), example(1))


FLAT, LAST = nn.Flatten(), nn.Linear(8, CLASSES)


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([nn.Conv2d(1, 2, 3), FLAT, nn.Linear(32, CLASSES)], "'0' is a convolution"),
        ([FLAT, nn.ReLU(), nn.Linear(36, CLASSES)], "example itself"),
        ([FLAT, nn.Linear(36, 8, bias=False), nn.GELU(), LAST], "'3' does not read layer '1'"),
        ([FLAT, nn.Linear(36, 8, bias=False), nn.BatchNorm1d(8), LAST], "'3' does not read"),
        ([FLAT, nn.Linear(36, 8, bias=False), nn.ReLU(), nn.Tanh(), LAST], "'4' does not read layer '1'"),
        ([FLAT, nn.Linear(36, CLASSES, bias=False)], "has a bias"),
    ],
)
def test_where_it_does_not_apply_it_says_why(layers: list[nn.Module], named: str) -> None:
    found = attack(nn.Sequential(*layers).eval(), example(0))
    assert (found.status, found.x) == ("not_applicable", None) and named in found.reason


def test_a_sum_of_examples_is_not_applicable() -> None:
    assert attack(mlp(SHAPE, CLASSES), example(0, 3)).status == "not_applicable"


def test_a_first_layer_that_learns_nothing_gives_no_image_but_the_label() -> None:
    model: Any = mlp(SHAPE, CLASSES)
    with torch.no_grad():
        model[1].bias.fill_(-1e6)  # every unit is dead
    found = attack(model, example(0))
    assert (found.status, found.x) == ("not_applicable", None)
    assert found.y is not None
    assert found.y.tolist() == example(0).y.tolist()


def test_each_observation_of_a_wave_is_read_by_itself() -> None:
    model = mlp(SHAPE, CLASSES)
    params, client = detached_params(model), local_sgd(0.1)(gradient(model, normalise=lambda x: (x - 0.13) / 0.31))
    wave = Wave.stack([Observation(1, c, params, client(params, example(c), None)) for c in range(4)])
    known = Knowledge(model, chain(local_sgd(0.1)), SHAPE, CLASSES, 1, MEAN, STD)
    for c, found in enumerate(analytic().reconstruct(wave, known, Budget(1), [])):
        exact(found, example(c))
