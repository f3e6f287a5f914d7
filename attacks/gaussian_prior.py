"""Gaussian priors over an example's pixels, fitted to auxiliary images: of all together, or of each class by itself."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedgauge.client.data.batches import Shards
from fedgauge.client.update import Batch

ENOUGH = 20  # images from which on a class has a covariance of its own
MOST = 16  # classes with a covariance of their own; where more have enough images, all classes share one


@dataclass(frozen=True, eq=False)
class VarianceBlock:
    """Directions of nearly equal prior variance: rows of axes (m, d); if None, all directions orthogonal to `without`."""

    axes: Tensor | None
    without: Tensor
    size: int
    information: float  # trace of the prior's information in them

    def directions(self, signs: Tensor) -> Tensor:
        """(..., d) random vectors z in the block with E z z' its projector, from Rademacher signs (..., d)."""
        if self.axes is None:
            return signs - (signs @ self.without.T) @ self.without
        return signs[..., : self.size] @ self.axes


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    """N(mean, covariance) over one example's d pixels, by the covariance's principal axes; float64.

    Args:
        mean: (d,).
        axes: (r, d) orthonormal.
        variances: (r,) along the axes, above 0.
        rest: variance in each of the d - r directions orthogonal to them, above 0.
    """

    mean: Tensor
    axes: Tensor
    variances: Tensor
    rest: float = 1.0

    @classmethod
    def fit(cls, x: Tensor) -> "GaussianPrior":
        """Fit to images x (N, ...): their covariance, shrunk towards its mean variance so that it is invertible."""
        flat = x.flatten(1).double()
        count, size = flat.shape
        mean = flat.mean(0)
        centred = flat - mean
        average = float(centred.square().sum()) / (count * size)  # variance of a pixel
        if not average > 0:
            raise ValueError(f"a prior needs auxiliary images that differ, got {count}")
        variances, axes = principal(centred)
        shrinkage = _ledoit_wolf(centred, variances, average)
        shrunk = (1 - shrinkage) * variances + shrinkage * average
        return cls(mean, axes, shrunk, shrinkage * average)

    def blocks(self, count: int) -> list[VarianceBlock]:
        """The directions grouped by prior variance, in at most `count` groups of equal ratio, and the rest."""
        logs = self.variances.log()
        low, high = float(logs.min()), float(logs.max())
        step = (high - low) / count or 1.0
        label = ((logs - low) / step).long().clamp(max=count - 1)
        parts = [torch.nonzero(label == b).flatten() for b in label.unique()]
        found = [VarianceBlock(self.axes[i], self.axes, len(i), float((1 / self.variances[i]).sum())) for i in parts]
        left = len(self.mean) - len(self.axes)
        return found + ([VarianceBlock(None, self.axes, left, left / self.rest)] if left else [])


def principal(centred: Tensor) -> tuple[Tensor, Tensor]:
    """Variances and orthonormal axes (r, d) of centred rows (N, d), through the smaller of the two products."""
    count, size = centred.shape
    if count > size:
        variances, axes = torch.linalg.eigh(centred.T @ centred / count)
        return variances.clamp_min(0), axes.T
    variances, weights = torch.linalg.eigh(centred @ centred.T / count)
    kept = variances > 1e-10 * variances[-1]  # centring makes one direction empty, repeated images more
    axes = weights[:, kept].T @ centred
    return variances[kept], axes / (count * variances[kept]).sqrt()[:, None]


def _ledoit_wolf(centred: Tensor, variances: Tensor, average: float) -> float:
    """The shrinkage of least expected squared error, in (0, 1] (Ledoit & Wolf, 2004, lemma 3.4)."""
    count, size = centred.shape
    squares = float(variances.square().sum())
    distance = squares - size * average**2
    error = (float(centred.square().sum(1).square().mean()) - squares) / count
    return 1.0 if error >= distance else max(error / distance, 1e-6)


@dataclass(frozen=True, eq=False)
class ClassPrior:
    """Prior of an example given only its label: it is drawn around the mean of its class.

    Args:
        labels: (L,) the classes that share the prior's covariance, each around a mean of its own.
        share: of the auxiliary images that have one of these labels.
        prior: around the class's mean.
    """

    labels: Tensor
    share: float
    prior: GaussianPrior


def class_priors(images: Batch) -> tuple[ClassPrior, ...]:
    """A prior for each class of at least ENOUGH images; all other classes share the covariance within classes.

    Raises:
        ValueError: no two images differ.
    """
    labels, counts = images.y.unique(return_counts=True)
    own = [c for c, n in zip(labels, counts, strict=True) if n >= ENOUGH and images.x[images.y == c].var(0).any()]
    own = own if len(own) <= MOST else []
    parts = [(c[None], GaussianPrior.fit(images.x[images.y == c])) for c in own]
    rest = labels[~torch.isin(labels, torch.stack(own))] if own else labels
    if len(rest):
        parts.append((rest, GaussianPrior.fit(deviations(images))))
    return tuple(ClassPrior(c, float(torch.isin(images.y, c).double().mean()), prior) for c, prior in parts)


@lru_cache(maxsize=1)
def public_priors(shards: Shards) -> tuple[ClassPrior, ...]:
    return class_priors(shards.auxiliary_batch())


def class_means(images: Batch, classes: Tensor) -> Tensor:
    """(len(classes), ...) the mean image of each class; of one without images, the mean of all."""
    if images.y.is_floating_point() or images.y.dim() > 1:
        raise ValueError("the labels are not classes, so there is no mean image of each class")
    of_class = [images.x[images.y == c] for c in classes]
    return torch.stack([(own if len(own) else images.x).mean(0) for own in of_class])


def deviations(images: Batch) -> Tensor:
    """Images less their class's mean, widened by what a mean of few images takes away; all images if no class has two."""
    x, (_, which, counts) = images.x.double(), images.y.unique(return_inverse=True, return_counts=True)
    several = counts[which] > 1
    if not several.any():
        return x
    sums = x.new_zeros(len(counts), *x.shape[1:]).index_add_(0, which, x)
    n = counts.view(-1, *[1] * (x.dim() - 1))
    spread: Tensor = (x - (sums / n)[which]) * (n / (n - 1).clamp_min(1)).sqrt()[which]
    return spread[several]
