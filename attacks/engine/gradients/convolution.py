"""Convolutions by shared weights, and the gradient of their kernels for each problem."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn import grad as nn_grad

from fedgauge.attacks.engine.gradients.factored import AT_ONCE, CACHE, apply, as_matrices
from fedgauge.attacks.engine.gradients.windows import Windows


class Convolution(Function):
    """A convolution whose weights need no gradient; torch's own second derivative would compute one in vain."""

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
    """The adjoint of a convolution."""

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
    """A convolution, by weights that need no gradient, as a product with its input's windows.

    It takes both the input and the windows, and its derivative goes to one of them. Usually to the windows, where the
    kernel's gradient adds its own part before all are summed. To the input if there are many windows and the derivative is
    of first order, to which the kernel's gradient adds nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, windows: "Windows") -> Tensor:
        flat = as_matrices(weight[None])[0]
        ctx.save_for_backward(weight, flat)
        ctx.windows, ctx.problems = windows, len(rows)
        shape = (len(x), len(flat), *windows.out)
        # a tensor of its own, not a view: a model may change it in place
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        by_position = out.permute(0, 2, 3, 1).view(-1, len(flat))
        if bias is None:
            torch.mm(rows.flatten(0, 1), flat.T, out=by_position)
        else:
            torch.addmm(bias, rows.flatten(0, 1), flat.T, out=by_position)
        return out

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[Tensor | None, ...]:
        weight, flat = ctx.saved_tensors
        windows: Windows = ctx.windows
        if torch.is_grad_enabled() and windows.regular and windows.numbers >= CACHE:
            return apply(Adjoint, signal, weight, windows), None, None, None, None
        rows = signal.permute(0, 2, 3, 1).reshape(ctx.problems, -1, signal.shape[1])
        return None, rows @ flat, None, None, None


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
