"""Convolutions by shared weights, and the gradient of their kernels for each problem."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn import grad as nn_grad

from fedgauge.attacks.engine.gradients.factored import AT_ONCE, CACHE, apply, as_matrices


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution: the values under its kernel at each output position of an input (N, C, H, W)."""

    shape: Sequence[int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @cached_property
    def regular(self) -> bool:
        """True if the adjoint is also an ordinary convolution."""
        return self.stride == (1, 1) and all(m < k for m, k in zip(self.padding, self.kernel, strict=True))

    @cached_property
    def numbers(self) -> int:
        return self.shape[0] * math.prod(self.out) * math.prod(self.kernel) * self.shape[1]

    @cached_property
    def padded(self) -> tuple[int, int]:
        return self.shape[2] + 2 * self.padding[0], self.shape[3] + 2 * self.padding[1]

    @cached_property
    def out(self) -> tuple[int, int]:
        high, wide = self.padded
        return (high - self.kernel[0]) // self.stride[0] + 1, (wide - self.kernel[1]) // self.stride[1] + 1

    def of(self, x: Tensor, problems: int) -> Tensor:
        """The windows (P, positions of all examples of a problem, kh * kw * C)."""
        n, c, _, _ = self.shape
        (high, wide), (rows, columns), (top, left) = self.padded, self.out, self.padding
        canvas = x.new_zeros(n, high, wide, c)
        canvas[:, top : top + self.shape[2], left : left + self.shape[3]].copy_(x.permute(0, 2, 3, 1))
        strides = (high * wide * c, self.stride[0] * wide * c, self.stride[1] * c, wide * c, 1)
        windows = canvas.as_strided((n, rows, columns, self.kernel[0], self.kernel[1] * c), strides)
        return windows.reshape(problems, -1, self.kernel[0] * self.kernel[1] * c)

    def summed(self, windows: Tensor) -> Tensor:
        """The adjoint of `of`: each window's entries added back to their pixels, (N, C, H, W)."""
        n, c, high, wide = self.shape
        (rows, columns), (top, left), (tall, broad) = self.out, self.padding, self.padded
        lines = _added(windows.reshape(n * rows, columns, self.kernel[0], -1), self.stride[1] * c, broad * c)
        canvas = _added(lines.view(n, rows, 1, -1), self.stride[0] * broad * c, tall * broad * c)
        return canvas.view(n, tall, broad, c)[:, top : top + high, left : left + wide].permute(0, 3, 1, 2)


def _added(runs: Tensor, step: int, length: int) -> Tensor:
    """Sums (N, M, length) of runs (N, places, M, width), each laid `step` numbers after the one before."""
    n, places, m, width = runs.shape
    total, apart = runs.new_zeros(n, m, length), -(-width // step)  # runs this far apart do not overlap
    for first in range(min(apart, places)):
        some = runs[:, first::apart]
        total.as_strided(some.shape, (m * length, apart * step, length, 1), first * step).add_(some)
    return total


class Unfold(Function):
    """Windows (P, positions, kh * kw * C) of an input (N, C, H, W); `Fold` is its adjoint, and vice versa."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: "Windows", problems: int) -> Tensor:
        ctx.shape, ctx.problems = shape, problems
        ctx.set_materialize_grads(False)
        return shape.of(x, problems)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        return None if g is None else apply(Fold, g, ctx.shape, ctx.problems), None, None


class Fold(Function):
    @staticmethod
    def forward(ctx: Any, windows: Tensor, shape: "Windows", problems: int) -> Tensor:
        ctx.shape, ctx.problems = shape, problems
        return shape.summed(windows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return apply(Unfold, g, ctx.shape, ctx.problems), None, None


class Convolution(Function):
    """A convolution without a gradient by its weights, which torch's own second derivative would compute in vain."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, windows: "Windows") -> Tensor:
        ctx.save_for_backward(weight)
        ctx.windows = windows
        return F.conv2d(x, weight, bias, windows.stride, windows.padding)

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return apply(Adjoint, signal, weight, ctx.windows), None, None, None


class Adjoint(Function):
    @staticmethod
    def forward(ctx: Any, signal: Tensor, weight: Tensor, windows: "Windows") -> Tensor:
        ctx.save_for_backward(weight)
        ctx.windows = windows
        if windows.regular:  # an ordinary convolution, which has faster kernels
            margin = [k - 1 - m for k, m in zip(windows.kernel, windows.padding, strict=True)]
            return F.conv2d(signal, weight.flip(2, 3).transpose(0, 1), None, 1, margin)
        by_input: Tensor = nn_grad.conv2d_input(windows.shape, weight, signal, windows.stride, windows.padding)
        return by_input

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return F.conv2d(g, weight, None, ctx.windows.stride, ctx.windows.padding), None, None


class WindowProduct(Function):
    """A convolution, by weights that need no gradient, as a product with its input's windows; returns both.

    The kernel's gradient is a product with the windows as well, so derivatives by both are summed before they are folded.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, windows: "Windows", problems: int
    ) -> tuple[Tensor, Tensor]:
        rows, flat = windows.of(x, problems), as_matrices(weight[None])[0]
        ctx.save_for_backward(weight, flat)
        ctx.windows, ctx.problems = windows, problems
        ctx.set_materialize_grads(False)
        shape = (len(x), len(flat), *windows.out)
        # a tensor of its own, not a view: a model may change it in place
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        by_position = out.permute(0, 2, 3, 1).view(-1, len(flat))
        if bias is None:
            torch.mm(rows.flatten(0, 1), flat.T, out=by_position)
        else:
            torch.addmm(bias, rows.flatten(0, 1), flat.T, out=by_position)
        return out, rows

    @staticmethod
    def backward(ctx: Any, signal: Tensor | None, by_rows: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, flat = ctx.saved_tensors
        windows: Windows = ctx.windows
        if torch.is_grad_enabled() and by_rows is None and windows.regular and windows.numbers >= CACHE:
            return apply(Adjoint, signal, weight, windows), None, None, None, None
        if signal is not None:
            by_position = signal.permute(0, 2, 3, 1).reshape(ctx.problems, -1, len(flat))
            if by_rows is None:
                by_rows = by_position @ flat
            else:
                by_rows = torch.addmm(by_rows.flatten(0, 1), by_position.flatten(0, 1), flat).view_as(by_rows)
        return None if by_rows is None else apply(Fold, by_rows, windows, ctx.problems), None, None, None, None


class KernelGradient(Function):
    """The gradient (P, out, kh * kw * in) of a convolution's kernel for each problem: windows of the input times signals.

    Windows have channels last, so that they are copied and summed in runs of kw * in numbers. On the CPU they are made for a few
    problems at a time, so that they stay in the cache. torch's own unfold and fold do neither.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, signal: Tensor, problems: int, windows: "Windows") -> Tensor:
        ctx.save_for_backward(input, signal)
        ctx.geometry = (problems, windows)
        parts = _parts(input, signal, problems, windows)
        return torch.cat([torch.bmm(_by_problem(s, few), part.of(x, few)) for part, few, x, s in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        input, signal = ctx.saved_tensors
        by_input: list[Tensor] = []
        by_signal: list[Tensor] = []
        done = 0
        for windows, few, x, s in _parts(input, signal, *ctx.geometry):
            part, done = g[done : done + few], done + few
            if ctx.needs_input_grad[1]:
                by_signal.append(_by_example(torch.bmm(part, windows.of(x, few).transpose(1, 2)), s.shape))
            if ctx.needs_input_grad[0]:
                by_input.append(windows.summed(torch.bmm(_by_problem(s, few).transpose(1, 2), part)))
        return torch.cat(by_input) if by_input else None, torch.cat(by_signal) if by_signal else None, None, None


def _parts(
    input: Tensor, signal: Tensor, problems: int, windows: "Windows"
) -> Iterator[tuple["Windows", int, Tensor, Tensor]]:
    """(windows, problems, input, signal) of a few problems at a time, with about as many entries in their windows as suit."""
    size = len(input) // problems
    entries = CACHE if input.device.type == "cpu" else AT_ONCE
    few = max(1, min(problems, entries * problems // windows.numbers))
    for x, s in zip(input.split(few * size), signal.split(few * size), strict=True):
        yield replace(windows, shape=tuple(x.shape)), len(x) // size, x, s


def _by_problem(signal: Tensor, problems: int) -> Tensor:
    """(P * B, out, h, w) to (P, out, B * h * w)."""
    flat = signal.reshape(problems, -1, signal.shape[1], signal.shape[2] * signal.shape[3])
    return flat.transpose(1, 2).reshape(problems, signal.shape[1], -1)


def _by_example(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `_by_problem`."""
    problems = len(flat)
    return flat.view(problems, shape[1], shape[0] // problems, -1).transpose(1, 2).reshape(tuple(shape))
