"""The layers with known gradients: records each call, and computes its parameters' gradients for each problem."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedgauge.attacks.engine.gradients.convolution import Convolution, KernelGradient, Unfold, WindowProduct, Windows
from fedgauge.attacks.engine.gradients.factored import (
    FactoredGradient,
    Gradients,
    apply,
    apply_two,
    as_kernels,
    as_matrices,
    formed,
)
from fedgauge.client.update import Params

KEPT = 2**21  # numbers up to which an input's windows are kept between passes instead of being made again
WIDE = 64  # channels from which an input's windows are too large to be kept


class Unsupported(Exception):
    """The model uses a parameter in an unknown way, or mixes examples: use vmap, which handles everything."""


class CallRecorder(TorchFunctionMode):
    """Runs a model and passes every use of a parameter to the method that knows its gradient.

    Args:
        names: of the parameters, by id.
        layers: the method for each function of torch; any other function raises Unsupported.
    """

    def __init__(self, names: Mapping[int, str], layers: Mapping[Any, Callable[..., Tensor]]) -> None:
        self.names, self.layers = names, layers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not self.among(args) and not self.among(kwargs.values()):
            return func(*args, **kwargs)
        if func in self.layers:
            return self.layers[func](self, *args, **kwargs)
        result = func(*args, **kwargs)
        if any(isinstance(part, Tensor) for part in tree_leaves(result)):  # not just a shape or a type
            raise Unsupported(f"a parameter goes into {getattr(func, '__name__', func)}")
        return result

    def among(self, values: Iterable[Any]) -> bool:
        """True if one of the values is a parameter, or a list that contains one, as for torch.cat."""
        return any(self.among(v) if isinstance(v, list | tuple) else id(v) in self.names for v in values)

    def name(self, t: Tensor | None) -> str | None:
        return None if t is None else self.names.get(id(t))


class Examples:
    """All problems' examples as one batch; the windows of its images are shared by all local steps."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.problems, self.size = x.shape[:2]
        self.x, self.y = x.flatten(0, 1), y.flatten(0, 1)
        self.windows: dict[Windows, Tensor] = {}  # of x


class LayerUse(NamedTuple):
    """One use of a layer: its output with the version at that time, and the gradients that follow from the derivative there."""

    out: Tensor
    version: int
    parts: Callable[[Tensor, int], Gradients]  # the loss's derivative by the output, problems -> gradients


def _of_product(
    weight: str, bias: str | None, rows: Tensor, kernel: tuple[int, int] | None, signal: Tensor, problems: int
) -> Gradients:
    """The gradients of a fully connected layer, or of a convolution computed as a product with its input's windows.

    Args:
        rows: what is multiplied (P, rows, in); kernel: (height, width) of a convolution's.
    """
    last = signal if kernel is None else signal.permute(0, 2, 3, 1)
    signal = last.reshape(problems, -1, last.shape[-1])
    product: Tensor | FactoredGradient = FactoredGradient(signal, rows)
    if kernel and not FactoredGradient.fewer(signal.shape[1], signal.shape[2], rows.shape[2]):
        product = as_kernels(FactoredGradient(signal, rows).form(), kernel)
    return {weight: product} if bias is None else {weight: product, bias: signal.sum(1)}


def _of_convolution(
    weight: str, bias: str | None, input: Tensor, windows: Windows, signal: Tensor, problems: int
) -> Gradients:
    kernels = as_kernels(apply(KernelGradient, input, signal, problems, windows), windows.kernel)
    if bias is None:
        return {weight: kernels}
    return {weight: kernels, bias: signal.sum((2, 3)).view(problems, -1, signal.shape[1]).sum(1)}


def _of_norm(
    weight: str, bias: str, input: Tensor, centre: Tensor, spread: Tensor, signal: Tensor, problems: int
) -> Gradients:
    """The gradients of a normalisation: y = weight * (input - centre) * spread + bias for each channel."""
    sums, products = (t.view(problems, -1, t.shape[1]).sum(1) for t in apply_two(_ChannelSums, signal, input))
    return {weight: (products - centre * sums) * spread, bias: sums}


class _ChannelSums(Function):
    """Sums (N, C) over positions of a signal, and of its product with the input."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(signal, input)
        return signal.sum((2, 3)), (signal * input).sum((2, 3))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_sum: Tensor, by_product: Tensor) -> tuple[Tensor | None, ...]:
        signal, input = ctx.saved_tensors
        by_sum, by_product = by_sum[:, :, None, None], by_product[:, :, None, None]
        return torch.addcmul(by_sum, input, by_product), signal * by_product


class GradientRecorder(CallRecorder):
    def __init__(
        self, params: Params, moves: Gradients, examples: Examples, copies: bool, contiguous: bool = False
    ) -> None:
        super().__init__({id(t): name for name, t in params.items()}, _LAYERS)
        self.moves, self.examples, self.copies, self.contiguous = moves, examples, copies, contiguous
        self.uses: list[LayerUse] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        return super().__torch_function__(func, types, args, kwargs)

    def keep(self, out: Tensor, parts: Callable[..., Gradients], *settings: Any) -> Tensor:
        self.uses.append(LayerUse(out, out._version, partial(parts, *settings)))
        made = out.contiguous() if self.contiguous else out
        return made.clone() if self.copies and made is out else made

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = F.linear(input, weight, bias)
        rows = input.reshape(self.examples.problems, -1, input.shape[-1])
        if self.moves:
            out = out + self.by_move(rows, self.moves[self.names[id(weight)]], bias).view_as(out)
        if not out.requires_grad:  # of a constant, as a recurrent layer's first state
            out.requires_grad_()
        return self.keep(out, _of_product, self.names[id(weight)], self.name(bias), rows, None)

    def by_move(self, rows: Tensor, weight: Tensor | FactoredGradient, bias: Tensor | None) -> Tensor:
        if isinstance(weight, FactoredGradient):
            added = torch.bmm(torch.bmm(rows, weight.input.transpose(1, 2)), weight.signal)
        else:
            added = torch.bmm(rows, weight.transpose(1, 2))
        return added if bias is None else added + self.move(bias)[:, None]

    def move(self, t: Tensor) -> Tensor:
        """Each problem's own move of a parameter (P, ...)."""
        return formed(self.moves[self.names[id(t)]], t.shape)

    def conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        wide = self.moves and input.shape[1] >= WIDE
        if wide or groups != 1 or _pair(dilation) != (1, 1) or isinstance(padding, str) or input.dim() != 4:
            raise Unsupported("a convolution with groups or dilation, or a wide one with weights for each problem")
        kernel = (weight.shape[2], weight.shape[3])
        windows = Windows(tuple(input.shape), kernel, _pair(stride), _pair(padding))
        names = self.names[id(weight)], self.name(bias)
        positions = self.examples.size * math.prod(windows.out)
        few = FactoredGradient.fewer(positions, weight.shape[0], weight[0].numel())
        if few or (input.shape[1] < WIDE and (self.moves or windows.numbers <= KEPT)):
            out, rows = self.product(input, weight, bias, windows)
            return self.keep(out, _of_product, *names, rows, kernel)
        out = apply(Convolution, input, weight, bias, windows)
        return self.keep(out, _of_convolution, *names, input, windows)

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None, windows: "Windows") -> tuple[Tensor, Tensor]:
        """A convolution by its input's windows (N, out, h, w), and the windows."""
        shared, problems = self.examples.windows if input is self.examples.x else {}, self.examples.problems
        if not self.moves:
            out, shared[windows] = apply_two(WindowProduct, input, weight, bias, windows, problems)
            return out, shared[windows]
        rows = shared[windows] if windows in shared else apply(Unfold, input, windows, problems)
        out = torch.bmm(rows, as_matrices(weight[None] + self.move(weight)).transpose(1, 2))
        out = out if bias is None else out + (bias + self.move(bias))[:, None]
        return out.view(len(input), *windows.out, -1).permute(0, 3, 1, 2), rows

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if training or running_mean is None or running_var is None or input.dim() != 4:
            raise Unsupported("BatchNorm over the batch's own statistics mixes its examples")
        return self.affine(input, weight, bias, running_mean, (running_var + eps).rsqrt())

    def group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        normal = F.group_norm(input, num_groups, None, None, eps)
        return self.affine(normal, weight, bias, input.new_zeros(input.shape[1]), input.new_ones(input.shape[1]))

    def affine(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, centre: Tensor, spread: Tensor
    ) -> Tensor:
        """weight * (input - centre) * spread + bias for each channel, with the input-independent factors combined first."""
        if weight is None or bias is None:
            raise Unsupported("a normalisation with only one of weight and bias")
        scale = self.own(weight) * _channels(spread)
        out = torch.addcmul(self.own(bias) - _channels(centre) * scale, input, scale)
        names = self.names[id(weight)], self.names[id(bias)]
        return self.keep(out, _of_norm, *names, input, centre, spread)

    def own(self, t: Tensor) -> Tensor:
        """A per-channel parameter as each example sees it."""
        if not self.moves:
            return _channels(t)
        return (t + self.move(t)).repeat_interleave(self.examples.size, 0)[:, :, None, None]


# not in the recorder itself: a reference cycle would keep every iteration's graph until the garbage collector runs
_LAYERS: dict[Any, Callable[..., Tensor]] = {
    F.linear: GradientRecorder.linear,
    F.conv2d: GradientRecorder.conv2d,
    F.batch_norm: GradientRecorder.batch_norm,
    F.group_norm: GradientRecorder.group_norm,
}


def _channels(t: Tensor) -> Tensor:
    return t.view(1, -1, 1, 1)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
