"""LOKI (Zhao et al., IEEE S&P 2024): kernels of its own for each client keep the images of a secure sum apart.

A set of kernels for each client precedes the fully connected layer that sorts images (imprint.py). A client's own set passes the
image on and all others are zero, so its images reach columns of the layer's gradient to which no other client contributes. The
sum mixes only biases. An additional kernel in each set therefore carries a constant: its columns are the client's own bias
gradient, so images are exact, which the paper approximates by scaling.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Observation, Wave
from fedgauge.attacks.exact.closed_form import ClosedForm, Reader
from fedgauge.attacks.malicious.imprint import SortingBlock, planted, read_bins, sorting_block, sorting_query
from fedgauge.attacks.malicious.server_attack import ServerAttack
from fedgauge.client.components import Count, Natural, Table
from fedgauge.client.models.vision import Shape, check_images
from fedgauge.client.update import Params


def client_kernels(model: nn.Module, shape: Shape, members: int = 4, bins: int = 64) -> SortingBlock:
    """The model behind a set of kernels for each of `members` clients and a block of `bins` rows, which leave images unchanged."""
    check_images(shape)
    return SortingBlock(model, shape, bins, members)


@dataclass(frozen=True)
class loki(ServerAttack):
    """Gives each client of a secure sum its own kernels, before a layer that sorts images by brightness.

    Args:
        members: clients of a sum, at most; bins: rows of the block.
        place: of the client with kernels that pass the image on, counted from 0 in its sum.
    """

    members: Count = 4
    bins: Count = 64
    place: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.place >= self.members:
            raise ValueError(f"place must be below members = {self.members}, got {self.place}")

    @property
    def architecture(self) -> Table:
        return {"use": "client_kernels", "members": self.members, "bins": self.bins}

    def for_member(self, place: int) -> "loki":
        return replace(self, place=place)

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        prefix, _ = sorting_block(known, self.bins, self.members)
        row, bias, back = sorting_query(self.bins, known, rng)
        channels, height, width = known.shape
        kernels, constants = (torch.zeros_like(sent[f"{prefix}kernels.{part}"]) for part in ("weight", "bias"))
        own = range(self.place * (channels + 1), (self.place + 1) * (channels + 1) - 1)
        kernels[own, range(channels), 1, 1] = 1
        constants[own.stop] = 1
        parts = {
            "kernels.weight": kernels,
            "kernels.bias": constants,
            "query.weight": F.pad(row, (0, height * width)).repeat(self.members),  # nothing reads the constants
            "query.bias": bias,
            "back.weight": back,
        }
        return planted(sent, prefix, parts)


@dataclass(frozen=True)
class read_kernels(ClosedForm):
    """Reads the images of each client of a secure sum from its own columns: each bin's image, or the mean of several.

    Clients may take several local steps, and one update is a sum of one.
    """

    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        prefix, block = sorting_block(known, members=1)
        return partial(read_bins, f"{prefix}query", members=block.members)
