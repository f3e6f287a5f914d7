"""A normal distribution of each class's examples, fitted to auxiliary ones, as a map from standard normal numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.gaussian_prior import ENOUGH, class_means, principal
from fedgauge.client.components import NotNegative
from fedgauge.client.update import Batch

SHRINKAGE = 0.3  # share of the covariance of neighbours in each class's
LENGTH, APART = (
    1.0,
    0.1,
)  # pixels over which neighbours resemble each other, and the share of a pixel's variance of its own
LEAST = 0.01  # of the mean variance, added to every pixel's
START = 0.1  # deviation of the search's starts


@dataclass(frozen=True)
class class_normals:
    """Examples around their class's mean, from standard normal numbers, whose density is the prior."""

    weight: NotNegative

    def bind(self, known: Knowledge) -> Callable[[Tensor, Tensor], Tensor]:
        """The examples of free numbers.

        Raises:
            ValueError: no class has two different auxiliary examples.
        """
        fitted = ClassNormals(known.public, known.classes)
        return lambda z, y: known.normalise(fitted(z, y))

    def starts(self, normal: Tensor) -> Tensor:
        return START * normal


class ClassNormals:
    """A normal distribution for each class: its covariance is blended of three.

    Of the class's own examples, the more the more there are; of all examples around their class's mean; and, so that it is
    invertible, of neighbours: each pixel's variance, with a correlation that falls with the distance.

    Args:
        images: auxiliary examples (N, C, ...) with labels.
        classes: their number.
    """

    def __init__(self, images: Batch, classes: int):
        self.means = class_means(images, torch.arange(classes, device=images.y.device)).double()
        self.y, counts = images.y, torch.bincount(images.y, minlength=classes).double()
        widened = (counts / (counts - 1).clamp_min(1)).sqrt()[images.y]
        self.spread = (images.x - self.means[images.y]) * widened.view(-1, *[1] * (images.x.dim() - 1))
        self.average = self.spread.square().mean()
        if not self.average > 0:
            raise ValueError("no class has two auxiliary examples that differ: raise [data] auxiliary")
        values, self.turns = [], []
        for size in images.x.shape[2:]:
            places = torch.arange(size).to(self.spread)
            along, turn = torch.linalg.eigh(torch.exp(-0.5 * ((places[:, None] - places) / LENGTH).square()))
            values.append(along.clamp_min(0))
            self.turns.append(turn)
        together = reduce(lambda a, b: a[..., None] * b, values, self.spread.new_ones(()))
        self.lengths = (APART + (1 - APART) * together).sqrt()
        self.fitted = cache(self._fitted)

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        """Examples of free numbers z (N, B, *shape), of labels y (N, B) or of probabilities of classes (N, B, classes)."""
        labels = y.argmax(-1) if y.is_floating_point() else y
        x = torch.zeros_like(z)
        for c in labels.unique().tolist():
            deviations, axes, lengths = self.fitted(c, z.dtype, z.device)
            own = _turned(z[labels == c], self.turns).flatten(1)
            own = SHRINKAGE**0.5 * own + (own @ axes.T * lengths) @ axes
            found = own.view(-1, *z.shape[2:]) * self.lengths.to(z)
            x[labels == c] = self.means[c].to(z) + deviations * _turned(found, [turn.T for turn in self.turns])
        return x

    def _fitted(self, c: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """The deviations of a class's pixels, axes, and what is added to the lengths along them."""
        of_class = self.y == c
        count = int(of_class.sum())
        own = count / (count + ENOUGH) if count > 1 else 0.0
        shares = ((1 - own) / len(self.y) + of_class * (own / max(count, 1))).to(self.spread)
        variances = (self.spread.square().flatten(1).T @ shares).view(self.spread.shape[1:])
        deviations = (variances + LEAST * self.average).sqrt()
        rows = _turned(self.spread / deviations, self.turns)
        weights = (len(rows) * shares).sqrt().view(-1, 1)
        found, axes = principal(weights * (rows / self.lengths).flatten(1))
        lengths = ((1 - SHRINKAGE) * found + SHRINKAGE).sqrt() - SHRINKAGE**0.5
        return tuple(t.to(device, dtype) for t in (deviations, axes, lengths))


def _turned(x: Tensor, turns: Sequence[Tensor]) -> Tensor:
    """Multiply examples x (n, C, ...) by a matrix along each axis after the channels."""
    for axis, turn in enumerate(turns, 2):
        x = (x.movedim(axis, -1) @ turn.to(x)).movedim(-1, axis)
    return x
