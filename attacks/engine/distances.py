"""Distances between the observed and the expected update: -log p(seen | expected) up to a constant and a scale.

`seen` and `expected` have the same names and shapes; each distance is a scalar for one observation, also under vmap.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fedgauge.client.transforms import UpdateDistribution
from fedgauge.client.update import Update, norm

_TINY = 1e-20


class Distance(ABC):
    """A frozen dataclass whose fields are the distance's parameters."""

    @property
    def density(self) -> bool:
        """Whether it is -log p(seen | expected) up to a constant, so that a prior's density adds to it at weight 1."""
        return False

    @abstractmethod
    def __call__(self, seen: Update, expected: Update) -> Tensor:
        """The distance of the expected update from the observed one; a scalar."""


class InnerProducts(NamedTuple):
    """Inner products <seen, expected>, |seen|^2 and |expected|^2 of one tensor of an update, or of many problems at once."""

    inner: Tensor
    seen: Tensor
    expected: Tensor


class InnerProductDistance(Distance):
    """A distance that depends on inner products alone, so that large gradients need not be formed.

    joint: whether only the products of whole updates matter, not those of each tensor.
    """

    joint: ClassVar[bool] = True

    @abstractmethod
    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        """The distance, from the products of every tensor."""

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        """The distance, from the updates themselves."""
        return self.of(
            {
                k: InnerProducts((seen[k] * t).sum(), seen[k].square().sum(), t.square().sum())
                for k, t in expected.items()
            }
        )

    def between(self, seen: Sequence[Tensor], expected: Sequence[Tensor], square: Tensor) -> Tensor:
        """The distances (P,) of P updates, for a joint distance.

        Args:
            seen, expected: each in parts (P, entries) of the same sizes.
            square: |seen|^2.
        """
        return self.of({"": between(seen, expected, square)})


@dataclass(frozen=True)
class cosine(InnerProductDistance):
    """1 - cos(seen, expected) over all entries, in [0, 2] (Inverting Gradients, eq. 4)."""

    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        return _one_minus_cosine(_total(products))


@dataclass(frozen=True)
class squared(InnerProductDistance):
    """|seen - expected|^2 / |seen|^2 (DLG, eq. 4, normalised by the update's scale)."""

    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        total = _total(products)
        return _difference(total) / total.seen.clamp_min(_TINY)

    def between(self, seen: Sequence[Tensor], expected: Sequence[Tensor], square: Tensor) -> Tensor:
        return _squared_rows(seen, expected) / square.clamp_min(_TINY)

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        return _squares(seen, expected) / norm(seen).square().clamp_min(_TINY)


@dataclass(frozen=True)
class gaussian_likelihood(InnerProductDistance):
    """|seen - expected / shrink|^2 / (2 sigma^2): additive normal noise (Bayesian framework, section 4)."""

    sigma: float
    shrink: float = 1.0

    density = True

    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        return _difference(_total(products), self.shrink) / (2 * self.sigma**2)

    def between(self, seen: Sequence[Tensor], expected: Sequence[Tensor], square: Tensor) -> Tensor:
        return _squared_rows(seen, [t / self.shrink for t in expected]) / (2 * self.sigma**2)

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        return _squares(seen, _grown(expected, self.shrink)) / (2 * self.sigma**2)


@dataclass(frozen=True)
class rounding_likelihood(Distance):
    """|seen - expected|^2 / (2 variance) of each tensor, for entries rounded at random to multiples of size / levels.

    A normal distribution stands for the rounding. Its variance is read from the update: rounding without bias adds it to the
    square of the norm, and the norm is levels times the smallest entry that is not zero.
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
class absolute(Distance):
    """|seen - expected|_1 / |seen|_1 (TAG's second term, normalised by the update's scale)."""

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        total = torch.stack([t.abs().sum() for t in seen.values()]).sum()
        return _magnitudes(seen, expected) / total.clamp_min(_TINY)


@dataclass(frozen=True)
class laplace_likelihood(Distance):
    """|seen - expected / shrink|_1 / b: additive Laplace noise of scale b."""

    scale: float
    shrink: float = 1.0

    density = True

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        return _magnitudes(seen, _grown(expected, self.shrink)) / self.scale


@dataclass(frozen=True)
class _OverOther(Distance):
    """Another distance over a part of an update."""

    inner: Distance

    @property
    def density(self) -> bool:
        return self.inner.density


@dataclass(frozen=True)
class _OverProducts(InnerProductDistance):
    """The same of a distance of inner products."""

    inner: InnerProductDistance
    names: tuple[str, ...]
    joint: ClassVar[bool] = False

    @property
    def density(self) -> bool:
        return self.inner.density


@dataclass(frozen=True)
class visible(_OverOther):
    """Another distance over the entries that are not exactly zero in the observed update: for pruning and for unknown masks."""

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        return self.inner(seen, {k: torch.where(seen[k] != 0, t, torch.zeros_like(t)) for k, t in expected.items()})


@dataclass(frozen=True)
class largest(_OverOther):
    """Another distance over a share of each tensor's entries: those that are largest in the observed update."""

    keep: float

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

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        left = [k for k in expected if k not in self.names]
        return self.inner({k: seen[k] for k in left}, {k: expected[k] for k in left})


@dataclass(frozen=True)
class without_products(_OverProducts):
    """`without` for an InnerProductDistance, which it stays."""

    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        return self.inner.of({k: p for k, p in products.items() if k not in self.names})


@dataclass(frozen=True)
class visible_columns(_OverProducts):
    """Another distance without the weight columns that are zero in the observed update: their layer's input was pruned.

    The engine computes its products from the remaining columns.
    """

    def of(self, products: Mapping[str, InnerProducts]) -> Tensor:
        return self.inner.of(products)

    def __call__(self, seen: Update, expected: Update) -> Tensor:
        left = {k: torch.where((seen[k] != 0).any(0), expected[k], torch.zeros_like(expected[k])) for k in self.names}
        return self.inner(seen, {**expected, **left})


def left_out(distance: Distance, names: Collection[str]) -> Distance:
    """A distance over all tensors except some.

    >>> left_out(cosine(), {"fc.weight"})
    without_products(inner=cosine(), names=('fc.weight',))
    """
    if not names:
        return distance
    if isinstance(distance, InnerProductDistance):
        return without_products(distance, tuple(sorted(names)))
    return without(distance, tuple(sorted(names)))


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


def likelihood(update_distribution: UpdateDistribution | None, batch_size: int) -> Distance:
    """The distance that equals -log p(seen | expected) for a chain; without a density, the nearest distance.

    Without noise any distance has the same minimum, and the cosine descends best.
    """
    if update_distribution is None:
        return cosine()
    if update_distribution.hidden:
        return left_out(
            likelihood(replace(update_distribution, hidden=frozenset()), batch_size), update_distribution.hidden
        )
    if update_distribution.signed:
        return signs("hinge" if batch_size == 1 else "tanh")
    inner: Distance = cosine()
    if update_distribution.sigma:
        inner = gaussian_likelihood(update_distribution.sigma, update_distribution.shrink)
    elif update_distribution.scale:
        inner = laplace_likelihood(update_distribution.scale, update_distribution.shrink)
    return visible(inner) if update_distribution.sparse else inner


def between(seen: Sequence[Tensor], expected: Sequence[Tensor], square: Tensor) -> InnerProducts:
    """The inner products (P,) of P updates, each in parts (P, entries) of the same sizes; square: |seen|^2."""
    parts = [_InnerProducts.apply(s, e) for s, e in zip(seen, expected, strict=True)]  # type: ignore[no-untyped-call]
    inner, own = (part[0] if len(part) == 1 else torch.stack(part).sum(0) for part in zip(*parts, strict=True))
    return InnerProducts(inner, square, own)


def _squared_rows(seen: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Squared distances (P,)."""
    parts = [(s - e).square().sum(1) for s, e in zip(seen, expected, strict=True)]
    return torch.stack(parts).sum(0)


class _InnerProducts(Function):
    """<seen, expected> and |expected|^2 of each row; on the CPU without storing the elementwise products."""

    @staticmethod
    def forward(ctx: Any, seen: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(seen, expected)
        if expected.device.type != "cpu":  # there a call costs more than its products, so that rows share one
            return (seen * expected).sum(1), expected.square().sum(1)
        pairs = list(zip(seen, expected, strict=True))
        return torch.stack([torch.dot(s, e) for s, e in pairs]), torch.stack([torch.dot(e, e) for _, e in pairs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_inner: Tensor, by_square: Tensor) -> tuple[None, Tensor]:
        seen, expected = ctx.saved_tensors
        return None, torch.mul(seen, by_inner[:, None]).addcmul_(expected, 2 * by_square[:, None])


def _total(products: Mapping[str, InnerProducts]) -> InnerProducts:
    if len(products) == 1:
        return next(iter(products.values()))
    return InnerProducts(*(torch.stack(parts).sum(0) for parts in zip(*products.values(), strict=True)))


def _one_minus_cosine(p: InnerProducts) -> Tensor:
    return 1 - p.inner / (_root(p.seen) * _root(p.expected)).clamp_min(_TINY)


def _root(square: Tensor) -> Tensor:
    """Square root, safe to differentiate at zero."""
    return square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()


def _difference(p: InnerProducts, shrink: float = 1.0) -> Tensor:
    return (p.seen - 2 * p.inner / shrink + p.expected / shrink**2).clamp_min(0)


def _grown(expected: Update, shrink: float) -> Update:
    return expected if shrink == 1 else {k: t / shrink for k, t in expected.items()}


def _squares(seen: Update, expected: Update) -> Tensor:
    return torch.stack([(seen[k] - t).square().sum() for k, t in expected.items()]).sum()


def _magnitudes(seen: Update, expected: Update) -> Tensor:
    return torch.stack([(seen[k] - t).abs().sum() for k, t in expected.items()]).sum()
