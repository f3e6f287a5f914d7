"""Imprinting (Fowl et al., Robbing the Fed, ICLR 2022): a block before the network sorts a batch into bins, ideally one image each.

All rows of the block measure the same linear query q, and row k is on where q(x) > t_k, t_0 < t_1 < ... The block outputs
their mean, so an image's error signal s(x) is the same in every row that it turns on, and

    dL/dw_k - dL/dw_(k+1) = sum of s(x) x over t_k < q(x) <= t_(k+1),     the same of the biases: sum of s(x).

Their ratio is the image where the bin holds only one. K rows make K bins because the lowest threshold is below every
possible image and the last row is a bin of its own: each bin then holds 1/K of the images, and one of N images has its own
bin with probability (1 - 1/K)^(N-1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.exact.closed_form import ClosedForm, Reader
from fedgauge.attacks.malicious.decoding import LayerRows, decoded, input_to_pixels, on_grid, snap_to_grid
from fedgauge.attacks.malicious.server_attack import ServerAttack
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.client.components import Count, Table
from fedgauge.client.label_kinds import LabelKind
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.vision import Shape, check_images
from fedgauge.client.update import Batch, Params

BEYOND = 10.0  # standard deviations of the query below the lowest quantile of rows, where no row lies
# roughly how far the block moves an image, in units of the network's input: gradients' ratios do not depend on it
STRENGTH = 1e-2
EQUAL = 1e-4  # relative difference up to which two error signals are equal
POINTS = 1024  # at which the distribution of the query is tabulated


class SortingBlock(nn.Module):
    """A network behind a fully connected block that adds its output to the image; untrained, it adds nothing.

    Args:
        members: sets of kernels in front of the block (loki.py), each with one for every channel of an image and one for a
            constant; 0: the block reads the image itself.
    """

    def __init__(self, model: nn.Module, shape: Shape, bins: int, members: int = 0) -> None:
        super().__init__()
        channels, size = shape[0], math.prod(shape)
        self.members, read = members, members * (channels + 1) or channels
        self.kernels = nn.Conv2d(channels, read, 3, padding=1) if members else nn.Identity()
        self.query = nn.Linear(read * size // channels, bins)
        self.back = nn.Linear(1, size, bias=False)
        nn.init.zeros_(self.back.weight)
        self.rest = model

    def forward(self, x: Tensor) -> Tensor:
        # the mean: if each row had its own weight, local steps would make their error signals differ
        added = self.back(F.relu(self.query(self.kernels(x).flatten(1))).mean(1, keepdim=True))
        logits: Tensor = self.rest(x + added.view_as(x))
        return logits


def imprint_block(model: nn.Module, shape: Shape, bins: int = 64) -> SortingBlock:
    """The model behind a fully connected block of `bins` rows, which leaves examples unchanged until it is crafted.

    Raises:
        ValueError: the examples are neither images nor rows of a table.
    """
    if len(shape) != 1 or isinstance(model, LanguageModel):
        check_images(shape)
    return SortingBlock(model, shape, bins)


def sorting_block(known: Knowledge, bins: int | None = None, members: int = 0) -> tuple[str, SortingBlock]:
    """The block, after its prefix in parameter names.

    Raises:
        ValueError: the network lacks it, or one of such a size.
    """
    for name, block in known.model.named_modules():
        if not isinstance(block, SortingBlock) or bool(block.members) != bool(members):
            continue
        if bins is None or (block.query.out_features, block.members) == (bins, members):
            return f"{name}." if name else "", block
    size = "" if bins is None else f" with {bins} bins" + (f" and {members} members" if members else "")
    raise ValueError(f"the model needs the architecture {'client_kernels' if members else 'imprint_block'}{size}")


@dataclass(frozen=True)
class imprint(ServerAttack):
    """Makes an added block sort images into bins by brightness.

    Thresholds are quantiles of the public images' brightness, smoothed by a normal kernel.

    Args:
        bins: K, rows of the block.
    """

    bins: Count = 64

    @property
    def architecture(self) -> Table:
        return {"use": "imprint_block", "bins": self.bins}

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        prefix, _ = sorting_block(known, self.bins)
        row, bias, back = sorting_query(self.bins, known, rng)
        return planted(sent, prefix, {"query.weight": row, "query.bias": bias, "back.weight": back})


def planted(sent: Params, prefix: str, parts: Params) -> dict[str, Tensor]:
    """The weights with these parts in place of those below a prefix; one row serves all rows."""
    made = {prefix + k: t.to(sent[prefix + k]).expand(sent[prefix + k].shape).contiguous() for k, t in parts.items()}
    return {**sent, **made}


def sorting_query(bins: int, known: Knowledge, rng: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A row (pixels,) that all bins share, their biases (bins,), and weights (pixels, 1) by which the block moves the image."""
    weights = 0.5 + torch.rand(math.prod(known.shape), generator=rng, dtype=torch.float64)
    weights /= weights.sum()
    signs = torch.randint(0, 2, weights.shape, generator=rng).double() * 2 - 1
    values = known.enough(2).x.flatten(1).double() @ weights
    spread, quantiles = float(values.std()), quantile_levels(values, bins)
    below = -spread  # below every image: pixels are not negative
    if len(known.shape) == 1:
        below = float(quantiles.min()) - BEYOND * spread
    levels = torch.cat([torch.tensor([below], dtype=torch.float64), quantiles])
    scale, offset = input_to_pixels(known)
    return weights * scale / spread, (weights @ offset - levels) / spread, (signs * STRENGTH)[:, None]


def quantile_levels(values: Tensor, bins: int) -> Tensor:
    """The bins - 1 thresholds, float64, that divide values (n,) evenly, also values in between.

    Quantiles of the values smoothed by a normal kernel with Azzalini's width for distribution functions (1981).
    """
    width = 1.3 * float(values.std()) * len(values) ** (-1 / 3)
    if not width > 0:
        raise ValueError("the query is the same for all public images: no threshold can separate them")
    lowest, highest = float(values.min()) - 4 * width, float(values.max()) + 4 * width
    points = torch.linspace(lowest, highest, POINTS, dtype=torch.float64)
    near = ((values - lowest) / (highest - lowest) * (POINTS - 1)).round().long()  # far finer than the kernel
    share = torch.bincount(near, minlength=POINTS).double() / len(values)
    apart = torch.arange(1 - POINTS, POINTS, dtype=torch.float64) * ((points[1] - points[0]) / width)
    below = torch.special.ndtr(apart).unfold(0, POINTS, 1) @ share.flip(0)  # row i: of points i - j
    return torch.from_numpy(np.interp(np.arange(1, bins) / bins, below.numpy(), points.numpy()))


@dataclass(frozen=True)
class read_imprint(ClosedForm):
    """Reads the images or rows of an imprinted batch: each bin's example, or a weighted mean of several.

    Clients may take several local steps, and the batch may be that of a secure sum. Rows are only proven from one gradient, by
    their classes (`sole_rows`).
    """

    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        prefix, _ = sorting_block(known)
        return partial(read_rows if len(known.shape) == 1 else read_bins, f"{prefix}query")


def read_rows(layer: str, alone: Wave, known: Knowledge) -> Reconstruction:
    """The rows of one observation, each from the difference of two rows of a layer that reads them; proven ones first."""
    bins = LayerRows.of(alone.alone(0), layer).differences().strongest()
    x = (bins.weight / bins.bias[:, None]).float()
    proven = sole_rows(x, bins.bias * known.batch_size / known.scale, f"{layer}.bias", alone, known)
    x = known.examples(torch.cat([x[proven], x[~proven]]))
    return decoded(x, int(proven.sum()), alone, known, "by the error signal of their bin")


def sole_rows(x: Tensor, signals: Tensor, bias: str, alone: Wave, known: Knowledge) -> Tensor:
    """Return whether each row x (m, D) is the only one of its bin, (m,): the bin's error signal is then its own.

    The server computes the signal of the row under each class. Several rows add their signals up, so their mean, read as one row,
    has another. A number as label can explain any signal and proves nothing. After Diana et al. (2026, VGIA), who test the subspace
    of several queries instead.

    Args:
        signals: (m,) of the bins, of the sum of the examples' gradients.
        bias: name of the parameter; every example activates its first entry.
    """
    if type(known.label_kind) is not LabelKind or not known.chain.local.one_gradient:
        return torch.zeros(len(x), dtype=torch.bool)
    y = torch.arange(known.classes).repeat_interleave(len(x))
    entry = torch.zeros_like(alone.params[bias])
    entry[0] = 1
    direction = torch.cat([(entry if k == bias else torch.zeros_like(p)).flatten() for k, p in alone.params.items()])
    gradients = CandidateGradients(known, alone.params, Batch(x.repeat(known.classes, 1), y))
    own = gradients.products(direction[None]).view(known.classes, len(x))
    found: Tensor = ((own - signals).abs() <= EQUAL * signals.abs()).any(0)
    return found


def read_bins(layer: str, alone: Wave, known: Knowledge, members: int = 0) -> Reconstruction:
    """The images of one observation, each from the difference of two rows of a layer that reads images.

    Args:
        members: clients with columns and a constant input of their own, which shows their bias gradient; 0: one for all columns.
    """
    rows, pixels = LayerRows.of(alone.alone(0), layer), known.shape[1] * known.shape[2]
    parts = [rows]
    if members:
        split = rows.weight.chunk(members, 1)
        parts = [LayerRows(part[:, :-pixels], part[:, -pixels:].mean(1)) for part in split]
    found = [part.differences().images(known) for part in parts if bool(part.bias.any())]
    x = torch.cat(found)
    exact = on_grid(x)
    return decoded(torch.cat([snap_to_grid(x[exact]), x[~exact]]), int(exact.sum()), alone, known)
