"""Small images, networks and threat models for the learned attacks' tests."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge, Observation, Wave
from fedgauge.attacks.modality.image_metrics import match, mse
from fedgauge.client.chain import Chain, chain
from fedgauge.client.data.images import mnist5k
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.transforms import GroupMean, per_example
from fedgauge.client.update import Batch
from fedgauge.defenses.clip import clip
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign

SHAPE = (1, 8, 8)
CHAINS = {
    "bare": chain(local_sgd(0.5)),
    "local steps": chain(local_sgd(0.1, 3)),
    "slices": chain(local_sgd(0.1, 2, batch_size=1)),
    "prune": chain(prune(0.1), local_sgd(1.0)),
    "sign of each": chain(per_example(sign()), local_sgd(1.0)),
    "clip of each, then sign": chain(per_example(clip(0.1)), local_sgd(1.0), sign()),
    "sum of two": Chain((prune(0.2), local_sgd(1.0), GroupMean(2))),
}


def images(n: int, shape: tuple[int, int, int] = SHAPE, classes: int = 4) -> Batch:
    rng = generator("images", n)
    return Batch(torch.rand(n, *shape, generator=rng), torch.randint(classes, (n,), generator=rng))


def digits(
    batch_size: int = 1, links: Chain = CHAINS["bare"], clients: int = 4, given: bool = False, **network: Any
) -> tuple[Knowledge, Wave, list[Tensor]]:
    """An MLP on digits of 14 x 14, with 400 auxiliary images and the updates of clients that hold others."""
    data, count = mnist5k(), 400
    x = nn.functional.avg_pool2d(data.x[: count + clients * batch_size].float() / 255, 2)
    y = data.y[: len(x)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mlp((1, 14, 14), 10, **{"hidden": (32,), **network}).eval()
    known = Knowledge(
        model, links, (1, 14, 14), 10, batch_size, (0.13,), (0.31,),
        labels=y[count:].view(clients, batch_size).sort(1).values if given else None,
        auxiliary=Batch(x[:count], y[:count]),
    )  # fmt: skip
    params, client = detached_params(model), links(gradient(model, normalise=known.normalise))
    batches = [Batch(*both) for both in zip(x[count:].split(batch_size), y[count:].split(batch_size), strict=True)]
    seen = [Observation(1, k, params, client(params, b, generator("client", k))) for k, b in enumerate(batches)]
    return known, Wave.stack(seen), [b.x for b in batches]


def error_of(found: list[Any], truth: list[Tensor]) -> float:
    return float(torch.stack([mse(t, r.x[match(t, r.x)]).mean() for r, t in zip(found, truth, strict=True)]).mean())


STREAMS: list[Any] = [partial(generator, "learned", k) for k in range(4)]
