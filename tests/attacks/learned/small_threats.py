"""Small images, networks and threat models for the learned attacks' tests."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge, Observation, Wave
from fedgauge.client.chain import Chain, chain
from fedgauge.client.data.images import mnist5k
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
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
    batch_size: int = 1, count: int = 400, links: Chain = CHAINS["bare"], seed: int = 0
) -> tuple[Knowledge, Wave, list[Tensor]]:
    """An MLP on digits of 14 x 14, with auxiliary images and the updates of four clients that hold others."""
    data = mnist5k()
    x = nn.functional.avg_pool2d(data.x[: count + 4 * batch_size].float() / 255, 2)
    y = data.y[: count + 4 * batch_size]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp((1, 14, 14), 10, hidden=(32,)).eval()
    auxiliary = Batch(x[:count], y[:count])
    known = Knowledge(model, links, (1, 14, 14), 10, batch_size, (0.13,), (0.31,), auxiliary=auxiliary)
    params, client = detached_params(model), links(gradient(model, normalise=known.normalise))
    batches = [Batch(*(t[count + k * batch_size :][:batch_size] for t in (x, y))) for k in range(4)]
    seen = [Observation(1, k, params, client(params, b, generator("client", k))) for k, b in enumerate(batches)]
    return known, Wave.stack(seen), [b.x for b in batches]


STREAMS: list[Any] = [partial(generator, "learned", k) for k in range(4)]
