"""A normal distribution of each class's examples, fitted to auxiliary ones, as a map from standard normal numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.gaussian_prior import ENOUGH, class_means, principal
from fedgauge.client.components import NotNegative
from fedgauge.client.update import Batch

SHRINKAGE = 0.5  # share of the separable covariance in each class's
APART = 0.1  # share of a pixel's variance, in the separable one, that is its own
LEAST = 0.01  # of the mean variance, added to every pixel's
START = 0.1  # deviation of the search's starts


@dataclass(frozen=True)
class class_normals:
    """Examples around their class's mean, from standard normal numbers: their density is the prior."""

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
    """A normal distribution for each class, with a covariance blended from three.

    One is of the class's own examples, with a share that grows with their number; one of all examples around their class's mean. So
    that it is invertible, the third has each pixel's variance and separable correlations: channels by rows by columns.

    Args:
        images: auxiliary examples (N, C, ...) with labels.
        classes: their number.
    """

    def __init__(self, images: Batch, classes: int):
        self.means = class_means(images, torch.arange(classes, device=images.y.device)).double()
        counts = torch.bincount(images.y, minlength=classes).double()
        several = counts[images.y] > 1  # a single example says nothing of its class's covariance
        self.y = images.y[several]
        widened = (counts / (counts - 1)).sqrt()[self.y]
        self.spread = (images.x[several] - self.means[self.y]) * widened.view(-1, *[1] * (images.x.dim() - 1))
        self.least = LEAST * self.spread.square().sum() / max(self.spread.numel(), 1)
        if not self.least > 0:
            raise ValueError("no class has two auxiliary examples that differ: raise [data] auxiliary")
        alike = self.spread / (self.spread.square().mean(0) + self.least).sqrt()
        lengths, self.turns = self.spread.new_ones(()), []
        for axis in range(1, images.x.dim()):
            rows = alike.movedim(axis, 0).flatten(1)
            squares = rows @ rows.T
            squares.diagonal().add_(1e-3 * squares.diagonal().mean())  # where all pixels are equal
            sizes = squares.diagonal().sqrt()
            along, turn = torch.linalg.eigh(squares / sizes / sizes[:, None])
            lengths = lengths[..., None] * along
            self.turns.append(turn)
        self.lengths = (APART + (1 - APART) * lengths).sqrt()
        self.fitted: dict[int, tuple[Tensor, ...]] = {}

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        """Examples of free numbers z (N, B, *shape), of labels y (N, B) or of probabilities of classes (N, B, classes)."""
        labels = y.argmax(-1) if y.dim() > 2 else y.round().long()
        x = torch.zeros_like(z)
        for c in labels.unique().tolist():
            if c not in self.fitted:
                self.fitted[c] = tuple(t.to(z) for t in self._fitted(c))
            deviations, axes, lengths = self.fitted[c]
            own = _turned(z[labels == c], self.turns).flatten(1)
            own = SHRINKAGE**0.5 * own + (own @ axes.T * lengths) @ axes
            found = own.view(-1, *z.shape[2:]) * self.lengths.to(z)
            x[labels == c] = self.means[c].to(z) + deviations * _turned(found, [turn.T for turn in self.turns])
        return x

    def _fitted(self, c: int) -> tuple[Tensor, Tensor, Tensor]:
        """The deviations of a class's pixels, axes, and what is added to the lengths along them."""
        of_class = self.y == c
        count = int(of_class.sum())
        own = count / (count + ENOUGH)
        shares = ((1 - own) / len(self.y) + of_class * (own / max(count, 1))).to(self.spread)
        variances = (self.spread.square().flatten(1).T @ shares).view(self.spread.shape[1:])
        deviations = (variances + self.least).sqrt()
        rows = _turned(self.spread / deviations, self.turns)
        weights = (len(rows) * shares).sqrt().view(-1, 1)
        found, axes = principal(weights * (rows / self.lengths).flatten(1))
        return deviations, axes, ((1 - SHRINKAGE) * found + SHRINKAGE).sqrt() - SHRINKAGE**0.5


def _turned(x: Tensor, turns: Sequence[Tensor]) -> Tensor:
    """Multiply examples x (n, C, ...) by a matrix along each axis."""
    for axis, turn in enumerate(turns, 1):
        x = (x.movedim(axis, -1) @ turn.to(x)).movedim(-1, axis)
    return x
