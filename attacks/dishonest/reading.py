"""Images that rows of a fully connected layer hold: weight gradient over bias gradient, and which of them are exact."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attacks import labels as labelling
from attacks.base import Knowledge, Reconstruction, Wave
from attacks.dishonest.base import mean_fill
from client.update import Update

FAINT = 1e-6  # of the largest bias gradient: what rounding leaves of a bin without images
ON_GRID = 0.1  # grey values, root mean square from whole ones: 0.29 where they have nothing to do with the grid


def fed(known: Knowledge) -> tuple[Tensor, Tensor]:
    """pixels = scale * fed + offset, each (pixels,) float64."""
    offset = known.pixels(torch.zeros(known.shape, dtype=torch.float64))
    return (known.pixels(torch.ones_like(offset)) - offset).flatten(), offset.flatten()


@dataclass(frozen=True, eq=False)
class Rows:
    """Gradients of a fully connected layer's rows, or of parts of them, float64 up to a common scale.

    Args:
        weight: (m, n); bias: (m,).
    """

    layer: str
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, update: Update, layer: str) -> "Rows":
        """As an update has them."""
        return cls(layer, *(-update[f"{layer}.{part}"].double() for part in ("weight", "bias")))

    @property
    def reason(self) -> str:
        """Why nothing is to be read from them; empty where something is."""
        if not bool(torch.isfinite(self.weight).all() and torch.isfinite(self.bias).all()):
            return "the update is not finite"
        return "" if bool(self.bias.any()) else f"the gradient of {self.layer!r} is zero: no image turned a row on"

    def differences(self) -> "Rows":
        """Of neighbours, behind the last of which there is none."""
        weight, bias = self.weight - F.pad(self.weight[1:], (0, 0, 0, 1)), self.bias - F.pad(self.bias[1:], (0, 1))
        told = bias.abs() > FAINT * self.bias.abs().max()
        return Rows(self.layer, weight[told], bias[told])

    def images(self, known: Knowledge) -> Tensor:
        """Pixels (m, C, H, W) of the mixtures of inputs that they are, the strongest first."""
        told = self.bias != 0
        order = self.bias[told].abs().argsort(descending=True)
        fed = self.weight[told][order] / self.bias[told][order, None]
        found = known.pixels(fed.view(-1, *known.shape))
        return found[torch.isfinite(found).flatten(1).all(1)]


def on_grid(x: Tensor) -> Tensor:
    """Which of some images (n, C, H, W) in pixels are such as 8 bits say, (n,): a mixture of two is none.

    Black and white pixels do not count: mixtures have those of their parts.
    """
    grey = 255 * x.double().flatten(1)
    off, inner = grey - grey.round(), (grey.round() > 0) & (grey.round() < 255)
    error = ((off.square() * inner).sum(1) / inner.sum(1).clamp(min=1)).sqrt()
    within = (grey > -0.5).all(1) & (grey < 255.5).all(1)
    return within & (error < ON_GRID)


def snapped(x: Tensor) -> Tensor:
    """Images on the grid, to the bit as they are read from files."""
    return (255 * x.double()).round().float() / 255


def unread(reason: str, started: float) -> Reconstruction:
    """The answer where an update says nothing."""
    return Reconstruction(None, None, float("nan"), 1, time.perf_counter() - started, "not_applicable", reason)


def answered(
    x: Tensor, exact: int, wave: Wave, known: Knowledge, started: float, note: str = "on the 8-bit grid"
) -> Reconstruction:
    """Images (n, C, H, W) of one observation, proven ones first, filled up to a batch; labels as the classifier tells them."""
    size = known.batch_size
    x = mean_fill(x.float().clamp(0, 1), size, known)
    try:
        y = labelling.restore(wave, known)[0]
    except ValueError:  # the images are there all the same
        y = None
    words = f"{min(exact, size)} of {size} images proven exact ({note})"
    return Reconstruction(x, y, 1 - min(exact, size) / size, 1, time.perf_counter() - started, "converged", words)
