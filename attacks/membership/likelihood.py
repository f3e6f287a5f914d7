"""The likelihood ratio of a candidate: in the batch or not, under the chain's own density and an unknown rest of the batch.

The rest of the batch is a sum of gradients of the population. It counts as normal, and public examples give its mean, its
principal axes and the variance that is left in each entry. The chain adds its noise to an entry, or shows its sign, or drops it.
An entry then has a score (the slope of log p(seen) by the expected update) and an information, and with the axes

    log p(seen | candidate) - log p(seen | another) = <change, w> - change' P change / 2

where `change` is how the candidate moves the expected update, w the score at the most probable place along the axes, and P the
information without the axes' part. For normal noise this is exact; for other noise it is exact to first order in the change.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgauge.attacks.base import Wave
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.client.chain import Chain
from fedgauge.client.rng import generator
from fedgauge.client.transforms import Link, UpdateDistribution, is_per_example
from fedgauge.client.update import Batch, as_rows

AXES = 128  # principal axes of the population's gradients, at most half of the public examples
AT_ONCE = 2**27  # numbers of public gradients that are held at once
EVEN = 0.1  # part of an entry's variance that is its tensor's mean, as few examples leave some entries without any
LEAST = 1e-6  # variance of an entry, in mean squares of the update
FAINT = 1e-6  # mean squares that an update counts with at least, in those of one example's expected part of it
ROOT = math.sqrt(2)
OUTLYING = 10  # times the median of the updates' mean squares
STEPS = 30  # towards the most probable place along the axes


@dataclass(frozen=True, eq=False)
class RestOfBatch:
    """The server's knowledge of a candidate's batch mates, as gradients that enter the mean.

    Args:
        mean: (d,) of one of them.
        instead: (d,) expected gradient of the example that replaces the candidate if it is not in the batch.
        axes: (r, d) orthonormal.
        variances: (r,) of one example's gradient along the axes.
        entries: (d,) variance of each entry apart from the axes.
    """

    mean: Tensor
    instead: Tensor
    axes: Tensor
    variances: Tensor
    entries: Tensor

    @classmethod
    def of_population(cls, public: CandidateGradients, axes: int = AXES) -> "RestOfBatch":
        """Unknown examples like these public ones, as many as fit."""
        if len(public) < 2:
            raise ValueError("fewer than 2 public examples show how the rest of a batch varies")
        tensors = [t.numel() for t in public.params.values()]
        count = max(2, min(len(public), AT_ONCE // sum(tensors)))
        some = Batch(public.batch.x[:count], public.batch.y[:count])
        draws = generator("what a network draws") if public.is_stochastic else None  # as the clients' networks did
        used = CandidateGradients(public.known, public.params, some, draws=draws)
        rows = torch.cat(list(used.rows()))
        rows *= used.kept.to(rows)[:, None]
        if not (rows.isfinite().all() and rows.any()):
            raise ValueError("the public examples' gradients are not finite, or all zero")
        mean = rows.mean(0)
        rows -= mean
        variances, turns = torch.linalg.eigh((rows @ rows.T).double() / count)
        first = max(1, min(axes, count // 2))
        variances, turns = variances[-first:].clamp_min(1e-12 * float(variances[-1])), turns[:, -first:]
        along = (turns / (count * variances).sqrt()).T.to(rows) @ rows
        left = (rows.square().mean(0) - (along.square() * variances[:, None].to(rows)).sum(0)).clamp_min(0)
        entries = torch.cat([(1 - EVEN) * part + EVEN * part.mean() for part in left.split(tensors)])
        return cls(mean, mean, along, variances.to(rows), entries)

    @property
    def norm(self) -> float:
        """Root mean square of the norm of one gradient."""
        return math.sqrt(float(self.mean.square().sum() + self.variances.sum() + self.entries.sum()))


@dataclass(frozen=True, eq=False)
class _Expected:
    """The update without the candidate, before noise: mean (d,), axes (r, d) with variances (r,), and of entries (d,)."""

    mean: Tensor
    axes: Tensor
    variances: Tensor
    entries: Tensor

    @classmethod
    def of(cls, rest: RestOfBatch, factor: float, size: int, unknown: float) -> "_Expected":
        scale = (factor / size) ** 2 * unknown
        mean = factor / size * ((size - 1) * rest.mean + rest.instead)
        return cls(mean, rest.axes, scale * rest.variances, scale * rest.entries)

    @property
    def whole(self) -> Tensor:
        """(d,) variance of each entry."""
        return self.entries + (self.axes.square() * self.variances[:, None]).sum(0)

    def at(self, columns: Tensor) -> "_Expected":
        return replace(self, mean=self.mean[columns], axes=self.axes[:, columns], entries=self.entries[columns])


@dataclass(frozen=True, eq=False)
class _Evidence:
    """Evidence of some updates (k) on some entries (c).

    Args:
        updates: numbers of the updates; columns: of the entries.
        directions: (k, c), w of the formula.
        information: (c,).
        along: (r, c); its squared product with a change is the axes' part.
        signs: where signs are seen, mean and size (c,) of what they are signs of.
    """

    updates: Sequence[int]
    columns: Tensor
    directions: Tensor
    information: Tensor
    along: Tensor
    signs: tuple[Tensor, Tensor] | None = None

    def ratios(self, change: Tensor) -> Tensor:
        """(k, n) float64, of n candidates with these changes (n, d) of the update."""
        part = self._shown(change)
        square = part.square() @ self.information - (part @ self.along.T).square().sum(1)
        return (part @ self.directions.T - square[:, None] / 2).T.double()

    def joint(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """Of one update, (n,) and (n, n) float64: what each change adds, and what each two take back."""
        part = self._shown(change)
        along = part @ self.along.T
        square = (part * self.information) @ part.T - along @ along.T
        return (part @ self.directions.T)[:, 0].double(), square.double()

    def _shown(self, change: Tensor) -> Tensor:
        """The part of changes (n, d) that is seen, (n, c)."""
        part = change if len(self.columns) == change.shape[1] else change[:, self.columns]  # a copy takes long
        if self.signs is None:
            return part
        mean, size = self.signs  # a large change moves a sign no further than a small one
        return size * math.sqrt(math.pi / 2) * (((mean + part) / size / ROOT).erf() - (mean / size / ROOT).erf())


def likelihood_ratio(candidates: CandidateGradients, wave: Wave, rest: RestOfBatch) -> Tensor:
    """log p(seen | in the batch) - log p(seen | not) of N candidates in K updates: (K, N) float64.

    Where the chain's density has no closed form, noise counts as normal, of the size that each tensor of the updates shows.
    """
    # of a network that draws, the candidate's gradient is also known only in distribution
    unknown = candidates.known.batch_size - (not candidates.is_stochastic)
    factor, evidence = _seen(candidates, wave, rest, unknown)
    found, first = torch.zeros(len(wave), len(candidates), dtype=torch.float64), 0
    for change in _changes(candidates, rest, factor):
        for part in evidence:
            found[list(part.updates), first : first + len(change)] = part.ratios(change)
        first += len(change)
    return found


def joint_ratios(
    candidates: CandidateGradients, update: Wave, rest: RestOfBatch, unknown: float
) -> tuple[Tensor, Tensor]:
    """A (N,) and B (N, N) float64 with log p(seen | the candidates c in {0, 1}^N are in the batch) = A'c - c'Bc / 2 + constant.

    Args:
        update: a wave of one.
        unknown: how many of the batch are none of the candidates, as far as expected.
    """
    factor, evidence = _seen(candidates, update, rest, unknown)
    changes = torch.cat(list(_changes(candidates, rest, factor)))
    parts = [part.joint(changes) for part in evidence]
    return torch.stack([a for a, _ in parts]).sum(0), torch.stack([b for _, b in parts]).sum(0)


def _seen(
    candidates: CandidateGradients, wave: Wave, rest: RestOfBatch, unknown: float
) -> tuple[float, list["_Evidence"]]:
    """By how much a mean gradient moves the update, and what the updates say."""
    known = candidates.known
    factor = gain(known.chain, known.batch_size, rest.norm / math.sqrt(known.batch_size))
    if not known.chain.local.one_gradient:
        # the updates' size relative to local steps that all have the first one's gradient
        seen = _usual(as_rows({k: wave.update[k] for k in candidates.params}).double().square().sum(1))
        spread = rest.variances.sum() + rest.entries.sum()
        expected = factor**2 * (rest.mean.square().sum() + spread / known.batch_size)
        factor *= float((seen / expected).sqrt().clamp(1e-3, 1.0))
    faint = FAINT * (factor / known.batch_size * rest.norm) ** 2 / len(rest.mean)
    return factor, list(_evidence(candidates, wave, _Expected.of(rest, factor, known.batch_size, unknown), faint))


def _changes(candidates: CandidateGradients, rest: RestOfBatch, factor: float) -> Iterator[Tensor]:
    """Yield the candidates' (n, d) effect on the expected update, in chunks."""
    for rows, kept in zip(candidates.rows(), candidates.kept.split(candidates.chunk), strict=True):
        rows *= kept.to(rows)[:, None]
        rows -= rest.instead
        yield rows.mul_(factor / candidates.known.batch_size)


def gain(chain: Chain, size: int, norm: float) -> float:
    """Update per unit of the mean gradient, below 0: by local training, and by clipping of a mean gradient of this norm."""
    links = [t for t in chain.links if t is chain.local or (isinstance(t, Link) and t.bounds and not is_per_example(t))]
    batch = Batch(torch.zeros(size, 1), torch.zeros(size, dtype=torch.int64))
    weights = {"": torch.zeros(1)}  # which weight decay reads
    moved = Chain(tuple(links)).mean(lambda *_: {"": torch.tensor([norm])})(weights, batch, None)[""]
    return -abs(float(moved)) / norm


def _evidence(candidates: CandidateGradients, wave: Wave, without: _Expected, faint: float) -> Iterator[_Evidence]:
    """Return the evidence of all updates together, or one by one if each shows other entries.

    Args:
        faint: the least mean square of an update, as one of zeros shows no size.
    """
    seen = as_rows({k: wave.update[k] for k in candidates.params})
    density = candidates.known.chain.update_distribution
    hidden = set[str]() if density is None else density.hidden
    shown = torch.cat([torch.full((t.numel(),), k not in hidden) for k, t in candidates.params.items()])
    tensors = [t.numel() for t in candidates.params.values()]
    noise = LEAST * _usual(seen.square().mean(1)).clamp_min(faint).expand(seen.shape[1])
    if density is None:
        # what each tensor of the updates varies beyond the expected
        parts = (seen - without.mean).square().split(tensors, 1), without.whole.split(tensors)
        beyond = [_usual(part.mean(1)) - expected.mean() for part, expected in zip(*parts, strict=True)]
        noise = noise + torch.cat([one.clamp_min(0).expand(size) for one, size in zip(beyond, tensors, strict=True)])
        density = UpdateDistribution()
    signs: tuple[Tensor, Tensor] | None = None
    if density.signed:
        # of each tensor: of one entry it is too uncertain, as tails are heavy
        square = without.mean.square() + without.whole + density.variance
        size = torch.cat([part.mean().sqrt().expand(len(part)) for part in square.split(tensors)])
        # a sign of a normal value of size s is sqrt(2 / pi) / s times the value, and something uncorrelated (Bussgang, 1952)
        seen, noise = seen.sign() * size * math.sqrt(math.pi / 2), size.square() * (math.pi / 2 - 1)
        signs, density = (without.mean[shown], size[shown]), UpdateDistribution()
    without = replace(without, entries=without.entries + noise)
    if density.sparse:
        for k, row in enumerate(seen):
            columns = torch.nonzero(shown & (row != 0)).flatten()
            yield _Evidence([k], columns, *_slopes(density, row[None, columns], without.at(columns)))
    else:
        columns = torch.nonzero(shown).flatten()
        yield _Evidence(range(len(wave)), columns, *_slopes(density, seen[:, columns], without.at(columns)), signs)


def _usual(squares: Tensor) -> Tensor:
    """The mean of what updates (K,) have each, without the outlying: one client must not bend what others' updates show."""
    return squares[squares <= OUTLYING * squares.median()].mean()


def _slopes(density: UpdateDistribution, seen: Tensor, without: _Expected) -> tuple[Tensor, Tensor, Tensor]:
    """Return directions (k, c), information (c,) and its part along the axes, of fully visible updates (k, c)."""
    seen = seen * density.shrink
    if density.scale and not density.sigma:
        return _laplace(seen - without.mean, without, density.scale * density.shrink)
    information = 1 / (without.entries + density.variance * density.shrink**2)
    step, along = _inverse(without, information)
    scores = (seen - without.mean) * information
    return scores - (scores @ without.axes.T) @ step @ (without.axes * information), information, along


def _laplace(residual: Tensor, without: _Expected, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """`_slopes` of the sum of Laplace noise and normal entries, at the most probable place along the axes."""
    spread = without.entries.sqrt()

    def score(residual: Tensor) -> Tensor:
        z, a = residual / scale, spread / scale
        right, left = torch.special.log_ndtr(z / a - a) - z, torch.special.log_ndtr(-z / a - a) + z
        return torch.tanh((right - left) / 2) / scale

    tiny = torch.finfo(residual.dtype).tiny  # a batch of one has no rest, so its axes do not vary
    # the score's slope is at most 1 / spread^2, so these steps never lead away (Boehning & Lindsay, 1988)
    step, _ = _inverse(without, spread.square().reciprocal())
    moved = torch.zeros(len(residual), len(step)).to(residual)
    for _ in range(STEPS):
        scores = score(residual - moved @ without.axes)
        moved = moved + (scores @ without.axes.T - moved / without.variances.clamp_min(tiny)) @ step
    information = 1 / (spread.square() + scale**2)  # exact without the normal part
    return score(residual - moved @ without.axes), information, _inverse(without, information)[1]


def _inverse(without: _Expected, information: Tensor) -> tuple[Tensor, Tensor]:
    """(1 / variances + U I U')^-1 of the axes U (r, c) and the information I, and its root times U I."""
    weighted = without.axes * information
    spread = without.variances.double().sqrt()
    inner = spread[:, None] * (weighted @ without.axes.T).double() * spread
    inner = torch.eye(len(spread), dtype=torch.float64) + inner
    lower, failed = torch.linalg.cholesky_ex(inner)
    if failed:
        raise ValueError("the updates are too small, or too unlike the public examples' gradients, for a likelihood")
    root = torch.linalg.solve_triangular(lower, torch.diag(spread), upper=False)
    return (root.T @ root).to(weighted), root.to(weighted) @ weighted
