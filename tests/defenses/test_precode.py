"""PRECODE: the bottleneck on paper, its loss against torch's own divergence, and the attack that walks round it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Observation, Wave
from fedgauge.attacks.engine.computation import classifier
from fedgauge.attacks.exact.analytic import analytic
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import chain
from fedgauge.client.components import SpecError, call, check_arguments
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import StochasticLayer, gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, lenet, mlp
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Update
from fedgauge.defenses.precode import precode
from tests.tensors import seeded


def small(beta: float = 0.5) -> nn.Module:
    """4 inputs, 3 features behind a sigmoid, a code of 2, 3 classes; float64."""
    torch.manual_seed(0)
    return precode(mlp((1, 2, 2), 3, hidden=[3], activation="sigmoid"), latent=2, beta=beta).double()


def layer_of(model: nn.Module) -> StochasticLayer:
    (layer,) = (m for m in model.modules() if isinstance(m, StochasticLayer))
    return layer


BATCH = Batch(torch.rand(3, 1, 2, 2, generator=seeded(), dtype=torch.float64), torch.tensor([0, 2, 1]))


def by_hand(params: dict[str, Tensor], x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the code's divergence in nats averaged over the batch."""
    features = torch.sigmoid(F.linear(x.flatten(1), params["1.weight"], params["1.bias"]))
    inside = {k.removeprefix("3.bottleneck."): t for k, t in params.items() if "bottleneck" in k}
    both = features @ inside["encoder.weight"].T + inside["encoder.bias"]
    mu, sigma = both[:, :2], torch.log1p(both[:, 2:].exp())
    divergence = kl_divergence(Normal(mu, sigma), Normal(torch.zeros_like(mu), torch.ones_like(mu))).sum(1).mean()
    decoded = (mu + sigma * noise) @ inside["decoder.weight"].T + inside["decoder.bias"]
    return decoded @ params["3.layer.weight"].T + params["3.layer.bias"], divergence


def test_it_is_the_published_bottleneck() -> None:
    model = small()
    noise = torch.randn(3, 2, generator=seeded(1), dtype=torch.float64)
    layer_of(model).noise = noise
    expected, divergence = by_hand(detached_params(model), BATCH.x, noise)
    torch.testing.assert_close(model(BATCH.x), expected)
    penalty = layer_of(model).penalty
    assert penalty is not None
    torch.testing.assert_close(penalty.detach(), 0.5 * divergence / math.log(2))


def test_without_a_generator_the_mean_goes_on() -> None:
    model = small()
    expected, _ = by_hand(detached_params(model), BATCH.x, torch.zeros(3, 2, dtype=torch.float64))
    torch.testing.assert_close(model(BATCH.x), expected)
    torch.manual_seed(5)
    assert torch.equal(model(BATCH.x), model(BATCH.x))


def test_the_clients_gradient_is_of_the_penalised_loss_at_its_own_draw() -> None:
    model = small()
    params = {k: t.requires_grad_() for k, t in detached_params(model).items()}
    logits, divergence = by_hand(params, BATCH.x, torch.randn(3, 2, generator=seeded(7), dtype=torch.float64))
    loss = F.cross_entropy(logits, BATCH.y) + 0.5 * divergence / math.log(2)
    expected = torch.autograd.grad(loss, list(params.values()))
    update = gradient(model)(detached_params(model), BATCH, seeded(7))
    for k, g in zip(params, expected, strict=True):
        torch.testing.assert_close(update[k], g)


def test_the_draws_are_standard_normal() -> None:
    model = small()
    layer, many = layer_of(model), torch.rand(1, 3, dtype=torch.float64, generator=seeded()).expand(20_000, 3)
    # with the identity for a decoder, what comes out is the code
    with torch.no_grad():
        layer.get_submodule("decoder").weight.copy_(torch.eye(3, 2))  # type: ignore[operator]
        layer.get_submodule("decoder").bias.zero_()  # type: ignore[operator]
        mean, layer.rng = layer(many)[0, :2], seeded()
        code = layer(many)[:, :2]
        sigma = F.softplus(layer.get_submodule("encoder")(many)[0, 2:])
    noise = (code - mean) / sigma
    assert noise.mean(0).abs().max() < 5 / 20_000**0.5
    torch.testing.assert_close(noise.T.cov(), torch.eye(2, dtype=torch.float64), rtol=0, atol=0.05)


def test_the_rest_of_the_model_and_the_one_handed_in_stay() -> None:
    torch.manual_seed(3)
    plain = lenet((1, 28, 28), 10)
    kept = detached_params(plain)
    defended = precode(plain, latent=8)
    assert detached_params(plain).keys() == kept.keys()
    found = detached_params(defended)
    assert classifier(defended, (1, 28, 28)) == "linear.layer"
    assert all(torch.equal(found[k.replace("linear.", "linear.layer.")], t) for k, t in kept.items())
    assert found["linear.bottleneck.encoder.weight"].shape == (16, 588)
    assert found["linear.bottleneck.decoder.weight"].shape == (588, 8)


def test_the_bottleneck_precedes_the_named_layer() -> None:
    model = precode(mlp((1, 2, 2), 3, hidden=[5, 6]), latent=2, before="3")
    assert model.get_submodule("3.bottleneck.encoder").weight.shape == (4, 5)
    assert isinstance(model.get_submodule("5"), nn.Linear)


@pytest.mark.parametrize(
    ("model", "arguments", "name"),
    [
        (mlp((1, 2, 2), 3), {"before": "fc"}, "fc"),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), {}, "layer"),
        (mlp((1, 2, 2), 3), {"latent": 0}, "latent"),
        (mlp((1, 2, 2), 3), {"beta": float("nan")}, "beta"),
    ],
)
def test_invalid_arguments_are_refused(model: nn.Module, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(SpecError, match=name):
        call(
            precode,
            check_arguments(precode, arguments, "[[model.defense]] #1", {"model": model}),
            "[[model.defense]] #1",
        )


# ------------------------------------------------------------------------------------------------------- in a scenario

DEFENSE = {"use": "precode", "latent": 8}


def test_a_federation_is_seedable_and_evaluates_by_the_mean(make_federation: Callable[..., Federation]) -> None:
    def federation(seed: int, defenses: list[dict[str, Any]]) -> Federation:
        return make_federation(seed=seed, model={"use": "lenet", "defense": defenses})

    fed, again, other = (federation(seed, [DEFENSE]) for seed in (0, 0, 1))
    params, buffers = fed.initial()
    assert all(torch.equal(params[k], t) for k, t in again.initial()[0].items())
    assert not torch.equal(
        params["linear.bottleneck.encoder.weight"], other.initial()[0]["linear.bottleneck.encoder.weight"]
    )
    assert torch.equal(params["conv1.weight"], federation(0, []).initial()[0]["conv1.weight"])
    update = fed.client_update(params, buffers, 0, 1)
    assert update.keys() == params.keys()
    assert all(torch.equal(update[k], t) for k, t in again.client_update(params, buffers, 0, 1).items())
    x = fed.batch_at(0, 1).x
    assert torch.equal(functional_call(fed.model, params, (x,)), functional_call(fed.model, params, (x,)))


# ----------------------------------------------------------------------------------------------------- its attacker

SHAPE, CLASSES = (3, 32, 32), 10


@pytest.mark.parametrize(("dtype", "least"), [(torch.float64, 150.0), (torch.float32, 100.0)])
def test_the_first_layer_gives_the_image_away(dtype: torch.dtype, least: float) -> None:
    """Balunovic et al., 2022: more than 150 dB on the MLP of five layers of 500, 3,072 inputs."""
    model = precode(mlp(SHAPE, CLASSES, hidden=[500] * 5)).to(dtype)
    mean, std = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    links = chain(local_sgd(0.1))
    known = Knowledge(model, links, SHAPE, CLASSES, 1, mean, std)
    client, params = links(gradient(model, normalise=known.normalise)), detached_params(model)
    batches = [Batch(torch.rand(1, *SHAPE, generator=seeded(i)), torch.tensor([3 * i])) for i in range(3)]
    updates: list[Update] = [client(params, Batch(b.x.to(dtype), b.y), seeded(9 + i)) for i, b in enumerate(batches)]
    wave = Wave.stack([Observation(1, i, params, u) for i, u in enumerate(updates)])
    streams = [partial(generator, "precode", i) for i in range(3)]
    for batch, found in zip(batches, analytic().reconstruct(wave, known, Budget(1), streams), strict=True):
        assert found.x is not None, found.reason
        assert float(psnr(batch.x, found.x)) > least
        assert found.y is not None
        assert found.y.tolist() == batch.y.tolist(), "the label is read off the last layer as ever"
