"""Spans: the rows of a linear map's weight gradient span its inputs, so a vector outside the span was never an input.

LoRA's factors in a layer W + s B A with inputs x and output gradients d have gradients dB = s sum d (A x)^T and
dA = s sum (B^T d) x^T.
- dB spans the vectors A x, if there are fewer inputs than the rank.
- dA is zero while B is. Afterwards each adapted layer gives `rank` combinations of the inputs. If there are more inputs, the
  fewest words in their positions that explain the combinations are sought: sparse Bayesian learning over the vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgauge.attacks.text.certificate import Unreadable
from fedgauge.attacks.text.layer_inputs import CHUNK, first_inputs
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.language_parts import Projection
from fedgauge.client.update import Params

LOST = "is zero, or lost in noise"
LOOSEST = 0.2  # above this threshold nearly every vector would pass
POOL = 4096  # vectors of words in their positions, the nearest to a partial span, among which its inputs are sought
SAMPLE = 1024  # words by which these vectors are whitened
RIDGE = 1e-4  # of the mean eigenvalue, in the whitening
DIRECTIONS = 16  # outside a span, for the cheap test
GAP = 1e-2  # the largest threshold of a span that has all inputs: noise may hide others, unless the span has a dimension for each
STEPS = 100  # of the search for a sparse explanation
COOLING = 0.75  # of its noise in a step
COLDEST = 1e-13  # variance of the noise, of unit vectors
SINGULAR = 1e-14  # of the largest variance, which the noise never falls below
VANISHED = 1e-7  # variance below which a vector leaves, in units of the noise
CERTAIN = 20.0  # standard deviations by which a vector is needed
EXPLAINED = 1e-5  # the part of the combinations that an explanation may leave
SAME = 1e-4  # the relative distance below which a vector lies in a span that was completed


@dataclass(frozen=True, eq=False)
class Span:
    """The span of one attention block's inputs, over all sentences and positions, as one gradient or several show it.

    Args:
        basis: (r, d), orthonormal rows.
        threshold: the relative distance by which rounding or noise may have moved an input out of the span.
        sketch: (d, s), random directions outside the span, for the cheap test `near`.
        through: LoRA's factor A (d, width): the span shows A x; None: it shows the inputs x themselves.
    """

    basis: Tensor
    threshold: float
    sketch: Tensor
    through: Tensor | None = None

    @property
    def stretch(self) -> float:
        """Return the ratio of an input's rounding to its visible part."""
        return 1.0 if self.through is None else math.sqrt(self.through.shape[1] / len(self.through))

    def distance(self, vectors: Tensor) -> Tensor:
        """|v - projection of v| / |v| of vectors (..., width)."""
        shown = self._shown(vectors)
        flat = shown.reshape(-1, shown.shape[-1]).double()
        outside = flat - flat @ self.basis.mT @ self.basis
        relative: Tensor = outside.norm(dim=1) / flat.norm(dim=1).clamp(min=1e-300)
        return relative.view(vectors.shape[:-1])

    def near(self, vectors: Tensor) -> Tensor:
        """Return the vectors (..., width) that may be inputs: a cheap test that every input passes, and few others."""
        shown = self._shown(vectors)
        length = shown.square().sum(-1)
        return (shown @ self.sketch).square().mean(-1) <= (4 * self.threshold) ** 2 * length

    def _shown(self, vectors: Tensor) -> Tensor:
        return vectors if self.through is None else vectors @ self.through.mT


@dataclass(frozen=True, eq=False)
class Spans:
    """One span of a block's inputs, or those that several of LoRA's factors A show: an input is in all of them."""

    views: tuple[Span, ...]

    @property
    def threshold(self) -> float:
        """The distance by which rounding or noise may have moved an input."""
        return max(view.threshold for view in self.views)

    @property
    def stretch(self) -> float:
        return max(view.stretch for view in self.views)

    def distance(self, vectors: Tensor) -> Tensor:
        """The largest distance of vectors (..., width) among the views, each at the scale of its own threshold."""
        scaled = [view.distance(vectors) * (self.threshold / view.threshold) for view in self.views]
        return torch.stack(scaled).amax(0)

    def near(self, vectors: Tensor) -> Tensor:
        """Return the vectors (..., width) that may be inputs: a cheap test that every input passes."""
        return torch.stack([view.near(vectors) for view in self.views]).all(0)

    def words(self, model: LanguageModel, params: Params, places: int) -> Iterator[tuple[float, int, int]]:
        """Return the words with inputs in the span of the first attention block: distance, word, position."""
        for chunk in _vocabulary(model).split(CHUNK):
            vectors = first_inputs(model, params, chunk, places)
            some = self.near(vectors).nonzero()
            distances = self.distance(vectors[some[:, 0], some[:, 1]]).tolist()
            for (row, place), distance in zip(some.tolist(), distances, strict=True):
                if distance <= self.threshold:
                    yield distance, int(chunk[row]), place


def _vocabulary(model: LanguageModel) -> Tensor:
    return torch.tensor([i for i in range(model.vocabulary) if i != model.pad])


def span(parts: Sequence[Tensor], most: int, rng: Generator, through: Tensor | None = None) -> Span | None:
    """The span of the inputs that maps with these gradients (out, d) share; None where they are zero, or lost in noise.

    Its rank is that of the gradients at their precision: singular values below rounding, or below those that no input explains,
    do not count. The threshold is the relative size of that noise in the weakest direction that counts.

    Args:
        most: the largest possible number of inputs; the singular values after it are noise, wherever it comes from.
    """
    rows = _scaled([part.double().cpu() for part in parts])
    if rows is None:
        return None
    _, values, basis = torch.linalg.svd(torch.linalg.qr(rows, mode="r").R)  # the basis is of the whole space
    noise = float(values[0]) * torch.finfo(parts[0].dtype).eps * rows.shape[1] ** 0.5
    if most < len(values):
        noise = max(noise, 2 * float(values[most]))
    rank = int((values[:most] > noise).sum())
    if rank == 0:
        return None
    drawn = torch.randn(len(basis) - rank, DIRECTIONS, generator=rng, dtype=torch.float64)
    sketch = (basis[rank:].mT @ drawn).to(parts[0])
    return Span(basis[:rank].to(parts[0].device), min(noise / float(values[rank - 1]), LOOSEST), sketch, through)


def _scaled(parts: Sequence[Tensor]) -> Tensor | None:
    """Gradients (R, d) of maps, each at its own scale, as its rounding is relative to that; None where all are zero."""
    sizes = [float(torch.linalg.matrix_norm(part.double(), 2)) for part in parts]
    scaled = [part / size for part, size in zip(parts, sizes, strict=True) if size > 0]
    return torch.cat(scaled) if scaled else None


@dataclass(frozen=True, eq=False)
class PartialSpan:
    """Combinations of the inputs that span a part of these: there are more inputs than the factors have rows.

    Args:
        rows: the combinations (R, d), each factor's at its own scale.
        most: dimensions that the inputs may have.
    """

    rows: Tensor
    most: int
    threshold: ClassVar[float] = 0.0  # of the words that explain them

    def words(self, model: LanguageModel, params: Params, places: int) -> Iterator[tuple[float, int, int]]:
        """The words of the vocabulary in their positions that explain the combinations, as `Spans.words`.

        Raises:
            Unreadable: none do.
        """
        words, vectors_of = _vocabulary(model), partial(first_inputs, model, params, places=places)
        sample = torch.randperm(len(words), generator=Generator().manual_seed(0))[:SAMPLE]
        flat = vectors_of(words[sample]).flatten(0, 1).double()
        values, axes = torch.linalg.eigh(flat.mT @ flat / len(flat))
        whitening = axes * (values.clamp(min=0) + RIDGE * values.mean()).rsqrt() @ axes.mT
        pool, atoms = self._nearest(words, vectors_of, whitening)
        unit = F.normalize(atoms.double() @ whitening, dim=1)
        if (basis := self.completed(unit, whitening)) is None:
            raise Unreadable("factors span a part of the inputs only, and no set of words explains their gradients")
        inside = (unit - unit @ basis.mT @ basis).norm(dim=1) <= SAME
        return ((0.0, int(words[i // places]), i % places) for i in pool[inside].tolist())

    def _nearest(
        self, words: Tensor, vectors_of: Callable[[Tensor], Tensor], whitening: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The vectors (POOL, d) of words in their positions with the largest part in the span once whitened, and their numbers."""
        inside = torch.linalg.qr((self.rows.double() @ whitening).mT).Q
        best, shares, kept = torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0)
        first = 0
        for chunk in words.split(CHUNK):
            flat = vectors_of(chunk).flatten(0, 1)
            white = flat @ whitening.to(flat)
            share = (white @ inside.to(white)).norm(dim=1) / white.norm(dim=1).clamp(min=1e-30)
            shares, chosen = torch.cat([shares.to(share), share]).topk(min(POOL, len(shares) + len(share)))
            best = torch.cat([best.to(chosen), torch.arange(first, first + len(flat)).to(chosen)])[chosen]
            kept = torch.cat([kept.to(flat).view(-1, flat.shape[1]), flat])[chosen]
            first += len(flat)
        return best, kept

    def completed(self, unit: Tensor, whitening: Tensor) -> Tensor | None:
        """An orthonormal basis (n, d) of the fewest unit vectors (N, d) that explain the combinations; None where no few do.

        A word in a position is nearly a combination of three others that share its word or its position, so many vectors are near
        the span. Sparse Bayesian learning (Wipf and Rao, 2007) gives each vector a variance that all combinations share; as the
        noise cools, the likeliest variances of vectors that are unnecessary vanish. Least squares then judges those that are left.
        """
        rows = self.rows.double() @ whitening
        seen = torch.linalg.svd(rows, full_matrices=False).Vh
        kept, variances = torch.arange(len(unit), device=unit.device), unit.new_ones(len(unit))
        for step in range(STEPS):
            noise, some = max(COLDEST, 0.1 * COOLING**step), unit[kept]
            joint = (some.mT * variances) @ some
            joint.diagonal().add_(noise + SINGULAR * float(joint.diagonal().max()))
            factor, failed = torch.linalg.cholesky_ex(joint)
            if failed:  # the noise is below rounding
                break
            inner = torch.linalg.solve_triangular(factor, some.mT, upper=False)
            shares = inner.mT @ torch.linalg.solve_triangular(factor, seen.mT, upper=False)
            variances *= shares.square().mean(1) / inner.square().sum(0)
            alive = variances > VANISHED * noise
            kept, variances = kept[alive], variances[alive]
        kept = kept[variances.argsort(descending=True)[: self.most]]
        while len(kept):  # what each alone explains of the combinations, in units of what all leave unexplained
            inverse = torch.linalg.pinv(unit[kept], rtol=1e-13)
            sizes = rows @ inverse
            left = float((rows - sizes @ unit[kept]).norm()) / math.sqrt(rows.shape[1] - len(kept))
            certain = sizes.norm(dim=0) / inverse.norm(dim=0) / left
            if float(certain.min()) > CERTAIN:
                small = left * math.sqrt(rows.shape[1]) <= EXPLAINED * float(rows.norm())
                basis: Tensor = torch.linalg.qr(unit[kept].mT).Q
                return basis.mT if small else None
            kept = kept[torch.arange(len(kept), device=kept.device) != certain.argmin()]
        return None


def block_span(
    update: Mapping[str, Tensor], params: Params, maps: Sequence[Projection], most: int, margin: int, rng: Generator
) -> Spans | PartialSpan:
    """Return the span of the maps' common inputs, at most so many.

    Raises:
        Unreadable: there is none, or no margin.
    """
    whole = [m.of(update)[0] for m in maps if m.weight in update]
    if whole:
        return _with_margin(span(whole, most, rng), margin)
    factors = list(dict.fromkeys(m.factors for m in maps if m.factors is not None and m.factors[1] in update))
    if not factors:
        raise Unreadable("is not shared")
    inner_rows = [update[a] for a, _ in factors]
    rows, (rank, width) = sum(map(len, inner_rows)), params[factors[0][0]].shape
    inner = span(inner_rows, min(most, rows), rng)
    if inner is not None and (
        len(inner.basis) == most or (len(inner.basis) < rows or rows >= most) and inner.threshold <= GAP
    ):
        return _with_margin(inner, margin)
    seen = [span([update[b]], min(most, rank), rng, params[a]) for a, b in factors]
    views = [view for view in seen if view is not None]
    if not views:
        raise Unreadable(LOST)
    full = max(len(view.basis) for view in views)
    if full < rank:
        # a factor in whose gradient some inputs are lost in rounding would refuse these
        views = [view for view in views if len(view.basis) == full]
        loose = max(GAP, min(view.threshold for view in views))
        views = [view for view in views if view.threshold <= loose]
        return Spans(tuple(replace(v, threshold=min(v.stretch * v.threshold, LOOSEST)) for v in views))
    combinations = _scaled(inner_rows)
    if inner is None or combinations is None:
        raise Unreadable(f"spans all {rank} dimensions of LoRA's A, so every word fits; later rounds reveal more")
    return PartialSpan(combinations, width - margin)


def _with_margin(found: Span | None, margin: int) -> Spans:
    if found is None:
        raise Unreadable(LOST)
    rank, width = found.basis.shape
    if rank >= width - margin:
        raise Unreadable(f"has rank {rank} of {width}, which leaves less than the margin of {margin} dimensions")
    return Spans((found,))
