"""A user's components that work, and raise at one place each: the place that the environment variable HOOK names."""

import os
from dataclasses import dataclass

import torch
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn import functional as F

from fedgauge.attacks.base import Attack, Reconstruction
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.transforms import BatchTransform, UpdateTransform


class Mishap(Exception):
    """An exception that no library raises."""


def chosen(place: str) -> bool:
    return os.environ.get("HOOK") == place


def here(place: str) -> None:
    if chosen(place):
        raise Mishap(f"raised by {place}")


def stripes() -> Dataset:
    here("data")
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(2, (60,), generator=rng)
    x = torch.randint(100, (60, 1, 6, 6), generator=rng, dtype=torch.uint8)
    x[torch.arange(60), 0, :, 1 + 3 * y] = 255
    if chosen("images as an array"):
        x = x.numpy()
    return Stripes("stripes", x[20:], y[20:], x[:20], y[:20], 2, (0.25,), (0.3,))


class Stripes(Dataset):
    def normalise(self, x):
        here("normalise")
        return super().normalise(x)


class Small(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        here("model")
        self.hidden, self.head = nn.Linear(36, 8), nn.Linear(8, classes)

    def forward(self, x):
        here("forward")
        return self.head(self.hidden(x.flatten(1)).relu())


def network(shape, classes):
    return Small if chosen("a class as the model") else Small(shape, classes)


def cost(logits, y):
    here("loss")
    return F.cross_entropy(logits, y)


@dataclass(frozen=True)
class dimmed(BatchTransform):
    def __post_init__(self):
        here("link built")

    def transform(self, batch, rng):
        here("transform")
        return batch


@dataclass(frozen=True)
class shrink(UpdateTransform):
    def apply(self, update, rng):
        here("apply")
        if chosen("apply of attackers") and rng is None:
            raise Mishap("raised by apply of attackers")
        if chosen("apply of another type"):
            return list(update)
        return {name: t / 2 for name, t in update.items()}

    @property
    def mean(self):
        here("mean")
        return self


@dataclass(frozen=True)
class guess(Attack):
    def __post_init__(self):
        here("attack built")

    def reconstruct(self, wave, known, budget, streams):
        return [
            Reconstruction(torch.rand(known.batch_size, *known.shape, generator=s("x")), None, 0.5, 1, 0.1, "converged")
            for s in streams
        ]


class Average(FedAvg):
    def __init__(self, fraction_evaluate: float = 0.0):
        super().__init__(fraction_evaluate=fraction_evaluate, min_train_nodes=1, min_available_nodes=1)
        here("strategy built")
