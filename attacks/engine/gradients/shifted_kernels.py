"""Kernel gradients of wide convolutions without stride: one product of shifted pixel rows for each kernel position."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fedgauge.attacks.engine.gradients.windows import Windows


class ShiftedKernelGradient(Function):
    """The gradient (P, out, kh * kw * in) of a kernel without stride: one product of shifted rows for each kernel position.

    With many channels a problem's windows would be large; here only the margins are copied.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, signal: Tensor, lines: "PixelRows") -> Tensor:
        x, s = lines.read(input), lines.written(signal)
        ctx.save_for_backward(x, s)
        ctx.lines = lines
        gradient = x.new_empty(lines.problems, s.shape[2], len(lines.taps) * x.shape[2])
        for tap, part in zip(lines.taps, gradient.chunk(len(lines.taps), 2), strict=True):
            torch.bmm(s.transpose(1, 2), x[:, tap : tap + s.shape[1]], out=part)
        return gradient

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, s = ctx.saved_tensors
        lines: PixelRows = ctx.lines
        by_input, by_signal = torch.zeros_like(x), torch.zeros_like(s)
        for tap, part in zip(lines.taps, g.chunk(len(lines.taps), 2), strict=True):
            here = slice(tap, tap + s.shape[1])
            if ctx.needs_input_grad[0]:
                by_input[:, here].baddbmm_(s, part)
            if ctx.needs_input_grad[1]:
                by_signal.baddbmm_(x[:, here], part.transpose(1, 2))
        return lines.of_read(by_input), lines.of_written(by_signal), None


@dataclass(frozen=True)
class PixelRows:
    """Images of P problems as rows of pixels, in which each kernel position is a shift of all rows.

    A margin of zeros separates the lines of an image and the images of a problem: one's right margin is the next one's left.
    """

    problems: int
    windows: "Windows"

    @cached_property
    def grid(self) -> tuple[int, int]:
        (_, _, high, wide), (above, before) = self.windows.shape, self.windows.padding
        return high + above, wide + before

    @cached_property
    def taps(self) -> list[int]:
        """The offset from an output's position to the one that each kernel position reads."""
        high, wide = self.windows.kernel
        return [row * self.grid[1] + column for row in range(high) for column in range(wide)]

    def read(self, x: Tensor) -> Tensor:
        """(P, positions, C) of (N, C, H, W), margins included."""
        places = len(x) // self.problems * math.prod(self.grid)
        rows = x.new_zeros(self.problems, places + self.taps[-1], x.shape[1])
        self._inside(rows).copy_(self._examples(x))
        return rows

    def written(self, s: Tensor) -> Tensor:
        """(P, positions, C) of an output (N, C, h, w), zero in the margins."""
        rows = s.new_zeros(self.problems, len(s) // self.problems * math.prod(self.grid), s.shape[1])
        self._images(rows, self.windows.out).copy_(self._examples(s))
        return rows

    def of_read(self, rows: Tensor) -> Tensor:
        """The inverse of `read`, without the margins."""
        return self._inside(rows).flatten(0, 1).permute(0, 3, 1, 2)

    def of_written(self, rows: Tensor) -> Tensor:
        """The inverse of `written`."""
        return self._images(rows, self.windows.out).flatten(0, 1).permute(0, 3, 1, 2)

    def _inside(self, rows: Tensor) -> Tensor:
        (_, _, high, wide), (above, before) = self.windows.shape, self.windows.padding
        first = above * self.grid[1] + before
        return self._images(rows[:, first : first + rows.shape[1] - self.taps[-1]], (high, wide))

    def _images(self, rows: Tensor, size: tuple[int, int]) -> Tensor:
        """(P, B, h, w, C), a view."""
        return rows.view(len(rows), -1, *self.grid, rows.shape[2])[:, :, : size[0], : size[1]]

    def _examples(self, t: Tensor) -> Tensor:
        return t.view(self.problems, -1, *t.shape[1:]).permute(0, 1, 3, 4, 2)
