"""A tiny network, its clients' updates, and one attack's objective on them, for the tests of gradient matching."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Observation, Stream, Wave
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, lenet
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Params, Update

SHAPE, CLASSES = (1, 8, 8), 4
MEAN, STD = (0.3,), (0.6,)


def normalise(x: Tensor) -> Tensor:
    return (x - MEAN[0]) / STD[0]


def network() -> nn.Module:
    torch.manual_seed(0)
    return lenet(SHAPE, CLASSES)


def truth(seed: int, n: int = 2) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(n, *SHAPE, generator=rng), torch.randint(CLASSES, (n,), generator=rng).sort().values)


def streams(*numbers: int) -> list[Stream]:
    return [partial(generator, "matching", n) for n in numbers]


def scene(
    clients: int = 1, n: int = 2, links: Chain | None = None, labels: bool = True, model: nn.Module | None = None
) -> tuple[Wave, Knowledge, list[Batch]]:
    """What a server sees of some clients with random images, and an attacker who knows all but the images."""
    model, links = model or network(), links or chain(local_sgd(0.1))
    params = detached_params(model)
    batches = [truth(seed, n) for seed in range(clients)]
    client = links(gradient(model, normalise=normalise))
    wave = Wave.stack([Observation(1, c, params, client(params, b, None)) for c, b in enumerate(batches)])
    known = Knowledge(
        model=model,
        chain=links,
        shape=SHAPE,
        classes=CLASSES,
        batch_size=n,
        mean=MEAN,
        std=STD,
        labels=torch.stack([b.y for b in batches]) if labels else None,
    )
    return wave, known, batches


Parts = list[Tensor]


def plain_gradient(model: nn.Module, params: Parts, x: Tensor, y: Tensor) -> Parts:
    names = [name for name, _ in model.named_parameters()]
    loss = F.cross_entropy(functional_call(model, dict(zip(names, params, strict=True)), (x,)), y)
    return list(torch.autograd.grad(loss, params, create_graph=True))


def plain_step(model: nn.Module, params: Parts, x: Tensor, y: Tensor, clipped: bool) -> Parts:
    """One local step's gradient, each example's clipped to norm 1 or not."""
    if not clipped:
        return plain_gradient(model, params, x, y)
    total = [torch.zeros_like(p) for p in params]
    for i in range(len(x)):
        g = plain_gradient(model, params, x[i : i + 1], y[i : i + 1])
        size = torch.cat([t.flatten() for t in g]).norm()
        total = [t + u * torch.clamp(1.0 / size, max=1.0) for t, u in zip(total, g, strict=True)]
    return [t / len(x) for t in total]


def plain_update(model: nn.Module, start: Params, z: Tensor, y: Tensor, steps: int, clipped: bool) -> Parts:
    params = [p.clone().requires_grad_() for p in start.values()]
    first = params
    for _ in range(steps):
        g = plain_step(model, params, z, y, clipped)
        params = [p - 0.1 * t for p, t in zip(params, g, strict=True)]
    return [p - q for p, q in zip(params, first, strict=True)]


def plain_objective(
    model: nn.Module, start: Params, seen: Update, z: Tensor, y: Tensor, distance: str, tv: float, **client: Any
) -> Tensor:
    expected = torch.cat([t.flatten() for t in plain_update(model, start, z, y, **client)])
    target = torch.cat([seen[k].flatten() for k in start])
    if distance == "cosine":
        value = 1 - F.cosine_similarity(expected, target, dim=0)
    else:
        value = (expected - target).square().sum() / target.square().sum()
    rough = (z[..., 1:] - z[..., :-1]).abs().mean() + (z[..., 1:, :] - z[..., :-1, :]).abs().mean()
    return value + tv * rough
