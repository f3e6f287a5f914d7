"""Functions of one problem, evaluated and differentiated for many problems by vmap."""

from collections.abc import Callable
from typing import Any, Literal, cast

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import grad_and_value, vmap

from fedgauge.attacks.engine.strided_conv import without_stride
from fedgauge.client.update import Update


def over_problems(function: Callable[..., Tensor], *arguments: Tensor | Update) -> Tensor:
    """A function of one problem, mapped over the first axis of every tensor; without vmap for a single problem."""
    first = arguments[0]
    count = len(first if isinstance(first, Tensor) else next(iter(first.values())))
    if count > 1:
        mapped: Tensor = vmap(function)(*arguments)
        return mapped
    alone = [a[0] if isinstance(a, Tensor) else {k: t[0] for k, t in a.items()} for a in arguments]
    return function(*alone)[None]


def each_with_slopes(
    function: Callable[..., Tensor],
    by: tuple[int, ...],
    draws: Literal["same", "error"],
    *arguments: Tensor | Update,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients by some arguments of a function of one problem, and its values, for all problems."""
    with without_stride():
        if len(cast(Tensor, arguments[0])) > 1:
            slopes, value = vmap(grad_and_value(function, by), randomness=draws)(*arguments)
        else:
            alone = [a[0] if isinstance(a, Tensor) else {k: t[0] for k, t in a.items()} for a in arguments]
            slopes, value = grad_and_value(function, by)(*alone)
            slopes, value = tuple(s[None] for s in slopes), value[None]
    return slopes, value


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
