"""Factored gradients: a layer's gradient kept as signal x input when forming the product would cost more."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

EXACT = {torch.float32: 1e-6, torch.float64: 1e-12}  # relative error up to which a product equals the matrix
FORM_BELOW = 2**15  # entries below which a gradient is always formed, and compared together with others
CACHE = 2**18  # numbers that fit into a core's cache next to other data
AT_ONCE = 2**26  # numbers that a GPU computes at once: there, calls are expensive


class FactoredGradient(NamedTuple):
    """The gradient (P, out, in) of a fully connected layer as a sum over rows of signal x input, not formed.

    Or the gradient (P, out, kh * kw * in) of a kernel with few output positions, where rows are windows of the input.
    """

    signal: Tensor  # (P, rows, out)
    input: Tensor  # (P, rows, in)

    @property
    def rows(self) -> int:
        return self.signal.shape[1]

    def products(self, other: "Tensor | FactoredGradient") -> tuple[Tensor, Tensor]:
        """Inner products (P,) with another gradient, factored or formed, and squared norms (P,)."""
        if isinstance(other, FactoredGradient):
            inner = torch.bmm(other.signal, self.signal.mT) * torch.bmm(other.input, self.input.mT)
        else:
            inner = torch.bmm(self.signal, as_matrices(other)) * self.input
        square = torch.bmm(self.signal, self.signal.mT) * torch.bmm(self.input, self.input.mT)
        return inner.flatten(1).sum(1), square.flatten(1).sum(1)

    def of(self, problems: Tensor) -> "FactoredGradient":
        return FactoredGradient(self.signal[problems], self.input[problems])

    def form(self) -> Tensor:
        """The gradient itself; for a kernel (P, out, kh * kw * in)."""
        return torch.bmm(self.signal.transpose(1, 2), self.input)

    @staticmethod
    def fewer(rows: int, high: int, wide: int) -> bool:
        """True if inner products of this many rows are cheaper than a gradient of this size."""
        return 2 * rows * (high + wide) <= high * wide


Gradients = dict[str, Tensor | FactoredGradient]


def plus(
    step: Tensor | FactoredGradient, before: Tensor | FactoredGradient | None, kept: float, shape: Sequence[int]
) -> Tensor | FactoredGradient:
    """A step's change of a parameter of this shape, plus `kept` times the change before it."""
    if before is None:
        return step
    if isinstance(step, FactoredGradient) and isinstance(before, FactoredGradient):
        signals = [before.signal if kept == 1 else kept * before.signal, step.signal]
        return FactoredGradient(torch.cat(signals, 1), torch.cat([before.input, step.input], 1))
    before = formed(before, shape)
    return (before if kept == 1 else kept * before) + formed(step, shape)


def is_large(part: Tensor | FactoredGradient) -> bool:
    return isinstance(part, FactoredGradient) and part.signal.shape[2] * part.input.shape[2] >= FORM_BELOW


def formed(part: Tensor | FactoredGradient, shape: Sequence[int]) -> Tensor:
    if not isinstance(part, FactoredGradient):
        return part
    return part.form() if len(shape) == 2 else as_kernels(part.form(), (shape[2], shape[3]))


def as_kernels(matrices: Tensor, kernel: tuple[int, int]) -> Tensor:
    """(P, out, kh * kw * in) as (P, out, in, kh, kw)."""
    return matrices.view(*matrices.shape[:2], *kernel, -1).permute(0, 1, 4, 2, 3)


def as_matrices(t: Tensor) -> Tensor:
    """The inverse of `as_kernels`; other tensors stay unchanged."""
    return t.permute(0, 1, 3, 4, 2).flatten(2) if t.dim() == 5 else t


def factored(matrices: Tensor, rank: int) -> FactoredGradient | None:
    """Matrices (P, out, in) as factors of this many rows; None if one of them is no such product up to rounding.

    Kernels (P, out, in, kh, kw) count as matrices. The observed gradient of a fully connected layer is a product with one
    row for each example, unless a defense changed it. Its row space is found from random sums of its rows, refined once
    (Halko, Martinsson & Tropp, 2011, algorithm 4.4).
    """
    matrices = as_matrices(matrices)
    high, wide = matrices.shape[1:]
    if not FactoredGradient.fewer(rank, high, wide) or matrices.dtype not in EXACT:
        return None
    sums = torch.randn(rank, high, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(matrices)
    signals, inputs = [], []
    for matrix in matrices:  # one by one, since the first that is no product decides
        basis = torch.linalg.qr(matrix @ torch.linalg.qr((sums @ matrix).T).Q).Q
        signals.append(basis.T)
        inputs.append(basis.T @ matrix)
        if not _is_product(matrix, basis, inputs[-1]):
            return None
    return FactoredGradient(torch.stack(signals), torch.stack(inputs))


def _is_product(matrix: Tensor, basis: Tensor, rows: Tensor) -> bool:
    """True if a matrix equals basis @ rows up to rounding of its entries; the basis is orthonormal."""
    size = float(rows.double().norm())
    scale = 1 / size if size else 1.0  # squares of tiny entries would underflow to zero
    few = max(1, CACHE // matrix.shape[1])
    parts = zip(matrix.split(few), basis.split(few), strict=True)
    rests = [torch.addmm(part, lines, rows, beta=scale, alpha=-scale).norm() for part, lines in parts]
    return bool(torch.stack(rests).norm() <= EXACT[matrix.dtype])


def flattened(update: Mapping[str, Tensor]) -> list[Tensor]:
    """Stacked updates as matrices (P, entries), kernels in the order of `as_matrices`.

    Each large tensor is a matrix of its own, since joining them would copy them; the small ones are joined.
    """
    rows = [as_matrices(t).flatten(1) for t in update.values()]
    small = [t for t in rows if t.shape[1] < FORM_BELOW]
    return [t for t in rows if t.shape[1] >= FORM_BELOW] + ([torch.cat(small, 1)] if small else [])


def apply(function: type[Function], *arguments: Any) -> Tensor:
    applied: Tensor = function.apply(*arguments)
    return applied


def apply_two(function: type[Function], *arguments: Any) -> tuple[Tensor, Tensor]:
    applied: tuple[Tensor, Tensor] = function.apply(*arguments)
    return applied
