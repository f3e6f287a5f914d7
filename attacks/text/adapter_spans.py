"""Spans through LoRA's factors, where a layer's own weights are frozen and a rank limits what its gradients span.

A layer W + s B A with inputs x and output gradients d has gradients dB = s sum d (A x)^T and dA = s sum (B^T d) x^T.
- dB spans the inputs as A shows them: it says which A x were there while there are fewer inputs than the rank.
- dA is zero while B is. Afterwards each adapted layer gives `rank` combinations of the inputs. Where they are fewer than the
  inputs they span a part of it, and words that nearly lie in that part complete it: subspace pursuit as in SA-MUSIC (Lee,
  Bresler and Junge, 2012), with the vocabulary in all positions as the dictionary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from fedgauge.attacks.text.spans import Span, span
from fedgauge.client.models.language_parts import Projection
from fedgauge.client.update import Params

POOL = 4096  # vectors of the dictionary, the nearest to a partial span, among which its missing inputs are sought
RIDGE = 1e-4  # of the mean eigenvalue, in the whitening of the dictionary
EXPLAINED = 1e-6  # the part of a vector that remains where chosen ones explain it
SAME = 1e-3  # the relative distance below which a vector lies in a span that was completed


@dataclass(frozen=True, eq=False)
class ProjectedSpans:
    """Spans of one block's inputs as several factors A show them: an input lies in all of them.

    Args:
        views: factors A (rank, d) with the spans of A x.
    """

    views: tuple[tuple[Tensor, Span], ...]

    @property
    def rank(self) -> int:
        """The largest dimension among the views."""
        return max(seen.rank for _, seen in self.views)

    @property
    def threshold(self) -> float:
        """The distance by which rounding or noise may have moved an input."""
        return max(seen.threshold for _, seen in self.views)

    @property
    def stretch(self) -> float:
        """How much larger an input's rounding is beside what the factors show of it."""
        return max(math.sqrt(a.shape[1] / len(a)) for a, _ in self.views)

    def distance(self, vectors: Tensor) -> Tensor:
        """The largest distance of vectors (..., d) among the views, each at the scale of its own threshold."""
        scaled = [seen.distance(vectors @ a.mT) * (self.threshold / seen.threshold) for a, seen in self.views]
        return torch.stack(scaled).amax(0)

    def near(self, vectors: Tensor) -> Tensor:
        """Which vectors (..., d) may be inputs: a cheap test that every input passes."""
        return torch.stack([seen.near(vectors @ a.mT) for a, seen in self.views]).all(0)


@dataclass(frozen=True, eq=False)
class PartialSpan:
    """As many combinations of the inputs as the factors have rows, and perhaps fewer than there are inputs.

    Args:
        known: their span.
        most: dimensions that a completed span may have.
    """

    known: Span
    most: int

    def completed(self, pool: Tensor, whitening: Tensor, first: int) -> Span | None:
        """The span of all inputs; None where no set of vectors completes it.

        Vectors are chosen one after the other, the nearest to what is not explained yet, until half of the inputs beyond them
        lie in the span. One that was chosen in error costs a dimension only, and leaves again at the end.

        Args:
            pool: vectors (N, d) among which the inputs are.
            whitening: (d, d), makes the dictionary's vectors less alike.
            first: vectors at the pool's beginning that are inputs for certain.
        """
        basis, atoms = self.known.basis.double() @ whitening, pool.double() @ whitening
        chosen = list(range(first))
        enough = max(2, self.known.rank // 2)
        while self.known.rank + len(chosen) <= self.most:
            distances = _distances(basis, atoms, chosen)
            distances[chosen] = torch.inf
            if int((distances <= SAME).sum()) >= enough:
                return self._with(pool.double()[_needed(basis, atoms, chosen, enough)])
            chosen.append(int(distances.argmin()))
        return None

    def _with(self, vectors: Tensor) -> Span:
        unit = vectors / vectors.norm(dim=1, keepdim=True)
        joined, _ = torch.linalg.qr(torch.cat([self.known.basis.double(), unit]).mT, mode="complete")
        rank = self.known.rank + len(unit)
        outside = joined[:, rank:]
        drawn = torch.randn(outside.shape[1], self.known.sketch.shape[1], generator=torch.Generator().manual_seed(0))
        sketch = (outside @ drawn.double()).to(self.known.sketch)
        return replace(self.known, basis=joined[:, :rank].mT.contiguous(), sketch=sketch)


def _distances(basis: Tensor, atoms: Tensor, chosen: Sequence[int]) -> Tensor:
    """How far atoms (N, d) lie outside a basis and the chosen ones, relative to what of them the chosen ones leave."""
    kept = torch.linalg.qr(atoms[list(chosen)].mT).Q if chosen else atoms.new_zeros(atoms.shape[1], 0)
    left = atoms - atoms @ kept @ kept.mT
    rest = torch.linalg.qr((basis - basis @ kept @ kept.mT).mT).Q
    outside = left - left @ rest @ rest.mT
    gone = left.norm(dim=1) <= EXPLAINED * atoms.norm(dim=1)  # a chosen one's twin
    relative: Tensor = (outside.norm(dim=1) / left.norm(dim=1)).masked_fill(gone, torch.inf)
    return relative


def _needed(basis: Tensor, atoms: Tensor, chosen: Sequence[int], enough: int) -> list[int]:
    """The chosen atoms without which fewer than enough others lie in the span."""
    kept = list(chosen)
    for atom in chosen:
        rest = [other for other in kept if other != atom]
        distances = _distances(basis, atoms, rest)
        distances[kept] = torch.inf
        if int((distances <= SAME).sum()) >= enough:
            kept = rest
    return kept


BlockSpan = Span | ProjectedSpans | PartialSpan


def is_shared(projection: Projection, update: Mapping[str, Tensor]) -> bool:
    """Whether a map's gradient, or that of a factor beside it, is in an update."""
    return projection.weight in update or (projection.factors is not None and projection.factors[1] in update)


def block_span(
    update: Mapping[str, Tensor], params: Params, maps: Sequence[Projection], most: int, margin: int, rng: Generator
) -> BlockSpan | str:
    """What the gradients of maps with the same inputs tell of these, or a sentence's end that says why nothing.

    Args:
        most: the largest possible number of inputs.
        margin: dimensions that must be left outside the span.
    """
    whole = [m for m in maps if m.weight in update]
    if whole:
        width = int(whole[0].of(update)[0].shape[-1])
        found = span(update, whole, most, rng)
        if found is None:
            return "is zero, or lost in noise"
        return _with_margin(found, width, margin)
    factors = list(dict.fromkeys(m.factors for m in maps if m.factors is not None and m.factors[1] in update))
    rows = sum(len(update[a]) for a, _ in factors)
    rank, width = len(params[factors[0][0]]), int(params[factors[0][0]].shape[1])
    inner = span(update, [Projection(a, None) for a, _ in factors], min(most, rows), rng)
    if inner is not None and (inner.rank < rows or rows >= most):
        return _with_margin(inner, width, margin)
    views = [(params[a], span(update, [Projection(b, None)], min(most, rank), rng)) for a, b in factors]
    if all(seen is None for _, seen in views):
        return "is zero, or lost in noise"
    below = tuple((a, seen) for a, seen in views if seen is not None and seen.rank < len(a))
    if below:
        return ProjectedSpans(below)
    if inner is None:
        return (
            f"spans all {rank} dimensions of LoRA's factor A, so every word fits: B is zero, and there are as many tokens as the "
            "rank or more; later rounds, in which B is not zero, tell more"
        )
    return PartialSpan(inner, width - margin)


def _with_margin(found: Span, width: int, margin: int) -> Span | str:
    if found.rank < width - margin:
        return found
    return (
        f"has rank {found.rank} of {width}: as many tokens or more than the {width - margin} that leave {margin} dimensions "
        "outside the span; set a smaller margin"
    )


def whitening_of(vectors: Tensor) -> Tensor:
    """The map (d, d) that makes a dictionary's vectors (N, d) uncorrelated."""
    flat = vectors.reshape(-1, vectors.shape[-1]).double()
    values, axes = torch.linalg.eigh(flat.mT @ flat / len(flat))
    white: Tensor = axes * (values.clamp(min=0) + RIDGE * values.mean()).rsqrt() @ axes.mT
    return white


@dataclass(eq=False)
class NearestVectors:
    """The vectors of a dictionary nearest to a span, gathered chunk by chunk."""

    partial: PartialSpan
    vectors: Tensor | None = None
    shares: Tensor | None = None

    def add(self, vectors: Tensor) -> None:
        """Consider vectors (..., d)."""
        flat = vectors.reshape(-1, vectors.shape[-1])
        basis = self.partial.known.basis.to(flat)
        shares = (flat @ basis.mT).norm(dim=1) / flat.norm(dim=1).clamp(min=1e-30)
        if self.shares is not None and self.vectors is not None:
            least = self.shares.min() if len(self.shares) >= POOL else shares.new_zeros(())
            some = shares > least
            flat, shares = torch.cat([self.vectors, flat[some]]), torch.cat([self.shares, shares[some]])
        self.shares, best = shares.topk(min(POOL, len(shares)))
        self.vectors = flat[best]
