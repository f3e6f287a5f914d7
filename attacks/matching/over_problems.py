"""Functions of one problem, evaluated and differentiated for many problems: by vmap, or one after the other."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import grad_and_value, vmap

from fedgauge.client.update import Update


def over_problems(function: Callable[..., Tensor], *arguments: Tensor | Update, loop: bool = False) -> Tensor:
    """A function of one problem, mapped over the first axis of every tensor; without vmap for a single problem or in a loop."""
    first = arguments[0]
    count = len(first if isinstance(first, Tensor) else next(iter(first.values())))
    if count > 1 and not loop:
        mapped: Tensor = vmap(function)(*arguments)
        return mapped
    return torch.stack([function(*_problem(arguments, i)) for i in range(count)])


def _problem(arguments: tuple[Tensor | Update, ...], i: int) -> list[Tensor | Update]:
    return [a[i] if isinstance(a, Tensor) else {k: t[i] for k, t in a.items()} for a in arguments]


def with_slopes(
    function: Callable[..., Tensor],
    by: tuple[int, ...],
    *arguments: Tensor | Update,
    loop: bool,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients by some arguments of a function of one problem, and its values, for all problems.

    Args:
        loop: by plain autograd in turn, for functions that torch.func or vmap refuse.
    """
    if not loop and len(cast(Tensor, arguments[0])) > 1:
        slopes, value = vmap(grad_and_value(function, by))(*arguments)
        return slopes, value
    if not loop:
        slopes, value = grad_and_value(function, by)(*_problem(arguments, 0))
        return tuple(s[None] for s in slopes), value[None]
    values, slopes = [], []
    for i in range(len(cast(Tensor, arguments[0]))):
        alone = _problem(arguments, i)
        leaves = [cast(Tensor, alone[place]).detach().requires_grad_() for place in by]
        for place, leaf in zip(by, leaves, strict=True):
            alone[place] = leaf
        with torch.enable_grad():
            value = function(*alone)
            slopes.append(torch.autograd.grad(value, leaves, materialize_grads=True))
        values.append(value.detach())
    return tuple(torch.stack(same) for same in zip(*slopes, strict=True)), torch.stack(values)


class KnownGradient(Function):
    """A value (N,) with known gradients by its inputs (N, ...): inputs first, then as many gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, inputs: int, *both: Tensor) -> Tensor:
        ctx.save_for_backward(*both[inputs:])
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        slopes = [s * g.view(-1, *[1] * (s.dim() - 1)) for s in ctx.saved_tensors]
        return None, None, *slopes, *[None] * len(slopes)
