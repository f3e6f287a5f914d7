"""Reads batches off a fully connected first layer: its weight gradient is a mixture of the inputs, of rank B.

With error signals D (B, m) and inputs X (B, n) the layer's gradients are G = D^T X and g = D^T 1. The singular vectors of G
give both up to one unknown Q (B, B): D^T = L Q and X = Q^-1 R. The columns of Q, up to their lengths, give the images, since
g gives the lengths. `spear` finds the columns exactly if ReLU leaves zeros in D (Dimitrov et al., SPEAR, NeurIPS 2024), and so does
`spear_plus_plus` for larger batches, noise and local steps (Bakarsky et al., SPEAR++, 2025); `cocktail_party` approximates them
by the independence of the images (Kariyappa et al., ICML 2023).
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, islice
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Streams, Wave
from fedgauge.attacks.engine.computation import InputLayer, called, dense_input_layer
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.exact.closed_form import EachByItself, Reader, check_steps
from fedgauge.attacks.exact.dictionary import SparseMixture
from fedgauge.attacks.solved_labels import derivative
from fedgauge.client.models.losses import is_mean, loss_of
from fedgauge.client.update import Batch, Params, norm, relative_error

# error of a guess's update relative to what its faintest image contributes; below it, the guess is the batch
PROVEN = 1e-3
SILENT = 1e-4  # of a unit column's largest entry; smaller entries count as a ReLU that was off
AT_ONCE = 4096  # sets of rows tried together
GAUSSIAN = 0.37457  # mean of log cosh of a standard normal number
RATE, SMOOTH = 0.02, 0.1  # of Adam, and the weight of total variation
CROWDED = 12.0  # sharpness of the penalty on similar rows
ROUNDED = 1e4  # rounding levels for a first comparison of columns
SPARE = 8  # candidate columns beyond B
BASES = 250  # choices that are verified at a time
MOST = 20  # distinct columns kept for each wanted one
SETTLED = 5  # rounds without a new basis that end a search which no proof can end


@dataclass(eq=False)
class _Mixture:
    """The factors of one observation's first-layer gradient; ValueError if it has none.

    Args:
        weight: G (m, n) up to scale, float64; bias: g (m,), with the same scale.
        size: B.
        noisy: whether noise may hide the rank.
    """

    weight: Tensor
    bias: Tensor
    size: int
    noisy: bool

    def __post_init__(self) -> None:
        edge = self.noise * sum(math.sqrt(side) for side in self.weight.shape)  # of a matrix of noise alone
        visible = self.rank >= self.size and self.noisy and float(self._factors[1][self.size - 1]) > edge
        if self.rank != self.size and not visible:
            raise ValueError(
                f"the first layer's gradient has rank {self.rank} for {self.size} examples: they are linearly dependent, "
                f"or a defense or rounding changed the update (noise {self.noise:.0e})"
            )

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        left, values, right = torch.linalg.svd(self.weight, full_matrices=False)
        return left, values, right

    @cached_property
    def rank(self) -> int:
        """The rank in float32: rounding leaves singular values of about 1e-7 of the largest."""
        values = self._factors[1]
        floor = float(values[0]) * max(self.weight.shape) ** 0.5 * torch.finfo(torch.float32).eps
        return int((values > floor).sum())

    @cached_property
    def noise(self) -> float:
        """Standard deviation of the noise in an entry of G, from the singular values beyond B."""
        beyond = self._factors[1][self.size :]
        return float(beyond.norm()) / math.sqrt(max(1, math.prod(side - self.size for side in self.weight.shape)))

    @property
    def left(self) -> Tensor:
        """L (m, B), of orthonormal columns."""
        return self._factors[0][:, : self.size]

    @property
    def right(self) -> Tensor:
        """R (B, n)."""
        return self._factors[1][: self.size, None] * self._factors[2][: self.size]

    @property
    def exact(self) -> bool:
        """Return whether the singular values beyond B are rounding."""
        return self.rank == self.size

    def inputs(self, columns: Tensor) -> Tensor:
        """X (B, n), from columns of Q (B, B) of any length: the bias gradient is the sum of the error signals."""
        lengths = torch.linalg.solve(columns, self.left.T @ self.bias)
        inputs: Tensor = torch.linalg.solve(columns * lengths, self.right)
        return inputs


Guess = tuple[Tensor | None, int]  # columns of Q (B, B) of any length, None: none yet; and the iterations spent so far


@dataclass(frozen=True)
class _Unmixing(EachByItself):
    """Each observation's first verified guess of Q, else the nearest one."""

    needs_relu: ClassVar[bool] = True  # only a verified guess counts as found then, where one can be
    tolerant: ClassVar[bool] = False  # whether it bears noise and local steps

    @abstractmethod
    def guesses(
        self, mixture: _Mixture, shape: tuple[int, ...], budget: Budget, rng: Generator, clock: Deadline
    ) -> Iterator[Guess]:
        """Guesses of Q, until the budget is spent; examples have this shape."""

    def readers(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> Sequence[Reader]:
        clock = Deadline(budget.seconds)
        layer, local = dense_input_layer(known.model, known.shape, relu=self.needs_relu), known.chain.local
        if self.tolerant:
            check_steps(known, not local.adaptive, "steps along gradients")
        else:
            check_steps(known, local.one_gradient, "a single gradient")
        return [partial(self._read, layer, budget, stream("unmixing"), clock) for stream in streams]

    def _read(
        self, layer: InputLayer, budget: Budget, rng: Generator, clock: Deadline, alone: Wave, known: Knowledge
    ) -> Reconstruction:
        params, update = alone.params, alone.alone(0)
        weight, bias = (-update[name].double() for name in (layer.weight, layer.bias))
        mixture = _Mixture(weight, bias, known.batch_size, self.tolerant)
        unproven = "" if mixture.exact else "the update holds noise"
        if not unproven and known.chain.slice_of(mixture.size) < mixture.size:
            unproven = "which examples each local step takes is unknown"
        best, error, spent, idle = None, math.inf, 0, 0
        seen = float(norm({name: t.double() for name, t in update.items()}))
        for columns, spent in self.guesses(mixture, known.shape, budget, rng, clock):
            idle = idle + 1 if columns is None else 0
            if unproven and idle == SETTLED:
                break
            inputs = None if columns is None else mixture.inputs(columns)
            if inputs is None or not bool(torch.isfinite(inputs).all()):
                continue
            x = known.examples(layer.example(inputs.view(-1, *known.shape))).float()
            fed = layer.read(known.normalise(x)).flatten(1).double()
            signals = torch.linalg.lstsq(fed.T, mixture.weight.T).solution  # (B, m)
            guess = Batch(x, _labels(x, signals, params, layer, known))
            off = relative_error(known.forward(params, guess, None), update)
            if off < error:
                best, error = guess, off
            if not unproven and off * seen <= PROVEN * float((signals.norm(dim=1) * fed.norm(dim=1)).min()):
                return Reconstruction(*guess, off, spent, 0.0, "converged")
        if best is None:
            reason = f"nothing was found in {spent:,} tries"
            return Reconstruction(None, None, math.nan, spent, 0.0, "out_of_budget", reason)
        if not self.needs_relu and not clock.over():
            return Reconstruction(*best, error, spent, 0.0, "converged")
        reason = f"not proven: the examples reproduce the update only up to a relative error of {error:.0e}"
        if unproven and idle == SETTLED:
            return Reconstruction(*best, error, spent, 0.0, "converged", f"{reason}; {unproven}")
        return Reconstruction(*best, error, spent, 0.0, "out_of_budget", reason)


def _labels(x: Tensor, signals: Tensor, params: Params, layer: InputLayer, known: Knowledge) -> Tensor:
    """Labels (B, ...): for each example the one with the error signal in the first layer nearest to the recovered one (B, m)."""
    kind, fed = known.label_kind, known.normalise(x)
    weights = {k: p.detach().requires_grad_(k == layer.weight) for k, p in params.items()}
    outputs, (own, *_) = called(known.model, weights, fed)
    fits, every = [], kind.candidates(known.classes).to(x.device)
    for y in every:
        loss = loss_of(known.loss, outputs, y.expand(len(x), *y.shape[1:]), fed)
        (signal,) = torch.autograd.grad(loss, own.output, retain_graph=True)
        fits.append(F.cosine_similarity(signal.double(), signals, dim=1))
    if fits:
        return every[torch.stack(fits, 1).nan_to_num(-1.0).argmax(1), 0]
    rows = [torch.autograd.grad(o.sum(), own.output, retain_graph=True)[0] for o in outputs.flatten(1).unbind(1)]
    by_output = torch.stack(rows, 2).double()  # (B, m, outputs)
    size = len(x) if is_mean(known.loss, known.classes, kind) else 1
    slopes = torch.linalg.lstsq(by_output, signals[..., None] * size / known.scale).solution[..., 0]
    found = []
    for at, slope in zip(outputs.detach().double().split(1), slopes, strict=True):
        found.append(kind.solved(partial(derivative, known, lambda z: z, at), slope, True, known.classes))
    return torch.cat([kind.trial(1, known.classes) if y is None else y for y in found]).to(x.device)


@dataclass(frozen=True)
class spear(_Unmixing):
    """Exact batches from a first layer with ReLU: error signals are the directions in which many neurons are off.

    B - 1 neurons that are all off for one example determine its direction; about one set in 2^(B-1) is like that. The
    budget's iterations count sets of neurons, in thousands.
    """

    def guesses(
        self, mixture: _Mixture, shape: tuple[int, ...], budget: Budget, rng: Generator, clock: Deadline
    ) -> Iterator[Guess]:
        rows = mixture.left[mixture.left.norm(dim=1) > SILENT * mixture.left.norm(dim=1).max()]  # neurons that are on
        tries, most = 0, 1000 * budget.iterations
        found = rows.new_empty(mixture.size, 0)
        while tries < most and not (tries and clock.over()):
            fresh = min(AT_ONCE, 64 << mixture.size, most - tries)
            tries += fresh
            before, found = found, _distinct(rows, torch.cat([found, _directions(rows, fresh, rng)], 1))
            if not torch.equal(before, found):
                yield from ((basis, tries) for basis in _bases(found))
        yield None, tries


def _directions(rows: Tensor, count: int, rng: Generator) -> Tensor:
    """Unit columns (B, N) that are orthogonal to more rows than those from which they were computed."""
    size = rows.shape[1]
    if size == 1:
        return rows.new_ones(1, 1)
    drawn = torch.rand(count, len(rows), generator=rng).topk(size - 1, dim=1).indices
    # the direction orthogonal to B - 1 rows
    q: Tensor = torch.linalg.svd(rows[drawn], full_matrices=True).Vh[:, -1]
    # more zeros than chance gives: those by construction, and a part of the layer
    least = size + max(2, len(rows) // 20)
    return q[_silent(rows, q.T).sum(0) >= least].T


def _silent(rows: Tensor, columns: Tensor) -> Tensor:
    signals: Tensor = (rows @ columns).abs()
    return signals < SILENT * signals.amax(0)


def _distinct(rows: Tensor, columns: Tensor) -> Tensor:
    """The distinct columns without mixtures, those with most zeros first, at most MOST each.

    A mixture is a combination of columns that are off nearly everywhere where it is.
    """
    signs = columns.gather(0, columns.abs().argmax(0, keepdim=True)).sign()
    unique, group = torch.unique((columns * signs).mul(ROUNDED).round(), dim=1, return_inverse=True)
    first = torch.full((unique.shape[1],), len(group)).scatter_reduce(0, group, torch.arange(len(group)), "amin")
    few = columns[:, first]  # some of them may still be equal
    silent = _silent(rows, few)
    order = silent.sum(0).argsort(descending=True, stable=True)[: MOST * len(columns)]
    kept: list[int] = []
    for k in order.tolist():
        own = silent[:, k]
        more = (own[:, None] & ~silent[:, kept]).sum(0)  # off here, and not there
        parts = few[:, kept][:, more < min(len(columns), int(own.sum()) // 4)]
        if float((few[:, k] - parts @ (torch.linalg.pinv(parts, rtol=SILENT) @ few[:, k])).norm()) > SILENT:
            kept.append(k)
    return few[:, kept]


def _bases(columns: Tensor) -> Iterator[Tensor]:
    """Choices of B independent columns, those with most zeros first; a mixture has fewer than each of its parts."""
    size, first = len(columns), list[int]()
    for k in range(columns.shape[1]):
        if float(torch.linalg.svdvals(columns[:, [*first, k]])[-1]) > SILENT:
            first.append(k)
        if len(first) == size:
            break
    few = [*first, *(k for k in range(columns.shape[1]) if k not in first)][: size + SPARE]
    for chosen in islice(sorted(combinations(range(len(few)), size), key=sum), BASES):
        basis = columns[:, [few[k] for k in chosen]]
        if float(torch.linalg.svdvals(basis)[-1]) > SILENT:
            yield basis


@dataclass(frozen=True)
class spear_plus_plus(_Unmixing):
    """SPEAR++: batches from a first layer with ReLU by dictionary learning, larger than SPEAR's, also under noise or local steps.

    Exact with a proof where the update holds no noise and every local step takes the whole batch; elsewhere the images are those
    that explain the update best, and nothing is proven. The budget's iterations count rounds of 4 B starts.
    """

    tolerant = True

    def guesses(
        self, mixture: _Mixture, shape: tuple[int, ...], budget: Budget, rng: Generator, clock: Deadline
    ) -> Iterator[Guess]:
        before = mixture.left.new_empty(0)
        # L = G V / S, so the noise of a column is divided by its singular value
        noise = (0.0 if mixture.exact else mixture.noise) / mixture._factors[1][: mixture.size]
        for spent, basis in enumerate(islice(SparseMixture(mixture.left, noise).bases(rng), budget.iterations), 1):
            better = len(basis) == mixture.size and not torch.equal(basis, before)
            before = basis
            yield basis.T if better else None, spent
            if clock.over():
                return


@dataclass(frozen=True)
class cocktail_party(_Unmixing):
    """Blind source separation: images with the least normally distributed pixels, smooth and different from each other."""

    on_cpu = False
    needs_relu = False

    def guesses(
        self, mixture: _Mixture, shape: tuple[int, ...], budget: Budget, rng: Generator, clock: Deadline
    ) -> Iterator[Guess]:
        mixed = mixture.right - mixture.right.mean(1, keepdim=True)
        axes, values, _ = torch.linalg.svd(mixed, full_matrices=False)
        whiten = (axes / values).T * mixed.shape[1] ** 0.5  # pixels of variance 1, uncorrelated
        white = whiten @ mixed
        best, least, spent = white.new_zeros(0), math.inf, 0
        for restart in range(budget.restarts):
            if restart and clock.over():
                break
            rows = torch.randn(mixture.size, mixture.size, generator=rng).to(white).requires_grad_()
            adam = torch.optim.Adam([rows], RATE)
            for _ in range(budget.iterations):
                loss = _loss(F.normalize(rows, dim=1), white, shape)
                if float(loss.detach()) < least:
                    best, least = rows.detach().clone(), float(loss.detach())
                adam.zero_grad()
                loss.backward()
                adam.step()
                spent += 1
                if clock.over():
                    break
        if len(best):
            yield torch.linalg.inv(F.normalize(best, dim=1) @ whiten), spent


def _loss(rows: Tensor, white: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Negentropy by log cosh (Hyvarinen and Oja, 2000), total variation, and a penalty on similar rows."""
    images = rows @ white
    negentropy = (images.cosh().clamp(max=1e30).log().mean(1) - GAUSSIAN).square().mean()
    similarity = (rows @ rows.T).triu(1).abs()
    penalty = torch.expm1(CROWDED * similarity).sum() / math.exp(CROWDED) / max(1, len(rows))
    pixels = images.view(-1, *shape)
    variation = sum(pixels.diff(dim=d).abs().mean() for d in (-1, -2))
    return -negentropy + SMOOTH * variation + penalty
