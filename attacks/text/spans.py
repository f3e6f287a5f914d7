"""Spans: the rows of a linear map's weight gradient span its inputs, so a vector outside the span was never an input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.client.models.language_parts import Projection

LOOSEST = 0.2  # above this threshold nearly every vector would pass


@dataclass(frozen=True, eq=False)
class Span:
    """The span of one attention block's inputs, over all sentences and positions.

    Args:
        basis: (r, d), orthonormal rows.
        threshold: the relative distance by which rounding or noise may have moved an input out of the span.
        sketch: (d, s), random directions outside the span, for the cheap test `near`.
    """

    basis: Tensor
    threshold: float
    sketch: Tensor

    @property
    def rank(self) -> int:
        """The dimension: the number of different inputs, if these are independent."""
        return len(self.basis)

    def distance(self, vectors: Tensor) -> Tensor:
        """|v - projection of v| / |v| of vectors (..., d)."""
        flat = vectors.reshape(-1, vectors.shape[-1]).double()
        outside = flat - flat @ self.basis.mT @ self.basis
        relative: Tensor = outside.norm(dim=1) / flat.norm(dim=1).clamp(min=1e-300)
        return relative.view(vectors.shape[:-1])

    def near(self, vectors: Tensor) -> Tensor:
        """Which vectors (..., d) may be inputs: a cheap test that every input passes, and few others."""
        length = vectors.square().sum(-1)
        return (vectors @ self.sketch).square().mean(-1) <= (4 * self.threshold) ** 2 * length


def span(
    update: Mapping[str, Tensor], maps: Sequence[Projection], most: int, rng: torch.Generator, directions: int = 16
) -> Span | None:
    """The span of the inputs that several maps share; None where their gradients are zero.

    Its rank is that of the gradients at their precision: singular values below rounding, or below those that no input explains,
    do not count. The threshold is the relative size of that noise in the weakest direction that counts.

    Args:
        most: the largest possible number of inputs; the singular values after it are noise, wherever it comes from.
    """
    parts = [m.of(update)[0].double().cpu() for m in maps]
    eps = max(torch.finfo(update[m.weight].dtype).eps for m in maps)
    sizes = [torch.linalg.matrix_norm(part, 2) for part in parts]
    scaled = [part / size for part, size in zip(parts, sizes, strict=True) if float(size) > 0]
    if not scaled:
        return None
    rows = torch.cat(scaled)  # each map at its own scale: its rounding is relative to that
    _, values, basis = torch.linalg.svd(torch.linalg.qr(rows, mode="r").R)  # the basis is of the whole space
    noise = float(values[0]) * eps * rows.shape[1] ** 0.5
    if most < len(values):
        noise = max(noise, 2 * float(values[most]))
    rank = int((values[:most] > noise).sum())
    if rank == 0:
        return None
    outside = basis[rank:]
    drawn = torch.randn(len(outside), directions, generator=rng, dtype=torch.float64)
    like = update[maps[0].weight]
    sketch = (outside.mT @ drawn).to(like)
    return Span(basis[:rank].to(like.device), min(noise / float(values[rank - 1]), LOOSEST), sketch)
