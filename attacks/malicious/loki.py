"""LOKI (Zhao et al., IEEE S&P 2024): kernels of its own for each client keep the images of a secure sum apart.

Convolutions stand before the fully connected layer that sorts images (imprint.py), a set of kernels for each client of a sum. A
client's own set passes the image on, all others are zero, so that its images reach columns of the layer's gradient that no other
client writes to. All clients have the same layer, and a sum over them mixes only its biases: it leaks as many images of each as an
update of one client does, however many clients it has.

The paper scales what it reads, as the sum of biases hides a client's error signal. Here one kernel more in each set carries a
constant, whose columns are the client's own bias gradient, so that images are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.malicious.carried_input import check_images
from fedgauge.attacks.malicious.decoding import ClosedForm, LayerRows, Reader, read_images
from fedgauge.attacks.malicious.imprint import sorting_query
from fedgauge.attacks.malicious.server_attack import ServerAttack, part_of
from fedgauge.client.components import Table, check_above_zero
from fedgauge.client.models.vision import Shape
from fedgauge.client.update import Params

# -------------------------------------------------------------------------------------------------------- architecture


class ClientKernels(nn.Module):
    """A network behind convolutions and a fully connected block that adds its output to the image; untrained, it adds nothing.

    Args:
        members: sets of kernels, each with one for every channel of an image and one for a constant.
    """

    def __init__(self, model: nn.Module, shape: Shape, members: int, bins: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.members = members
        self.kernels = nn.Conv2d(channels, members * (channels + 1), 3, padding=1)
        self.query = nn.Linear(members * (channels + 1) * height * width, bins)
        self.back = nn.Linear(1, channels * height * width, bias=False)
        nn.init.zeros_(self.back.weight)
        self.rest = model

    def forward(self, x: Tensor) -> Tensor:
        read = self.query(self.kernels(x).flatten(1))
        # the mean: if each row had its own weight, local steps would make their error signals differ
        logits: Tensor = self.rest(x + self.back(F.relu(read).mean(1, keepdim=True)).view_as(x))
        return logits


def client_kernels(model: nn.Module, shape: Shape, members: int = 4, bins: int = 64) -> ClientKernels:
    """The model behind a set of kernels for each of `members` clients and a block of `bins` rows, which leave images unchanged."""
    if members < 1 or bins < 1:
        raise ValueError(f"members and bins must be at least 1, got {members} and {bins}")
    check_images(shape)
    return ClientKernels(model, shape, members, bins)


# -------------------------------------------------------------------------------------------------------- server attack


@dataclass(frozen=True)
class loki(ServerAttack):
    """Gives each client of a secure sum kernels of its own, and all of them a layer that sorts images by brightness.

    Args:
        members: clients of a sum, at most; bins: rows of the block.
        strength: as of `imprint`.
        place: of the client whose kernels pass the image on, counted from 0 in its sum.
    """

    members: int = 4
    bins: int = 64
    strength: float = 1e-2
    place: int = 0

    def __post_init__(self) -> None:
        if self.members < 1 or self.bins < 1:
            raise ValueError(f"members and bins must be at least 1, got {self.members} and {self.bins}")
        check_above_zero(self, "strength")
        if not 0 <= self.place < self.members:
            raise ValueError(f"place must lie in 0..{self.members - 1}, got {self.place}: raise members")

    @property
    def architecture(self) -> Table:
        return {"use": "client_kernels", "members": self.members, "bins": self.bins}

    def for_member(self, place: int) -> "loki":
        return replace(self, place=place)

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        prefix, front = part_of(known.model, ClientKernels, "client_kernels")
        if (front.members, front.query.out_features) != (self.members, self.bins):
            raise ValueError(
                f"the network has kernels for {front.members} clients and {front.query.out_features} rows, and loki was given "
                f"members = {self.members} and bins = {self.bins}"
            )
        row, bias, back = sorting_query(self.bins, self.strength, known, rng)
        channels = known.shape[0]
        kernels, constants = torch.zeros_like(front.kernels.weight), torch.zeros(len(front.kernels.weight))
        own = range(self.place * (channels + 1), (self.place + 1) * (channels + 1) - 1)
        kernels[own, range(channels), 1, 1] = 1
        constants[own.stop] = 1
        blank = torch.zeros(front.kernels.out_channels // self.members * known.shape[1] * known.shape[2] - len(row))
        made = {
            "kernels.weight": kernels,
            "kernels.bias": constants,
            "query.weight": torch.cat([row, blank.to(row)]).repeat(self.members).expand(self.bins, -1),
            "query.bias": bias,
            "back.weight": back,
        }
        return {**sent, **{prefix + k: t.to(sent[prefix + k]).contiguous() for k, t in made.items()}}


# ------------------------------------------------------------------------------------------------------------- decoder


@dataclass(frozen=True)
class read_kernels(ClosedForm):
    """Reads the images of each client of a secure sum from its own columns: each bin's image, or the mean of several.

    Clients may take several local steps, and one update is a sum of one.
    """

    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        prefix, front = part_of(known.model, ClientKernels, "client_kernels")
        return partial(_read, known, f"{prefix}query", front.members)


def _read(known: Knowledge, layer: str, members: int, alone: Wave) -> Reconstruction:
    rows = _of_clients(LayerRows.of(alone.alone(0), layer), known, members)
    return read_images(torch.cat([part.differences().images(known) for part in rows]), alone, known)


def _of_clients(rows: LayerRows, known: Knowledge, members: int) -> list[LayerRows]:
    """Each client's rows: its part of the columns, and its bias gradient from the constant beside the image."""
    pixels, found = known.shape[1] * known.shape[2], []
    for part in rows.weight.chunk(members, 1):
        own = LayerRows(rows.layer, part[:, :-pixels], part[:, -pixels:].mean(1))
        if not own.reason:
            found.append(own)
    return found
