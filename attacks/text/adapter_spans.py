"""Spans through LoRA's factors, where a layer's own weights are frozen and a rank limits what its gradients span.

A layer W + s B A with inputs x and output gradients d has gradients dB = s sum d (A x)^T and dA = s sum (B^T d) x^T.
- dB spans the inputs as A shows them: it says which A x were there while there are fewer inputs than the rank.
- dA is zero while B is. Afterwards each adapted layer gives `rank` combinations of the inputs. Where they are fewer than the
  inputs they span a part of it, and words that nearly lie in that part complete it: subspace pursuit as in SA-MUSIC (Lee,
  Bresler and Junge, 2012), with the vocabulary in all positions as the dictionary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from fedgauge.attacks.text.spans import LOOSEST, Span, span
from fedgauge.client.models.language_parts import Projection
from fedgauge.client.update import Params

POOL = 8192  # vectors of the dictionary, the nearest to a partial span, among which its missing inputs are sought
RIDGE = 1e-4  # of the mean eigenvalue, in the whitening of the dictionary
GAP = 1e-2  # the largest threshold of a span that has all inputs: others of them may be lost in the same noise
REWEIGHTINGS = 30  # of the sparse explanation
EXPLAINED = 0.02  # the part of a vector that remains where chosen ones nearly explain it
SAME = 1e-3  # the relative distance below which a vector lies in a span that was completed
NEAR = 1e-2  # and below which it may, where the span was completed by a vector that hardly left it


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
    """Combinations of the inputs that span a part of these: there are more inputs than the factors have rows.

    Args:
        known: their span.
        rows: the combinations (R, d), each factor's at its own scale.
        most: dimensions that a completed span may have.
    """

    known: Span
    rows: Tensor
    most: int

    def completed(self, pool: Tensor, whitening: Tensor, first: int) -> Tensor | None:
        """An orthonormal basis (n, d) of a span that holds all inputs; None where no set of vectors completes it.

        Vectors are chosen one after the other, the nearest to what is not explained yet, until half of the inputs beyond them
        lie in the span. One that was chosen in error costs a dimension only.

        Args:
            pool: vectors (N, d) among which most inputs are.
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
                joined: Tensor = torch.linalg.qr(torch.cat([self.known.basis.double(), pool[chosen].double()]).mT).Q
                return joined.mT
            chosen.append(int(distances.argmin()))
        return None

    def needed(self, vectors: Tensor) -> list[int] | None:
        """The fewest of vectors (N, d) that explain the combinations; None where all together do not.

        A word in a position is nearly a combination of three others that share its word or its position, so many vectors lie near
        the span. Of all explanations the sparse one is taken: least squares reweighted by the coefficients found before (M-FOCUSS;
        Cotter et al., 2005), then those leave that nothing needs.
        """
        rows = self.rows.double()
        size = float(torch.linalg.matrix_norm(rows, 2))
        noise = float(torch.finfo(self.rows.dtype).eps) * math.sqrt(rows.shape[1]) * size
        unit = (vectors / vectors.norm(dim=1, keepdim=True)).double()
        basis = torch.linalg.qr(unit.mT).Q
        if len(unit) > self.most or float((rows - rows @ basis @ basis.mT).norm()) > noise * math.sqrt(len(rows)):
            return None
        kept, weights = torch.arange(len(unit), device=unit.device), unit.new_ones(len(unit))
        for step in range(REWEIGHTINGS):  # its powers are of the 1-norm, then of the square root
            scaled = weights[:, None] * unit[kept]
            inner = scaled @ scaled.mT
            inner.diagonal().add_(noise**2)
            sizes = torch.linalg.solve(inner, scaled @ rows.mT).norm(dim=1) * weights  # of the vectors' coefficients
            some = sizes > noise
            kept, weights = kept[some], sizes[some] ** (0.5 if step < REWEIGHTINGS // 3 else 0.75)
        chosen: list[int] = kept.tolist()
        while chosen:  # what each alone explains of the combinations
            inverse = torch.linalg.pinv(unit[chosen])
            shares = (rows @ inverse).norm(dim=0) / inverse.norm(dim=0)
            if float(shares.min()) > noise:
                break
            chosen.pop(int(shares.argmin()))
        return chosen


def _distances(basis: Tensor, atoms: Tensor, chosen: Sequence[int]) -> Tensor:
    """How far atoms (N, d) lie outside a basis and the chosen ones, relative to what of them the chosen ones leave."""
    kept = torch.linalg.qr(atoms[list(chosen)].mT).Q if chosen else atoms.new_zeros(atoms.shape[1], 0)
    left = atoms - atoms @ kept @ kept.mT
    rest = torch.linalg.qr((basis - basis @ kept @ kept.mT).mT).Q
    outside = left - left @ rest @ rest.mT
    gone = left.norm(dim=1) <= EXPLAINED * atoms.norm(dim=1)  # it says nothing about the basis
    relative: Tensor = (outside.norm(dim=1) / left.norm(dim=1)).masked_fill(gone, torch.inf)
    return relative


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
    if inner is not None and (inner.rank < rows or rows >= most) and inner.threshold <= GAP:
        return _with_margin(inner, width, margin)
    seen = [(params[a], span(update, [Projection(b, None)], min(most, rank), rng)) for a, b in factors]
    views = [(a, found) for a, found in seen if found is not None]
    if not views:
        return "is zero, or lost in noise"
    stretch = math.sqrt(width / rank)  # how much larger an input's rounding is beside what A shows of it
    # a factor in whose gradient some inputs are lost in rounding would refuse these
    full = max(v.rank for _, v in views)
    if full < rank:
        best = min(v.threshold for _, v in views if v.rank == full)
        chosen = [(a, v) for a, v in views if v.rank == full and v.threshold <= max(GAP, best)]
        loose = (replace(v, threshold=min(stretch * v.threshold, LOOSEST)) for _, v in chosen)
        return ProjectedSpans(tuple((a, v) for (a, _), v in zip(chosen, loose, strict=True)))
    if inner is None:
        return (
            f"spans all {rank} dimensions of LoRA's factor A, so every word fits: B is zero, and there are as many tokens as the "
            "rank or more; later rounds, in which B is not zero, tell more"
        )
    return PartialSpan(inner, _scaled(update, factors), width - margin)


def _scaled(update: Mapping[str, Tensor], factors: Sequence[tuple[str, str]]) -> Tensor:
    """The factors' gradients (R, d), each at its own scale."""
    sizes = [float(torch.linalg.matrix_norm(update[a].double(), 2)) for a, _ in factors]
    return torch.cat([update[a] / size for (a, _), size in zip(factors, sizes, strict=True) if size > 0])


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
    vectors: Tensor = field(default_factory=lambda: torch.empty(0))
    shares: Tensor = field(default_factory=lambda: torch.empty(0))

    def add(self, vectors: Tensor) -> None:
        """Consider vectors (..., d)."""
        flat = vectors.reshape(-1, vectors.shape[-1])
        basis = self.partial.known.basis.to(flat)
        shares = (flat @ basis.mT).norm(dim=1) / flat.norm(dim=1).clamp(min=1e-30)
        if len(self.shares):
            some = shares > self.shares.min() if len(self.shares) >= POOL else shares > 0
            flat, shares = torch.cat([self.vectors, flat[some]]), torch.cat([self.shares, shares[some]])
        self.shares, best = shares.topk(min(POOL, len(shares)))
        self.vectors = flat[best]
