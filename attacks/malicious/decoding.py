"""Decoding fully connected layers: their inputs from weight over bias gradients, and which images are exact.

For one example dL/dW = d f^T and dL/db = d, so d^T dL/dW / |d|^2 is the classifier's input f. For several, a classifier of
zeros predicts the same p = softmax(b) for every image, so with k_c examples of class c,

    dL/dW = sum over the present classes of k_c / B (p - e_c) f_c^T,     dL/db = p - k / B,

which gives the counts k, and by a pseudo-inverse each class's mean input f_c: the image itself where k_c = 1. The vectors p - e_c
are independent as long as a class is absent (if a weighted sum of them is zero, the weights are a multiple of p).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Reconstruction, Wave
from fedgauge.attacks.engine.computation import classifier
from fedgauge.attacks.exact.closed_form import labels_of
from fedgauge.attacks.malicious.server_attack import check_one_gradient, fill_with_mean
from fedgauge.client.update import Params, Update

FAINT = 1e-6  # of the largest bias gradient: rounding in a bin without images
COUNTED = 0.1  # largest distance of a class's count from a whole number
ON_GRID = 0.1  # root mean square distance from whole grey values; 0.29 for values unrelated to the grid


def input_to_pixels(known: Knowledge) -> tuple[Tensor, Tensor]:
    """scale and offset, each (pixels,) float64, of pixels = scale * input + offset."""
    offset = known.pixels(torch.zeros(known.shape, dtype=torch.float64))
    return (known.pixels(torch.ones_like(offset)) - offset).flatten(), offset.flatten()


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Gradients of a fully connected layer's rows, or of parts of them, float64 up to a common scale.

    Args:
        weight: (m, n); bias: (m,).
    """

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, update: Update, layer: str) -> "LayerRows":
        """The rows in an update.

        Raises:
            ValueError: nothing can be read from them.
        """
        weight, bias = (-update[f"{layer}.{part}"].double() for part in ("weight", "bias"))
        if not bool(bias.any()):
            raise ValueError(f"the gradient of {layer!r} is zero: it reveals nothing of this batch")
        return cls(weight, bias)

    def differences(self) -> "LayerRows":
        """Differences of neighbouring rows; the last row is unchanged."""
        weight, bias = self.weight - F.pad(self.weight[1:], (0, 0, 0, 1)), self.bias - F.pad(self.bias[1:], (0, 1))
        used = bias.abs() > FAINT * self.bias.abs().max()
        return LayerRows(weight[used], bias[used])

    def strongest(self) -> "LayerRows":
        """The rows with a bias gradient, the largest first."""
        used = self.bias != 0
        order = self.bias[used].abs().argsort(descending=True)
        return LayerRows(self.weight[used][order], self.bias[used][order])

    def images(self, known: Knowledge) -> Tensor:
        """Pixels (m, C, H, W) of the mixture of inputs in each row, the strongest row first."""
        rows = self.strongest()
        images = known.pixels((rows.weight / rows.bias[:, None]).view(-1, *known.shape))
        return images[torch.isfinite(images).flatten(1).all(1)]


@dataclass(frozen=True, eq=False)
class ClassifierInputs:
    """The classifier's inputs for a batch.

    Args:
        inputs: (B, n) float64; examples that share a label all get their mean.
        y: (B,) labels.
        single: (B,) whether an example is the only one of its label.
        gain: (B,) factor from noise on the update's entries to noise on the inputs.
    """

    inputs: Tensor
    y: Tensor
    single: Tensor
    gain: Tensor

    @classmethod
    def from_update(cls, update: Update, params: Params, known: Knowledge) -> "ClassifierInputs":
        """Read off one update; ValueError where it reveals nothing."""
        layer = classifier(known.model, known.shape)
        rows = LayerRows.of(update, layer)
        weight, bias = rows.weight, rows.bias
        if known.batch_size == 1:
            inverse, y = bias[None] / bias.square().sum(), bias.argmin()[None]
            return cls(inverse @ weight, y, torch.tensor([True]), inverse.norm(dim=1))
        predicted = params[f"{layer}.bias"].double().softmax(0)
        k = _counts(predicted - bias / known.scale, known)
        present = k.nonzero().flatten()
        columns = (predicted[:, None] - F.one_hot(present, known.classes).T) * k[present] / known.batch_size
        inverse, each = torch.linalg.pinv(columns) / known.scale, k[present]
        per_class = (inverse @ weight, present, each == 1, inverse.norm(dim=1))
        return cls(*(t.repeat_interleave(each, 0) for t in per_class))


def _counts(shares: Tensor, known: Knowledge) -> Tensor:
    """The number of examples of each class (classes,), from its share of the batch."""
    counts = known.batch_size * shares
    k = counts.round().long()
    whole = float((counts - k).abs().max()) <= COUNTED and bool((k >= 0).all()) and int(k.sum()) == known.batch_size
    if not whole or bool((k > 0).all()):
        why = f"all {known.classes} classes are in the batch" if whole else "a defense altered the bias gradient"
        raise ValueError(f"the classes' mean inputs cannot be separated: {why}")
    return k


def check_readable(known: Knowledge, params: Params) -> None:
    """ValueError where the classifier's inputs cannot be read off its gradient."""
    layer = classifier(known.model, known.shape)
    check_one_gradient(known)
    if f"{layer}.bias" not in params or (known.batch_size > 1 and bool(params[f"{layer}.weight"].any())):
        raise ValueError(f"classifier {layer!r} needs a bias, and zero weights for a batch: set zero = true")


def on_grid(x: Tensor) -> Tensor:
    """Return whether images (n, C, H, W) have 8-bit values, (n,): a mixture of two images does not.

    Black and white pixels do not count: where two images share them, their mixture has them too.
    """
    grey = 255 * x.double().flatten(1)
    off, inner = grey - grey.round(), (grey.round() > 0) & (grey.round() < 255)
    error = ((off.square() * inner).sum(1) / inner.sum(1).clamp(min=1)).sqrt()
    within = (grey > -0.5).all(1) & (grey < 255.5).all(1)
    return within & (error < ON_GRID)


def snap_to_grid(x: Tensor) -> Tensor:
    """Images rounded to the grid, bit for bit as a file holds them."""
    return (255 * x.double()).round().float() / 255


def decoded(x: Tensor, exact: int, wave: Wave, known: Knowledge, note: str = "on the 8-bit grid") -> Reconstruction:
    """The result for images or rows (n, ...) of one observation, proven first, filled up to a batch, with restored labels."""
    size = known.batch_size
    if len(known.shape) == 3:
        x = x.clamp(0, 1)
    x = fill_with_mean(x.float(), size, known)
    words = f"{min(exact, size)} of {size} {'images' if len(known.shape) == 3 else 'rows'} proven exact ({note})"
    return Reconstruction(x, labels_of(wave, known), 1 - min(exact, size) / size, 1, 0.0, "converged", words)
