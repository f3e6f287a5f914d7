"""Windows (im2col): what a convolution's kernel reads at each output position, as rows of a matrix, and the adjoint."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.autograd import Function

from fedgauge.attacks.engine.gradients.factored import apply


@dataclass(frozen=True)
class Windows:
    """What a convolution's kernel sees at each output position of an input (N, C, H, W)."""

    shape: Sequence[int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @cached_property
    def regular(self) -> bool:
        """Whether the adjoint is an ordinary convolution too."""
        return self.stride == (1, 1) and all(m < k for m, k in zip(self.padding, self.kernel, strict=True))

    @cached_property
    def numbers(self) -> int:
        """Entries of all windows together."""
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
        (high, wide), (rows, columns) = self.padded, self.out
        image = self._inside(canvas := x.new_zeros(n, high, wide, c))
        image.copy_(x.permute(0, 2, 3, 1))
        strides = (high * wide * c, self.stride[0] * wide * c, self.stride[1] * c, wide * c, 1)
        windows = canvas.as_strided((n, rows, columns, self.kernel[0], self.kernel[1] * c), strides)
        return windows.reshape(problems, -1, self.kernel[0] * self.kernel[1] * c)

    def summed(self, windows: Tensor) -> Tensor:
        """The adjoint of `of`: each window's entries added back to their pixels, (N, C, H, W)."""
        n, c, _, _ = self.shape
        (high, wide), (rows, columns) = self.padded, self.out
        lines = _overlapped(windows.view(n * rows, columns, self.kernel[0], -1), self.stride[1] * c, wide * c)
        canvas = _overlapped(lines.view(n, rows, 1, -1), self.stride[0] * wide * c, high * wide * c)
        return self._inside(canvas.view(n, high, wide, c)).permute(0, 3, 1, 2)

    def _inside(self, canvas: Tensor) -> Tensor:
        top, left = self.padding
        return canvas[:, top : top + self.shape[2], left : left + self.shape[3]]


def _overlapped(runs: Tensor, step: int, length: int) -> Tensor:
    """Sums (N, M, length) of runs (N, places, M, width), each laid `step` numbers after the one before."""
    n, places, m, width = runs.shape
    total = runs.new_zeros(n, m, length)
    apart = -(-width // step)  # runs this far apart do not overlap
    for first in range(min(apart, places)):
        count = -(-(places - first) // apart)
        room = total.as_strided((n, count, m, width), (m * length, apart * step, length, 1), first * step)
        room.add_(runs[:, first::apart])
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
        return shape.summed(windows.contiguous())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return apply(Unfold, g, ctx.shape, ctx.problems), None, None
