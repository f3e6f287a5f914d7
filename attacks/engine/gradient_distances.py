"""Distances between the observed and the expected update: -log p(seen | expected) up to a constant and a scale.

`seen` and `expected` have the same names and shapes; each distance is a scalar for one observation, also under vmap.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedgauge.client.components import Checked, Positive, Share
from fedgauge.client.transforms import UpdateDistribution
from fedgauge.client.update import Update, norm

_TINY = 1e-20


class InnerProducts(NamedTuple):
    """Inner products <seen, expected>, |seen|^2 and |expected|^2 of one tensor of an update, or of many problems at once."""

    inner: Tensor
    seen: Tensor
    expected: Tensor


class Distance(Checked, ABC):
    """A frozen dataclass: its fields are the distance's parameters."""

    # whether it depends on the products of whole updates (`between`), not on each tensor's
    joint: ClassVar[bool] = False
    # whether it says itself what an entry that is exactly zero tells
    of_zeros: ClassVar[bool] = False

    @property
    def density(self) -> bool:
        """True for -log p(seen | expected) up to a constant, to which a prior's density adds at weight 1."""
        return False

    @property
    def by_products(self) -> bool:
        """True if it depends on inner products only (`of`), so that large gradients need not be formed."""
        return False

    @abstractmethod
    def __call__(self, seen: Update, expected: Update) -> Tensor:
        """The distance of the expected update from the observed one; a scalar."""

    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        """The distance, from the products of every tensor; if it is `by_products`."""
        raise NotImplementedError  # only distances that are `by_products` are asked for it

    def between(self, seen: Sequence[Tensor], expected: Sequence[Tensor], square: Tensor) -> Tensor:
        """The distances (P,) of P updates; if it is `joint`.

        Args:
            seen, expected: each in parts (P, entries) of the same sizes.
            square: |seen|^2.
        """
        return self.of({"": between(seen, expected, square)})


class _Joint(Distance):
    by_products = joint = True


@dataclass(frozen=True)
class cosine(_Joint):
    """1 - cos(seen, expected) over all entries, in [0, 2] (Inverting Gradients, eq. 4)."""

    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        p = _total(products)
        return 1 - p.inner / (root(p.seen) * root(p.expected)).clamp_min(_TINY)

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        pairs = {k: (seen[k], t) for k, t in expected.items()}
        return self.of(
            {k: InnerProducts((a * b).sum(), a.square().sum(), b.square().sum()) for k, (a, b) in pairs.items()}
        )


class _Squared(_Joint):
    """|seen - expected / shrink|^2 over a scale."""

    shrink: float = 1.0

    @abstractmethod
    def scaled(self, distance: Tensor, square: Tensor) -> Tensor:
        """The distance from |seen - expected / shrink|^2 and |seen|^2."""

    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        total = _total(products)
        apart = total.seen - 2 * total.inner / self.shrink + total.expected / self.shrink**2
        return self.scaled(apart.clamp_min(0), total.seen)

    def between(self, seen: Sequence[Tensor], expected: Sequence[Tensor], square: Tensor) -> Tensor:
        expected = expected if self.shrink == 1 else [t / self.shrink for t in expected]
        parts = [(s - e).square().sum(1) for s, e in zip(seen, expected, strict=True)]
        return self.scaled(added(parts), square)

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        grown = _grown(expected, self.shrink)
        squares = torch.stack([(seen[k] - t).square().sum() for k, t in grown.items()]).sum()
        return self.scaled(squares, norm(seen).square())


@dataclass(frozen=True)
class squared(_Squared):
    """|seen - expected|^2 / |seen|^2 (DLG, eq. 4, normalised by the update's scale)."""

    def scaled(self, distance: Tensor, square: Tensor) -> Tensor:
        return distance / square.clamp_min(_TINY)


@dataclass(frozen=True)
class gaussian_likelihood(_Squared):
    """|seen - expected / shrink|^2 / (2 sigma^2): additive normal noise (Bayesian framework, section 4)."""

    sigma: float
    shrink: float = 1.0

    density = True

    def scaled(self, distance: Tensor, square: Tensor) -> Tensor:
        return distance / (2 * self.sigma**2)


@dataclass(frozen=True)
class rounding_likelihood(Distance):
    """|seen - expected|^2 / (2 variance) of each tensor, for entries rounded at random to multiples of size / levels.

    A normal distribution replaces the rounding. Its variance is read from the update: unbiased rounding adds it to the
    square of the norm, and the norm is levels times the smallest nonzero entry.
    """

    levels: int

    density = True

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        return torch.stack([self._one(seen[k], t) for k, t in expected.items()]).sum()

    def _one(self, seen: Tensor, expected: Tensor) -> Tensor:
        magnitudes = seen.abs()
        level = torch.where(magnitudes > 0, magnitudes, torch.inf).amin()
        level = torch.where(level.isfinite(), level, torch.ones_like(level))  # nothing but zeros
        added = seen.square().sum() - (self.levels * level).square()
        variance = torch.maximum(added, level.square()) / seen.numel()  # at least as if one entry had been rounded up
        return (seen - expected).square().sum() / (2 * variance)


@dataclass(frozen=True)
class laplace_likelihood(Distance):
    """|seen - expected / shrink|_1 / b: additive Laplace noise of scale b."""

    scale: float
    shrink: float = 1.0

    density = True

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        grown = _grown(expected, self.shrink)
        return torch.stack([(seen[k] - t).abs().sum() for k, t in grown.items()]).sum() / self.scale


@dataclass(frozen=True)
class _OverOther(Distance):
    inner: Distance

    @property
    def density(self) -> bool:
        return self.inner.density

    @property
    def by_products(self) -> bool:
        return self.inner.by_products

    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        return self.inner.of(products)


@dataclass(frozen=True)
class each(_OverOther):
    """The mean of another distance over the tensors: large ones do not outweigh those of the layers next to the input."""

    density = False

    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        return torch.stack([self.inner.of({name: p}) for name, p in products.items()]).mean(0)

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        return torch.stack([self.inner({k: seen[k]}, {k: t}) for k, t in expected.items()]).mean()


@dataclass(frozen=True)
class visible(_OverOther):
    """Another distance over the entries that are not exactly zero in the observed update: for pruning and for unknown masks."""

    by_products = False

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        return self.inner(seen, {k: torch.where(seen[k] != 0, t, torch.zeros_like(t)) for k, t in expected.items()})


@dataclass(frozen=True)
class kept_by_size(Distance):
    """Squared distance in units of a small error, to an update from which entries below some size were perhaps dropped.

    Entries that are exactly zero are compared with the smallest other one of their tensor, or of the update if all of the
    tensor's are zero: only what is larger counts.

    Args:
        sigma: deviation of each entry's error, relative to the update's norm.
    """

    sigma: Positive = 0.01

    density = of_zeros = True

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        least = {k: torch.where(t != 0, t.abs(), torch.inf).amin() for k, t in seen.items()}
        whole = torch.stack([*least.values()]).amin()
        squares = []
        for k, t in expected.items():
            above = (t.abs() - torch.where(least[k].isfinite(), least[k], whole)).clamp_min(0)
            squares.append(torch.where(seen[k] != 0, seen[k] - t, above).square().sum())
        return torch.stack(squares).sum() / (2 * (self.sigma * norm(seen)).square()).clamp_min(_TINY)


@dataclass(frozen=True)
class largest(_OverOther):
    """Another distance over a share of each tensor's entries: those that are largest in the observed update."""

    keep: Share

    by_products = False

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        kept = {k: self._kept(seen[k]) for k in expected}
        left = ({k: torch.where(kept[k], t[k], torch.zeros_like(t[k])) for k in kept} for t in (seen, expected))
        return self.inner(*left)

    def _kept(self, seen: Tensor) -> Tensor:
        sizes = seen.abs().flatten()
        return seen.abs() >= sizes.topk(max(1, round(self.keep * len(sizes)))).values[-1]


@dataclass(frozen=True)
class without(_OverOther):
    """Another distance without some tensors: the attack on Soteria leaves out the defended layer's weight."""

    names: tuple[str, ...]

    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        return self.inner.of({k: p for k, p in products.items() if k not in self.names})

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        left = [k for k in expected if k not in self.names]
        return self.inner({k: seen[k] for k in left}, {k: expected[k] for k in left})


@dataclass(frozen=True)
class visible_columns(_OverOther):
    """Another distance without the weight columns that are zero in the observed update: their layer's input was pruned.

    The engine computes its products from the remaining columns; the other distance is one of products.
    """

    names: tuple[str, ...]

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        left = {k: torch.where((seen[k] != 0).any(0), expected[k], torch.zeros_like(expected[k])) for k in self.names}
        return self.inner(seen, {**expected, **left})


def left_out(distance: Distance, names: Collection[str]) -> Distance:
    return without(distance, tuple(sorted(names))) if names else distance


@dataclass(frozen=True)
class signs(Distance):
    """Signs against values (Learning To Invert, appendix A).

    Args:
        method: hinge, the sum of max(-expected * sign, 0)^2, for one example, relative to |expected|^2 so that
            shrinking does not help; tanh, 1 - cos(sign, tanh(expected / mean |expected|)), for sums over several.
    """

    method: Literal["hinge", "tanh"] = "hinge"

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        if self.method == "hinge":
            wrong = torch.stack([(-t * seen[k].sign()).clamp_min(0).square().sum() for k, t in expected.items()]).sum()
            return wrong / norm(expected).square().clamp_min(_TINY)
        bounded = {k: torch.tanh(t / t.abs().mean().clamp_min(_TINY)) for k, t in expected.items()}
        return cosine()({k: t.sign() for k, t in seen.items()}, bounded)


def likelihood(noise: UpdateDistribution | None, batch_size: int) -> Distance:
    """The distance that equals -log p(seen | expected) for a chain; without a density, the nearest distance.

    Without noise any distance has the same minimum, and the cosine descends best.
    """
    if noise is None:
        return cosine()
    found: Distance = cosine()
    if noise.signed:
        found = signs("hinge" if batch_size == 1 else "tanh")
    elif noise.sigma:
        found = gaussian_likelihood(noise.sigma, noise.shrink)
    elif noise.scale:
        found = laplace_likelihood(noise.scale, noise.shrink)
    return left_out(visible(found) if noise.sparse and not noise.signed else found, noise.hidden)


def between(seen: Sequence[Tensor], expected: Sequence[Tensor], square: Tensor) -> InnerProducts:
    """The inner products (P,) of P updates, each in parts (P, entries) of the same sizes; square: |seen|^2."""
    inner = added([(s * e).sum(1) for s, e in zip(seen, expected, strict=True)])
    return InnerProducts(inner, square, added([e.square().sum(1) for e in expected]))


def _total(products: Mapping[str, InnerProducts]) -> InnerProducts:
    return InnerProducts(*map(added, zip(*products.values(), strict=True)))


def added(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts)).sum(0)


def root(square: Tensor) -> Tensor:
    """Square root, safe to differentiate at zero."""
    return square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()


def _grown(expected: Update, shrink: float) -> Update:
    return expected if shrink == 1 else {k: t / shrink for k, t in expected.items()}
