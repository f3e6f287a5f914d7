"""What rows of a fully connected layer hold: weight gradient over bias gradient, which images are exact, what a classifier read.

For one example dL/dW = d f^T and dL/db = d, so d^T dL/dW / |d|^2 is the classifier's input f. For several, a classifier of
zeros predicts the same p = softmax(b) for every image: with k_c examples of class c,

    dL/dW = sum over the present classes of k_c / B (p - e_c) f_c^T,     dL/db = p - k / B,

which gives the counts k, and by a pseudo-inverse each class's mean input f_c: the image itself where k_c = 1. The vectors p - e_c
are independent as long as a class is absent (if a weighted sum of them is zero, the weights are a multiple of p).
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgauge.attacks import labels as labelling
from fedgauge.attacks.base import Knowledge, Reconstruction, Wave
from fedgauge.attacks.malicious.server_attack import fill_with_mean, why_not_one_gradient
from fedgauge.client.models.vision import last_linear
from fedgauge.client.update import Params, Update

FAINT = 1e-6  # of the largest bias gradient: what rounding leaves of a bin without images
COUNTED = 0.1  # examples of a class, off a whole number of them
ON_GRID = 0.1  # grey values, root mean square from whole ones: 0.29 where they have nothing to do with the grid


def fed(known: Knowledge) -> tuple[Tensor, Tensor]:
    """pixels = scale * fed + offset, each (pixels,) float64."""
    offset = known.pixels(torch.zeros(known.shape, dtype=torch.float64))
    return (known.pixels(torch.ones_like(offset)) - offset).flatten(), offset.flatten()


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Gradients of a fully connected layer's rows, or of parts of them, float64 up to a common scale.

    Args:
        weight: (m, n); bias: (m,).
    """

    layer: str
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, update: Update, layer: str) -> "LayerRows":
        """As an update has them."""
        return cls(layer, *(-update[f"{layer}.{part}"].double() for part in ("weight", "bias")))

    @property
    def reason(self) -> str:
        """Why nothing is to be read from them; empty where something is."""
        if not bool(torch.isfinite(self.weight).all() and torch.isfinite(self.bias).all()):
            return "the update is not finite"
        return "" if bool(self.bias.any()) else f"the gradient of {self.layer!r} is zero: it says nothing of this batch"

    def differences(self) -> "LayerRows":
        """Of neighbours, behind the last of which there is none."""
        weight, bias = self.weight - F.pad(self.weight[1:], (0, 0, 0, 1)), self.bias - F.pad(self.bias[1:], (0, 1))
        told = bias.abs() > FAINT * self.bias.abs().max()
        return LayerRows(self.layer, weight[told], bias[told])

    def images(self, known: Knowledge) -> Tensor:
        """Pixels (m, C, H, W) of the mixtures of inputs that they are, the strongest first."""
        told = self.bias != 0
        order = self.bias[told].abs().argsort(descending=True)
        fed = self.weight[told][order] / self.bias[told][order, None]
        found = known.pixels(fed.view(-1, *known.shape))
        return found[torch.isfinite(found).flatten(1).all(1)]


@dataclass(frozen=True, eq=False)
class ClassifierInputs:
    """What the classifier was fed.

    Args:
        inputs: (B, n) float64; of examples of one label, their mean.
        y: (B,) labels.
        single: (B,) whether it is its label's only one.
        gain: (B,) by how much noise on the update's entries is larger on the inputs.
    """

    inputs: Tensor
    y: Tensor
    single: Tensor
    gain: Tensor

    @classmethod
    def off(cls, update: Update, params: Params, known: Knowledge) -> "ClassifierInputs":
        """From one update; ValueError says why nothing is to be read."""
        layer = last_linear(known.model)
        rows = LayerRows.of(update, layer)
        if rows.reason:
            raise ValueError(rows.reason)
        weight, bias = rows.weight, rows.bias
        if known.batch_size == 1:
            told, y = bias[None] / bias.square().sum(), bias.argmin()[None]
            return cls(told @ weight, y, torch.tensor([True]), told.norm(dim=1))
        predicted = params[f"{layer}.bias"].double().softmax(0)
        k = _counted(predicted - bias / known.scale, known)
        present = k.nonzero().flatten()
        columns = (predicted[:, None] - F.one_hot(present, known.classes).T) * k[present] / known.batch_size
        told, each = torch.linalg.pinv(columns) / known.scale, k[present]
        ours = [t.repeat_interleave(each, 0) for t in (told @ weight, present, each == 1, told.norm(dim=1))]
        return cls(*ours)


def _counted(parts: Tensor, known: Knowledge) -> Tensor:
    """How many examples of each class there are, (classes,), from their parts of the batch."""
    counts = known.batch_size * parts
    k = counts.round().long()
    if float((counts - k).abs().max()) > COUNTED or bool((k < 0).any()) or int(k.sum()) != known.batch_size:
        raise ValueError("the classifier's bias gradient gives no whole numbers of examples: a defense has touched it")
    if int((k > 0).sum()) == known.classes:
        raise ValueError(f"all {known.classes} classes are in the batch: one of its means is a mixture of the others'")
    return k


def check_readable(known: Knowledge, params: Params) -> None:
    """ValueError where what the classifier was fed cannot be told from its gradient."""
    layer = last_linear(known.model)
    if f"{layer}.bias" not in params:
        raise ValueError(f"the classifier {layer!r} has no bias: the length of what it reads cannot be told")
    if reason := why_not_one_gradient(known):
        raise ValueError(reason)
    if known.batch_size > 1 and bool(params[f"{layer}.weight"].any()):
        raise ValueError(
            f"{known.batch_size} examples are taken apart by a classifier of zeros, which {layer!r} was not sent as"
        )


def on_grid(x: Tensor) -> Tensor:
    """Which of some images (n, C, H, W) in pixels are such as 8 bits say, (n,): a mixture of two is none.

    Black and white pixels do not count: mixtures have those of their parts.
    """
    grey = 255 * x.double().flatten(1)
    off, inner = grey - grey.round(), (grey.round() > 0) & (grey.round() < 255)
    error = ((off.square() * inner).sum(1) / inner.sum(1).clamp(min=1)).sqrt()
    within = (grey > -0.5).all(1) & (grey < 255.5).all(1)
    return within & (error < ON_GRID)


def snap_to_grid(x: Tensor) -> Tensor:
    """Images on the grid, to the bit as they are read from files."""
    return (255 * x.double()).round().float() / 255


def nothing_decoded(reason: str, started: float) -> Reconstruction:
    """The answer where an update says nothing."""
    return Reconstruction(None, None, float("nan"), 1, time.perf_counter() - started, "not_applicable", reason)


def decoded(
    x: Tensor, exact: int, wave: Wave, known: Knowledge, started: float, note: str = "on the 8-bit grid"
) -> Reconstruction:
    """Images (n, C, H, W) of one observation, proven ones first, filled up to a batch; labels as the classifier tells them."""
    size = known.batch_size
    x = fill_with_mean(x.float().clamp(0, 1), size, known)
    try:
        y = labelling.restore(wave, known)[0]
    except ValueError:  # the images are there all the same
        y = None
    words = f"{min(exact, size)} of {size} images proven exact ({note})"
    return Reconstruction(x, y, 1 - min(exact, size) / size, 1, time.perf_counter() - started, "converged", words)
