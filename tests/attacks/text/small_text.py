"""Small language models, batches of sentences, and what a server sees of them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Attack, Budget, Knowledge, Observation, Reconstruction, Wave
from fedgauge.client.chain import Chain
from fedgauge.client.data.corpora import Text
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.language import LanguageModel, tiny_bert, tiny_gpt2
from fedgauge.client.models.losses import next_token
from fedgauge.client.models.vision import detached_params, floating_buffers
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Loss, Params, Transform

LENGTH = 12
SGD = local_sgd(0.1)


def bert(data: Text, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    return tiny_bert(data.shape, data.tokenizer, "classification", 2, **options)


def gpt2(data: Text, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    return tiny_gpt2(data.shape, data.tokenizer, "next_token", **options)


def batches(data: Text, n: int, size: int) -> list[Batch]:
    chosen = torch.randperm(len(data.x), generator=generator("chosen", n, size))[: n * size].view(n, size)
    return [Batch(data.x[rows], data.y[rows]) for rows in chosen]


def loss_of(model: LanguageModel) -> Loss:
    return F.cross_entropy if model.task == "classification" else next_token()


def seen(
    model: LanguageModel,
    truth: list[Batch],
    links: tuple[Transform, ...] = (SGD,),
    params: Params | None = None,
    classes: int = 2,
    **known: Any,
) -> tuple[Wave, Knowledge]:
    """What clients upload of these batches, and what their server knows."""
    chain, params = Chain(links), params or detached_params(model)
    client = chain(gradient(model, loss_of(model)))
    updates = [client(params, b, generator("client", k)) for k, b in enumerate(truth)]
    observations = [
        Observation(1, k, params, {n: t.detach() for n, t in update.items()}, floating_buffers(model))
        for k, update in enumerate(updates)
    ]
    size, length = truth[0].x.shape
    classes = classes if model.task == "classification" else model.vocabulary
    told = {"loss": loss_of(model), **known}
    return Wave.stack(observations), Knowledge(model, chain, (length,), classes, size, (), (), **told)


def read(attack: Attack, wave: Wave, known: Knowledge, budget: Budget | None = None) -> list[Reconstruction]:
    streams = [partial(generator, "test", k) for k in wave.clients]
    return attack.reconstruct(wave, known, budget or Budget(1), streams)


def labelled(x: Tensor, y: Tensor | None) -> list[tuple[list[int], int]]:
    """A batch's sentences with their labels, in an order of their own."""
    labels = [0] * len(x) if y is None or y.dim() > 1 else y.tolist()
    return sorted(zip(x.tolist(), labels, strict=True))


def recovered(found: list[Reconstruction], truth: list[Batch]) -> list[bool]:
    return [f.x is not None and labelled(f.x, f.y) == labelled(t.x, t.y) for f, t in zip(found, truth, strict=True)]


def certified(found: list[Reconstruction]) -> bool:
    return all(f.status == "converged" and f.reason.startswith("certified") for f in found)


def refused(found: list[Reconstruction], word: str) -> bool:
    """Whether all are not applicable, for a reason with this word."""
    return all((f.status, f.x, f.y) == ("not_applicable", None, None) and word in f.reason for f in found)
