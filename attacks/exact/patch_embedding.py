"""Vision transformers: the position embedding's gradient holds each patch's error signal, which separates the patches.

An image's patches X (N, n) are embedded as X W^T + E, with learnt positions E (N, m). For one image, D = dL/dE (N, m) is also the
gradient by each embedded patch, so dL/dW = D^T X. This determines X if the rows of D are independent (after APRIL, Lu et al.,
CVPR 2022). If they are dependent or noisy, X is the posterior mean under the auxiliary images' covariance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Reconstruction, Wave
from fedgauge.attacks.engine.computation import InputLayer, called, input_layers
from fedgauge.attacks.exact.closed_form import ClosedForm, Reader, check_one_example, labels_of
from fedgauge.client.rng import generator
from fedgauge.client.update import Params

SAME = 1e-3  # relative difference of two gradients that are one up to rounding
ROUNDED = 1e-7  # of the largest singular value: what float32 leaves of a direction
FIT = 1e-4  # relative error of dL/dW = D^T X, up to which an update is one gradient up to rounding


@dataclass(frozen=True)
class patch_embedding(ClosedForm):
    """One image from a vision transformer, by the gradients of its patches' and positions' embeddings."""

    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        check_one_example(known)
        patches = Patches.of(known, wave.params)
        return partial(_read, patches, *_prior(known, patches))


@dataclass(frozen=True)
class Patches:
    """A network's patch embedding.

    Args:
        reads: the convolution.
        positions: the name of the learnt positions; first: the row of the first patch's.
        grid: patches in a column and in a row; size: (height, width) of a patch.
    """

    reads: InputLayer
    positions: str
    first: int
    grid: tuple[int, int]
    size: tuple[int, int]

    @classmethod
    def of(cls, known: Knowledge, params: Params) -> "Patches":
        """Found by a pass of noise: positions are what has the embedded patches' gradient. ValueError: there are none."""
        reads = patches_read(known.model, known.shape)
        layer = reads.name
        x = torch.rand(1, *known.shape, generator=generator("an image of noise"))
        weights = {k: p.detach().to(x).requires_grad_() for k, p in params.items()}
        logits, calls = called(known.model, weights, known.normalise(x))
        stored = [call.output for call in calls if call.weight == reads.weight]
        with torch.enable_grad():
            loss = known.loss(logits, torch.zeros(1, dtype=torch.int64))
        inside, *by_weight = torch.autograd.grad(loss, [stored[0], *weights.values()], materialize_grads=True)
        _, width, high, wide = stored[0].shape
        if len(stored) != 1 or not bool(inside.any()):
            raise ValueError(f"no gradient of one call of {layer!r} at these weights: they reveal no image")
        signal = inside[0].flatten(1).T
        for name, gradient in zip(weights, by_weight, strict=True):
            if gradient.ndim < 2 or gradient.shape[-1] != width:
                continue
            rows = gradient.reshape(-1, width)
            for first in {len(rows) - len(signal), 0}:  # class tokens stand before the patches or behind them
                if first >= 0 and len(rows) >= len(signal) and _same(rows[first : first + len(signal)], signal):
                    height, width = params[reads.weight].shape[2:]
                    return cls(reads, name, first, (high, wide), (height, width))
        raise ValueError(f"no learnt position is added to each patch behind {layer!r}")

    @property
    def count(self) -> int:
        """N, the patches of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def covered(self) -> tuple[int, int]:
        """Pixels in a column and in a row that patches cover."""
        return self.grid[0] * self.size[0], self.grid[1] * self.size[1]

    def cut(self, x: Tensor) -> Tensor:
        """Patches (images, N, n) of images (images, C, H, W); what no patch covers is left out."""
        high, wide = self.covered
        return F.unfold(x[..., :high, :wide], self.size, stride=self.size).mT

    def joined(self, patches: Tensor, shape: Sequence[int]) -> Tensor:
        """Images (images, C, H, W) of patches (images, N, n), zero where no patch is."""
        high, wide = self.covered
        whole = F.fold(patches.mT, (high, wide), self.size, stride=self.size)
        return F.pad(whole, (0, shape[-1] - wide, 0, shape[-2] - high))


def patches_read(model: nn.Module, shape: Sequence[int]) -> InputLayer:
    layers = [layer for layer in input_layers(model, shape) if not layer.dense]
    for layer in layers:
        size, given = tuple(model.get_parameter(layer.weight).shape[2:]), layer.settings
        stride, padding, dilation = (
            _pair(given.get(k, d)) for k, d in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        if size == stride and dilation == (1, 1) and padding in ((0, 0), "valid") and given.get("groups", 1) == 1:
            return layer
    why = f"layer {layers[0].name!r} overlaps its windows" if layers else "no convolution reads the example itself"
    raise ValueError(f"{why}: the attack reads patches side by side")


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value if isinstance(value, str) else tuple(value)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(b.any()) and float((a - b).norm()) <= SAME * float(b.norm())


def _prior(known: Knowledge, patches: Patches) -> tuple[Tensor, Tensor]:
    """Mean (N, n) of the auxiliary images' normalised patches, and a square root (N, N) of the covariance of positions.

    Pixels of a patch are independent of each other; without auxiliary images, all pixels are. float64.
    """
    public = known.auxiliary
    if public is None or len(public.x) < 2:
        grey = known.normalise(torch.full((1, *known.shape), 0.5, dtype=torch.float64))
        return patches.cut(patches.reads.read(grey))[0], torch.eye(patches.count, dtype=torch.float64)
    x = patches.cut(patches.reads.read(known.normalise(public.x.double())))
    mean = x.mean(0)
    off = (x - mean).transpose(1, 2).flatten(0, 1)  # (images * n, N)
    covariance = off.T @ off / len(off)
    # few images leave directions of positions that none of them has
    covariance += 1e-3 * covariance.diagonal().mean().clamp(min=1e-12) * torch.eye(len(covariance)).double()
    return mean, torch.linalg.cholesky(covariance)


def _read(patches: Patches, mean: Tensor, root: Tensor, alone: Wave, known: Knowledge) -> Reconstruction:
    update = alone.alone(0)
    weight = -update[patches.reads.weight].double().flatten(1)  # (m, n)
    rows = -update[patches.positions].double().reshape(-1, len(weight))
    signal = rows[patches.first : patches.first + patches.count]  # D (N, m)
    left, values, right = torch.linalg.svd(signal.T @ root, full_matrices=False)
    noise = _noise(known, mean, root)
    floor = float(values[0]) * ROUNDED
    kept = values / (values.square() + max(noise, floor**2))
    target = weight - signal.T @ mean
    x = mean + root @ (right.T @ (kept[:, None] * (left.T @ target)))
    error = float((weight - signal.T @ x).norm() / weight.norm())
    image = known.pixels(patches.reads.example(patches.joined(x[None], known.shape))).clamp(0, 1).float()
    exceeding = int((values > max(noise**0.5, floor)).sum())
    notes = [f"{exceeding} of {patches.count} directions of patches exceed the rest"] * (exceeding < patches.count)
    notes += [f"the gradients fit one image to {error:.0e}"] * (error > FIT)
    return Reconstruction(image, labels_of(alone, known), error, 1, 0.0, "converged", "; ".join(notes))


def _noise(known: Knowledge, mean: Tensor, root: Tensor) -> float:
    """The variance of noise in an entry of dL/dW - D^T X, as the noise of both gradients makes it, for pixels of the prior."""
    seen = known.chain.update_distribution
    variance = seen.variance if seen else 0.0
    return variance * (1 + float(mean.square().mean()) * len(mean) + float(root.square().sum()))
