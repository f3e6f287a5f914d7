"""Scale-MIA (Shi et al., NDSS 2025): the network's own first fully connected layer sorts a batch into bins by its features.

As in imprint.py all rows of that layer measure one linear query, here of the features h that the layers before it make, and the
next layer reads the mean of the rows. Differences of neighbouring rows give h of each image with its own bin.

The paper trains an autoencoder on public images. Here both parts have a closed form: the layers before keep the principal
components of their inputs (optimised_features.py). The decoder is the best linear estimate from public images, of the whole
image or of each part of it from the features around that part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from fedgauge.attacks.base import Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.engine.computation import activation_between, layer_calls
from fedgauge.attacks.exact.closed_form import ClosedForm, Reader
from fedgauge.attacks.malicious.decoding import LayerRows, decoded
from fedgauge.attacks.malicious.imprint import planted, quantile_levels, read_bins
from fedgauge.attacks.malicious.optimised_features import (
    TINY,
    LinearEstimate,
    layer_input,
    principal_layers,
    public_images,
)
from fedgauge.attacks.malicious.server_attack import ServerAttack
from fedgauge.client.update import Params

RIDGES = (1e-2, 1e-4, 1e-6, 1e-8)  # as parts of the features' mean variance
PARTS = 1 << 12  # of images, to which the estimate of parts is fitted
RARE = 1e-3  # probability that noise alone passes for an image
ROUNDED = 1e-5  # of the features' root mean square: what float32 leaves of them in a difference of rows


def _head(known: Knowledge) -> tuple[str, str, bool]:
    """Names of the fully connected layer that reads the features and of the next one; True if the features are the image itself.

    Raises:
        ValueError: there are none.
    """
    calls = layer_calls(known.model, known.shape)
    for first, second in pairwise(calls):
        if first.dense:
            if first.bias and second.dense and activation_between(first, second) == "relu":
                return first.name, second.name, first is calls[0]
            break
    raise ValueError("no fully connected layer with a bias, a ReLU and another such layer behind it")


@dataclass(frozen=True)
class scale_mia(ServerAttack):
    """Makes the first fully connected layer sort images by a random query of their features."""

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        first, second, direct = _head(known)
        made = dict(sent) if direct else principal_layers(first, sent, known)
        h = layer_input(known, made, first, public_images(known)).flatten(1).double()
        query = torch.randn(h.shape[1], generator=rng, dtype=torch.float64) / h.shape[1] ** 0.5
        values = h @ query
        spread = float(values.std())
        weight, onward = made[f"{first}.weight"], made[f"{second}.weight"]
        lowest = values.min() - 3 * spread  # below every image
        levels = torch.cat([lowest[None], quantile_levels(values, len(weight))])
        # half of them negative: of weights that are all alike a classifier has no gradient
        signs = 1.0 - 2.0 * (torch.randperm(len(onward), generator=rng) % 2)
        parts = {
            f"{first}.weight": query / spread,
            f"{first}.bias": -levels / spread,
            f"{second}.weight": (1.0 / len(weight) * signs)[:, None],
        }
        return planted(made, "", parts)


@dataclass(frozen=True)
class read_latents(ClosedForm):
    """Reads the features of each image that has its own bin, and estimates the image by public images.

    Of several images in one bin it gives the mean. Nothing is proven exact, unless the features are the image itself.
    """

    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        first, _, direct = _head(known)
        if direct:
            return partial(read_bins, first)
        return partial(_read, first, _Decoder.fitted(wave.params, known, first))


def _read(layer: str, decoder: "_Decoder", alone: Wave, known: Knowledge) -> Reconstruction:
    rows = LayerRows.of(alone.alone(0), layer)
    bins = rows.differences()
    strongest = bins.bias.abs().argsort(descending=True)[: known.batch_size]
    bias = bins.bias[strongest]
    noise = known.chain.update_distribution
    variance = 2 * noise.variance if noise else 0.0  # of a difference of two rows
    # the largest of as many squares of noise: what is below is not taken for an image
    largest = 2 * math.log(len(rows.bias) / RARE) * variance
    x = decoder(bins.weight[strongest] / bias[:, None], variance / (bias.square() - largest).clamp(min=TINY * variance))
    return decoded(x, 0, alone, known, "estimates by public images")


@dataclass(frozen=True, eq=False)
class _Decoder:
    """The best linear estimate of images from features.

    Args:
        estimate: of what differs from the mean image, from what differs from the mean features.
        h: (d,) mean features; x: (C, H, W) mean image.
        parts: (c, h, w) of the features where each of h x w parts of an image is estimated from those around it; None: the whole
            image from all features.
    """

    estimate: LinearEstimate
    h: Tensor
    x: Tensor
    parts: tuple[int, ...] | None

    @classmethod
    def fitted(cls, params: Params, known: Knowledge, layer: str) -> "_Decoder":
        """The better one, on public images that it is not fitted to."""
        x = public_images(known)
        h = layer_input(known, params, layer, x).flatten(1).double()
        grid = _grid(known, params, layer, x[:1])
        half = len(x) // 2
        noise = torch.full((len(x) - half,), (ROUNDED**2) * float(h.square().mean()), dtype=torch.float64)
        best: tuple[tuple[int, ...] | None, float] = (None, RIDGES[0])
        least = float("inf")
        for parts in (None, *([grid] if grid else [])):
            fit = cls._fit(h[:half], x[:half], parts)
            for ridge in RIDGES:
                tried = fit._at(ridge, h)
                off = float((tried(h[half:], noise) - x[half:]).square().mean())
                if off < least:
                    best, least = (parts, ridge), off
        return cls._fit(h, x, best[0])._at(best[1], h)

    @classmethod
    def _fit(cls, h: Tensor, x: Tensor, parts: tuple[int, ...] | None) -> "_Decoder":
        middle = h.mean(0), x.double().mean(0)
        h, x = h - middle[0], x - middle[1]
        if parts is None:
            return cls(LinearEstimate.fitted(h, x, 0.0), *middle, parts)
        few = max(1, PARTS // (parts[1] * parts[2]))
        tiles = F.pixel_unshuffle(x[:few], x.shape[2] // parts[1]).flatten(2).transpose(1, 2).flatten(0, 1)
        return cls(LinearEstimate.fitted(_around(h[:few], parts), tiles, 0.0), *middle, parts)

    def _at(self, ridge: float, h: Tensor) -> "_Decoder":
        return replace(self, estimate=replace(self.estimate, ridge=ridge * float(h.var(0).mean())))

    def __call__(self, h: Tensor, noise: Tensor) -> Tensor:
        """Images (n, C, H, W) from features h (n, d) with noise of these variances (n,)."""
        h = h - self.h
        if self.parts is None:
            return (self.x + self.estimate(h, noise).view(-1, *self.x.shape)).clamp(0, 1)
        _, high, wide = self.parts
        tiles = self.estimate(_around(h, self.parts), noise.repeat_interleave(high * wide))
        folded = tiles.view(len(h), high * wide, -1).transpose(1, 2).reshape(len(h), -1, high, wide)
        return (self.x + F.pixel_shuffle(folded, self.x.shape[1] // high)).clamp(0, 1)


def _around(h: Tensor, parts: tuple[int, ...]) -> Tensor:
    """The features (n h w, 9 c) in and around each part, from features (n, c h w)."""
    return F.unfold(h.view(-1, *parts), 3, padding=1).transpose(1, 2).flatten(0, 1)


def _grid(known: Knowledge, params: Params, layer: str, x: Tensor) -> tuple[int, ...] | None:
    """(c, h, w) of the features that a layer reads, where they form a grid that divides the image into equal squares."""
    met: list[tuple[int, ...]] = []

    def note(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4:
            met.append(tuple(output.shape[1:]))

    with register_module_forward_hook(note):
        size = layer_input(known, params, layer, x).numel()
    _, height, width = known.shape
    for parts in reversed(met):
        if parts[0] * parts[1] * parts[2] == size:
            squares = height % parts[1] == 0 and width % parts[2] == 0 and height // parts[1] == width // parts[2]
            return parts if squares else None
    return None
