"""The attacker's auxiliary images, by number and classes, and pseudo-images drawn from their statistics.

The out-of-distribution attackers of Learning To Invert (Wu et al., UAI 2023, section 4.4) lack the clients' classes. They add
pseudo-images: each coefficient of the discrete cosine transform is drawn from its own normal distribution.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from fedgauge.client.components import Checked, Count, Natural, NotNegative
from fedgauge.client.update import Batch


@dataclass(frozen=True)
class Auxiliary(Checked):
    """A choice among the images reserved for the attacker.

    Args:
        size: how many; default: all that the other arguments allow.
        classes: only images of these classes (empty: of all), out of distribution for clients with others.
        beta: if classes are chosen, the share of images of the other classes.
        pseudo: how many additional pseudo-images, with uniformly drawn labels.
        transform: pseudo-images are normal and independent in each coefficient of the cosine transform, or in each pixel.
    """

    size: Count | None = None
    classes: tuple[int, ...] = ()
    beta: NotNegative = 0.0
    pseudo: Natural = 0
    transform: Literal["dct", "pixel"] = "dct"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta > (1 if self.classes else 0):
            raise ValueError(f"beta is the share, 0 to 1, of images of other classes than classes, got {self.beta}")

    def of(self, images: Batch, classes: int, rng: Generator) -> Batch:
        """The attacker's images (n, C, H, W) and labels, from all reserved ones; ValueError if those are too few."""
        chosen = self._chosen(images.y, classes, rng)
        real = Batch(images.x[chosen], images.y[chosen])
        if not self.pseudo:
            return real
        made = pseudo_images(real.x, self.pseudo, self.transform, rng)
        labels = torch.randint(classes, (self.pseudo,), generator=rng)
        return Batch(torch.cat([real.x, made]), torch.cat([real.y, labels]))

    def _chosen(self, y: Tensor, classes: int, rng: Generator) -> Tensor:
        if unknown := [c for c in self.classes if not 0 <= c < classes]:
            raise ValueError(f"auxiliary classes must be from 0 to {classes - 1}, got {unknown[0]}")
        order = torch.randperm(len(y), generator=rng)
        if not self.classes:
            return self._first(order, self.size or len(order), "auxiliary images")
        inside = torch.isin(y[order], torch.tensor(self.classes))
        own, others = order[inside], order[~inside]
        most = min(_most(len(own), 1 - self.beta), _most(len(others), self.beta))
        size = most if self.size is None else self.size
        mixed = round(self.beta * size)
        inside_classes = self._first(own, size - mixed, f"auxiliary images of classes {list(self.classes)}")
        return torch.cat([inside_classes, self._first(others, mixed, "auxiliary images of the other classes")])

    def _first(self, order: Tensor, count: int, what: str) -> Tensor:
        if count > len(order):
            raise ValueError(f"expected at most {len(order):,} {what}, which is how many are reserved, got {count:,}")
        return order[:count]

    def __str__(self) -> str:
        """For the threat-model card, after the number of images."""
        words = "auxiliary images of the same distribution"
        if self.classes:
            words = f"auxiliary images, {1 - self.beta:.0%} of them of classes {', '.join(map(str, self.classes))}"
        made = {"dct": "cosine transform", "pixel": "pixels"}[self.transform]
        return words + (f" and {self.pseudo:,} pseudo-images, normal in the {made}" if self.pseudo else "")


def _most(there: int, share: float) -> int:
    """The size of the largest mixture in which `there` images have this share."""
    return there if share == 1 else math.floor(there / share + 1e-9) if share else 2**62


def pseudo_images(x: Tensor, count: int, transform: Literal["dct", "pixel"], rng: Generator) -> Tensor:
    """Images (count, C, H, W) in [0, 1], each coefficient drawn with its mean and deviation in x (N, C, H, W)."""
    high, wide = (cosine_matrix(n) if transform == "dct" else torch.eye(n, dtype=torch.float64) for n in x.shape[2:])
    deviation, mean = torch.std_mean(high @ x.double() @ wide.T, 0, correction=0)
    drawn = mean + deviation * torch.randn((count, *x.shape[1:]), generator=rng, dtype=torch.float64)
    return (high.T @ drawn @ wide).clamp(0, 1).to(x)


def cosine_matrix(n: int) -> Tensor:
    """The orthonormal DCT-II (n, n): row k is sqrt(2 / n) cos(pi (i + 1/2) k / n), the first sqrt(1 / n)."""
    from scipy.fft import dct

    return torch.from_numpy(dct(torch.eye(n, dtype=torch.float64).numpy(), axis=0, norm="ortho"))
