"""Spans: the rows of a linear map's weight gradient span its inputs, so a vector outside the span was never an input.

LoRA's factors in a layer W + s B A with inputs x and output gradients d have gradients dB = s sum d (A x)^T and
dA = s sum (B^T d) x^T.
- dB spans the vectors A x, if there are fewer inputs than the rank.
- dA is zero while B is. Afterwards each adapted layer gives `rank` combinations of the inputs. If there are more inputs,
  words near the span of the combinations complete it: subspace pursuit as in SA-MUSIC (Lee, Bresler and Junge, 2012), with the
  vocabulary in all positions as the dictionary.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor

from fedgauge.attacks.text.certificate import Unreadable
from fedgauge.attacks.text.layer_inputs import CHUNK, first_inputs
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.language_parts import Projection
from fedgauge.client.update import Params

LOST = "is zero, or lost in noise"
LOOSEST = 0.2  # above this threshold nearly every vector would pass
POOL = 8192  # vectors of the dictionary, the nearest to a partial span, among which its missing inputs are sought
SAMPLE = 1024  # words by which the dictionary is whitened
RIDGE = 1e-4  # of the mean eigenvalue, in the whitening of the dictionary
DIRECTIONS = 16  # outside a span, for the cheap test
GAP = 1e-2  # the largest threshold of a span that has all inputs: others of them may be lost in the same noise
REWEIGHTINGS = 30  # of the sparse explanation
EXPLAINED = 0.02  # the part of a vector that remains where chosen ones nearly explain it
SAME = 1e-3  # the relative distance below which a vector lies in a span that was completed
NEAR = 1e-2  # and below which it may, where the span was completed by a vector that hardly left it


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
        """The largest one among the views."""
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
        known: their span.
        rows: the combinations (R, d), each factor's at its own scale.
        most: dimensions that a completed span may have.
    """

    known: Tensor
    rows: Tensor
    most: int
    threshold: ClassVar[float] = 0.0  # of the words that complete it

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
        start = [first_inputs(model, params, torch.tensor([w]), i + 1)[0, -1:] for i, w in enumerate(model.start)]
        pool = torch.cat([*start, self._nearest(words, vectors_of)])
        basis = self.completed(pool, whitening, len(start))
        if basis is not None:
            whole = Spans((Span(basis, NEAR, pool.new_zeros(pool.shape[1], 1)),))
            named = sorted(whole.words(model, params, places))[: self.most]
            vectors = [vectors_of(torch.tensor([word]))[0, place] for _, word, place in named]
            if vectors and (needed := self.needed(torch.stack(vectors))):
                return ((0.0, *named[i][1:]) for i in needed)
        raise Unreadable("factors span a part of the inputs only, and no set of words explains their gradients")

    def _nearest(self, words: Tensor, vectors_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the vectors (POOL, d) of words in their positions with the largest part in the span."""
        vectors, shares = torch.empty(0), torch.empty(0)
        for chunk in words.split(CHUNK):
            flat = vectors_of(chunk).flatten(0, 1)
            inside = (flat @ self.known.to(flat).mT).norm(dim=1) / flat.norm(dim=1).clamp(min=1e-30)
            shares = torch.cat([shares.to(flat), inside])
            shares, best = shares.topk(min(POOL, len(shares)))
            vectors = torch.cat([vectors.to(flat).view(-1, flat.shape[1]), flat])[best]
        return vectors

    def completed(self, pool: Tensor, whitening: Tensor, first: int) -> Tensor | None:
        """An orthonormal basis (n, d) of a span that holds all inputs; None where no vectors (N, d) of a pool complete it.

        Vectors are chosen one after the other, the nearest to what is not explained yet, until half of the inputs beyond them
        are in the span. The first ones are certainly inputs; a wrong choice costs only one dimension.
        """
        basis, atoms = self.known.double() @ whitening, pool.double() @ whitening
        chosen = list(range(first))
        enough = max(2, len(self.known) // 2)
        while len(self.known) + len(chosen) <= self.most:
            distances = _distances(basis, atoms, chosen)
            distances[chosen] = torch.inf
            if int((distances <= SAME).sum()) >= enough:
                joined: Tensor = torch.linalg.qr(torch.cat([self.known.double(), pool[chosen].double()]).mT).Q
                return joined.mT
            chosen.append(int(distances.argmin()))
        return None

    def needed(self, vectors: Tensor) -> list[int] | None:
        """The fewest of vectors (N, d) that explain the combinations; None where all together do not.

        A word in a position is nearly a combination of three others that share its word or its position, so many vectors are near
        the span. The sparse explanation is taken: least squares reweighted by the previous coefficients (M-FOCUSS; Cotter et al.,
        2005), without the vectors that are unnecessary.
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
    """Return the relative distance of atoms (N, d) from a basis and the chosen ones."""
    kept = torch.linalg.qr(atoms[list(chosen)].mT).Q
    left = atoms - atoms @ kept @ kept.mT
    rest = torch.linalg.qr((basis - basis @ kept @ kept.mT).mT).Q
    outside = left - left @ rest @ rest.mT
    gone = left.norm(dim=1) <= EXPLAINED * atoms.norm(dim=1)  # it says nothing about the basis
    relative: Tensor = (outside.norm(dim=1) / left.norm(dim=1)).masked_fill(gone, torch.inf)
    return relative


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
    if inner is not None and (len(inner.basis) < rows or rows >= most) and inner.threshold <= GAP:
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
    return PartialSpan(inner.basis, combinations, width - margin)


def _with_margin(found: Span | None, margin: int) -> Spans:
    if found is None:
        raise Unreadable(LOST)
    rank, width = found.basis.shape
    if rank >= width - margin:
        raise Unreadable(f"has rank {rank} of {width}, which leaves less than the margin of {margin} dimensions")
    return Spans((found,))
