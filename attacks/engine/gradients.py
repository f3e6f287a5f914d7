"""Gradients of many problems that share weights, in one ordinary pass, differentiable once more.

The model runs on all problems' examples as one batch, with one copy of the weights. Each layer's input and the loss's
derivative by its output then give its gradient for every problem apart: a batched product, which for a fully connected layer,
or a convolution with few positions, need not be carried out (its inner products follow from the two factors). Weights that
local steps have moved apart are the shared ones and each problem's own move. vmap gives the same, several times slower.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn import grad as nn_grad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.update import Loss, Params, StochasticLayer, local_sgd

CACHE = 2**18  # numbers that a core's own cache holds beside what else is in use
KEPT = 2**21  # numbers up to which an input's windows are kept from one pass to the next, not made again
WIDE = 64  # channels from which a convolution's kernel gradient is computed without windows
EXACT = {torch.float32: 1e-6, torch.float64: 1e-12}  # relative distance at which a product is the matrix itself
FORM_BELOW = 2**15  # entries: below, a weight's gradient is formed though factors would do, and compared with others


class Unsupported(Exception):
    """The model uses a parameter in a way that this file does not know, or mixes examples; vmap does it all."""


class FactoredGradient(NamedTuple):
    """The gradient (P, out, in) of a fully connected layer as the sum over rows of signal x input, not formed.

    Or the gradient (P, out, kh * kw * in) of a convolution's kernel that has few positions: rows are the input's windows.
    """

    signal: Tensor  # (P, rows, out)
    input: Tensor  # (P, rows, in)

    @property
    def rows(self) -> int:
        return self.signal.shape[1]

    def products(self, other: "Tensor | FactoredGradient") -> tuple[Tensor, Tensor]:
        """Inner products (P,) with another gradient, as Factors or formed, and squared norms (P,)."""
        if isinstance(other, FactoredGradient):
            return _apply_two(_Products, *self, *other)
        signals, inputs = (torch.bmm(t, t.transpose(1, 2)) for t in self)
        inner = torch.bmm(self.signal, _matrices(other)) * self.input
        return inner.flatten(1).sum(1), (signals * inputs).flatten(1).sum(1)

    def of(self, problems: Tensor) -> "FactoredGradient":
        """Those of some problems."""
        return FactoredGradient(self.signal[problems], self.input[problems])

    def form(self) -> Tensor:
        """The gradient itself, a kernel's as (P, out, kh * kw * in)."""
        return torch.bmm(self.signal.transpose(1, 2), self.input)

    @staticmethod
    def fewer(rows: int, high: int, wide: int) -> bool:
        """Whether inner products of so many rows are cheaper than a gradient of this size."""
        return 2 * rows * (high + wide) <= high * wide


class _Products(Function):
    """Inner products (P,) of products by rows with others that are constant, and with themselves."""

    @staticmethod
    def forward(
        ctx: Any, signal: Tensor, input: Tensor, other_signal: Tensor, other_input: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(signal, input, other_signal, other_input)
        ctx.tables = [
            torch.bmm(mine, t.transpose(1, 2))
            for mine, other in ((signal, other_signal), (input, other_input))
            for t in (other, mine)
        ]
        signals, own_signals, inputs, own_inputs = ctx.tables
        return (signals * inputs).flatten(1).sum(1), (own_signals * own_inputs).flatten(1).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_inner: Tensor, by_square: Tensor) -> tuple[Tensor | None, ...]:
        signal, input, other_signal, other_input = ctx.saved_tensors
        signals, own_signals, inputs, own_inputs = ctx.tables
        first, second = by_inner[:, None, None], 2 * by_square[:, None, None]
        by_signal = torch.bmm(first * inputs, other_signal).baddbmm_(second * own_inputs, signal)
        by_input = torch.bmm(first * signals, other_input).baddbmm_(second * own_signals, input)
        return by_signal, by_input, None, None


Gradients = dict[str, Tensor | FactoredGradient]


def gradients(
    model: nn.Module,
    params: Params,
    x: Tensor,
    y: Tensor,
    factor: float,
    factors: bool,
    loss: Loss = F.cross_entropy,
) -> Gradients:
    """factor times the gradients (P, ...) of P problems' loss by every parameter.

    Args:
        x: (P, B, ...) as the model is fed; requires grad, and so will what is returned.
        y: (P, B) labels, or (P, B, classes) probabilities.
        factors: leave large gradients that are products as Factors.
        loss: the mean of its examples' losses.

    Raises:
        Unsupported: the model cannot be treated so.
    """
    return _gradients(model, params, {}, _Examples(x, y), factor, factors, loss)


def local_training_changes(
    model: nn.Module,
    params: Params,
    x: Tensor,
    y: Tensor,
    local: local_sgd,
    factors: bool,
    loss: Loss = F.cross_entropy,
) -> Gradients:
    """The changes (P, ...) of the weights by local steps on the whole batch; arguments as for `gradients`."""
    examples = _Examples(x, y)
    change: Gradients = {}
    for _ in range(local.steps):
        step = _gradients(model, params, change, examples, -local.rate, True, loss)
        kept = 1 - local.rate * local.proximal_mu
        change = {k: _plus(t, change.get(k), kept, params[k].shape) for k, t in step.items()}
    return change if factors else {k: _form(t, params[k].shape) for k, t in change.items()}


def _plus(
    step: Tensor | FactoredGradient, before: Tensor | FactoredGradient | None, kept: float, shape: Sequence[int]
) -> Tensor | FactoredGradient:
    """A step's change of a parameter of a shape, added to what is kept of those before."""
    if before is None:
        return step
    if isinstance(step, FactoredGradient) and isinstance(before, FactoredGradient):
        signals = [before.signal if kept == 1 else kept * before.signal, step.signal]
        return FactoredGradient(torch.cat(signals, 1), torch.cat([before.input, step.input], 1))
    before = _form(before, shape)
    return (before if kept == 1 else kept * before) + _form(step, shape)


class _Examples:
    """All problems' examples as one batch; the windows of its images are the same for all local steps."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.problems, self.size = x.shape[:2]
        self.x, self.y = x.flatten(0, 1), y.flatten(0, 1)
        self._kept: dict[_Windows, Tensor] = {}

    def windows(self, input: Tensor, windows: "_Windows") -> Tensor:
        """Those of a layer's input (P, positions, kh * kw * C)."""
        if input is not self.x:
            return _apply(_Unfold, input, windows, self.problems)
        if windows not in self._kept:
            self._kept[windows] = _apply(_Unfold, input, windows, self.problems)
        return self._kept[windows]


def _gradients(
    model: nn.Module,
    params: Params,
    moves: Gradients,
    examples: _Examples,
    factor: float,
    factors: bool,
    loss: Loss,
) -> Gradients:
    """`gradients` where each problem has moved from params by its own `moves`, or none has."""
    problems = examples.problems
    logits, calls = _run(model, params, moves, examples)
    total = _summed(loss, logits, examples.y) * (factor / examples.size)
    outs = [call.out for call in calls]
    signals = torch.autograd.grad(total, outs, create_graph=True, materialize_grads=True)
    result: Gradients = {}
    for call, signal in zip(calls, signals, strict=True):
        for name, part in call.parts(signal, problems).items():
            result[name] = _plus(part, result.get(name), 1, params[name].shape)  # more than one: a shared weight
    unused = params.keys() - result.keys()
    result |= {name: logits.new_zeros(problems, *params[name].shape) for name in unused}
    return {k: result[k] if factors and _large(result[k]) else _form(result[k], p.shape) for k, p in params.items()}


def _summed(loss: Loss, logits: Tensor, y: Tensor) -> Tensor:
    """All examples' losses, of which `loss` gives the mean."""
    return F.cross_entropy(logits, y, reduction="sum") if is_cross_entropy(loss) else loss(logits, y) * len(logits)


_overwriting: WeakSet[nn.Module] = WeakSet()  # models that change layers' outputs in place, known from their first run


def _run(model: nn.Module, params: Params, moves: Gradients, examples: _Examples) -> tuple[Tensor, list["_LayerCall"]]:
    """Logits, and every use of a parameter; from copies where the model would overwrite what a layer gave."""
    spy = _GradientRecorder(params, moves, examples, copies=model in _overwriting)
    with spy:
        logits: Tensor = functional_call(model, params, (examples.x,))
    if any(call.out._version != call.version for call in spy.calls):
        _overwriting.add(model)
        return _run(model, params, moves, examples)
    return logits, spy.calls


def _large(part: Tensor | FactoredGradient) -> bool:
    return isinstance(part, FactoredGradient) and part.signal.shape[2] * part.input.shape[2] >= FORM_BELOW


def _form(part: Tensor | FactoredGradient, shape: Sequence[int]) -> Tensor:
    """The gradient itself, of a parameter of a shape."""
    if not isinstance(part, FactoredGradient):
        return part
    return part.form() if len(shape) == 2 else _kernels(part.form(), (shape[2], shape[3]))


def _kernels(matrices: Tensor, kernel: tuple[int, int]) -> Tensor:
    """(P, out, kh * kw * in) as (P, out, in, kh, kw)."""
    return matrices.view(*matrices.shape[:2], *kernel, -1).permute(0, 1, 4, 2, 3)


def _matrices(t: Tensor) -> Tensor:
    """The inverse of `_kernels`; what is no kernel stays as it is."""
    return t.permute(0, 1, 3, 4, 2).flatten(2) if t.dim() == 5 else t


def examples_are_independent(model: nn.Module, params: Params, x: Tensor) -> bool:
    """Whether the first problem of x (P, B, ...) gets the same logits alone as among the others, and no layer draws."""
    if any(
        isinstance(m, StochasticLayer) for m in model.modules()
    ):  # what it adds to the loss is no cross-entropy either
        return False
    with torch.no_grad():
        together = functional_call(model, params, (x.flatten(0, 1),))[: x.shape[1]]
        alone = functional_call(model, params, (x[0],))
    size = float(alone.abs().max())
    return math.isfinite(size) and torch.allclose(together, alone, rtol=1e-3, atol=1e-5 * size)


def factored(matrices: Tensor, rank: int) -> FactoredGradient | None:
    """Matrices (P, out, in) as Factors of this many rows; None where one of them is no such product up to rounding.

    Kernels (P, out, in, kh, kw) count as matrices. What was seen of a fully connected layer is a product, with a row for
    each example, unless something disturbed it. Its row space is that of random sums of its rows, refined once (Halko,
    Martinsson & Tropp, 2011, algorithm 4.4).
    """
    matrices = _matrices(matrices)
    high, wide = matrices.shape[1:]
    if not FactoredGradient.fewer(rank, high, wide) or matrices.dtype not in EXACT:
        return None
    sums = torch.randn(rank, high, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(matrices)
    signals, inputs = [], []
    for matrix in matrices:  # one after the other: the first that is none ends it
        basis = _orthonormal(matrix @ _orthonormal((sums @ matrix).T))
        signals.append(basis.T)
        inputs.append(basis.T @ matrix)
        if not _is_product(matrix, basis, inputs[-1]):
            return None
    return FactoredGradient(torch.stack(signals), torch.stack(inputs))


def _orthonormal(columns: Tensor) -> Tensor:
    found: Tensor = torch.linalg.qr(columns).Q
    return found


def _is_product(matrix: Tensor, basis: Tensor, rows: Tensor) -> bool:
    """Whether a matrix is basis @ rows up to the rounding of its entries; the basis is orthonormal."""
    size = float(rows.double().norm())
    scale = 1 / size if size else 1.0  # squares of tiny entries would be zero
    few = max(1, CACHE // matrix.shape[1])
    parts = zip(matrix.split(few), basis.split(few), strict=True)
    rests = [torch.addmm(part, lines, rows, beta=scale, alpha=-scale).norm() for part, lines in parts]
    return bool(torch.stack(rests).norm() <= EXACT[matrix.dtype])


def flattened(update: Mapping[str, Tensor]) -> list[Tensor]:
    """Stacked updates as matrices (P, entries), kernels in the order in which this file forms them.

    Large tensors are matrices by themselves, since putting them together would be a copy; small ones are together.
    """
    rows = [_matrices(t).flatten(1) for t in update.values()]
    small = [t for t in rows if t.shape[1] < FORM_BELOW]
    return [t for t in rows if t.shape[1] >= FORM_BELOW] + ([torch.cat(small, 1)] if small else [])


# ------------------------------------------------------------------------------------------------------------- layers


@dataclass(frozen=True, eq=False)
class _LayerCall(ABC):
    """One use of a layer: its input, its output as it was when it was new, and its parameters' names."""

    input: Tensor
    out: Tensor
    weight: str
    bias: str | None
    version: int

    @abstractmethod
    def parts(self, signal: Tensor, problems: int) -> dict[str, Tensor | FactoredGradient]:
        """The gradients of its parameters, each problem's apart."""

    def _with_bias(
        self, weight: Tensor | FactoredGradient, bias: Callable[[], Tensor]
    ) -> dict[str, Tensor | FactoredGradient]:
        return {self.weight: weight} if self.bias is None else {self.weight: weight, self.bias: bias()}


class _Linear(_LayerCall):
    def parts(self, signal: Tensor, problems: int) -> dict[str, Tensor | FactoredGradient]:
        signal = signal.reshape(problems, -1, signal.shape[-1])
        factors = FactoredGradient(signal, self.input.reshape(problems, -1, self.input.shape[-1]))
        return self._with_bias(factors, lambda: signal.sum(1))


@dataclass(frozen=True, eq=False)
class _Windowed(_LayerCall):
    """A convolution as a product with its input's windows."""

    rows: Tensor
    windows: "_Windows"

    def parts(self, signal: Tensor, problems: int) -> dict[str, Tensor | FactoredGradient]:
        signal = signal.permute(0, 2, 3, 1).reshape(problems, -1, signal.shape[1])
        factors = FactoredGradient(signal, self.rows)
        if FactoredGradient.fewer(factors.rows, signal.shape[2], self.rows.shape[2]):
            return self._with_bias(factors, lambda: signal.sum(1))
        return self._with_bias(_kernels(factors.form(), self.windows.kernel), lambda: signal.sum(1))


@dataclass(frozen=True, eq=False)
class _Conv(_LayerCall):
    windows: "_Windows"

    def parts(self, signal: Tensor, problems: int) -> dict[str, Tensor | FactoredGradient]:
        if self.input.shape[1] >= WIDE and self.windows.regular:
            flat = _apply(_TapsGradient, self.input, signal, _PixelRows(problems, self.windows))
        else:
            flat = _apply(_KernelGradient, self.input, signal, problems, self.windows)
        kernels = _kernels(flat, self.windows.kernel)
        return self._with_bias(kernels, lambda: signal.sum((2, 3)).view(problems, -1, signal.shape[1]).sum(1))


@dataclass(frozen=True, eq=False)
class _Affine(_LayerCall):
    """A normalisation's y = weight * (input - centre) * spread + bias for each channel."""

    centre: Tensor
    spread: Tensor

    def parts(self, signal: Tensor, problems: int) -> dict[str, Tensor | FactoredGradient]:
        bias, product = (t.view(problems, -1, t.shape[1]).sum(1) for t in _apply_two(_ChannelSums, signal, self.input))
        return self._with_bias((product - self.centre * bias) * self.spread, lambda: bias)


class CallRecorder(TorchFunctionMode):
    """Runs a model, handing every use of a parameter to the method that knows its gradient.

    Args:
        names: of the parameters, by id.
        layers: by function of torch, the method that it is handed to; Unsupported for any other.
    """

    def __init__(self, names: Mapping[int, str], layers: Mapping[Any, Callable[..., Tensor]]) -> None:
        self.names, self.layers = names, layers

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self.among(args) and not self.among(kwargs.values()):
            return func(*args, **kwargs)
        if func in self.layers:
            return self.layers[func](self, *args, **kwargs)
        found = func(*args, **kwargs)
        if any(isinstance(part, Tensor) for part in tree_leaves(found)):  # not just a shape or a type
            raise Unsupported(f"a parameter goes into {getattr(func, '__name__', func)}")
        return found

    def among(self, values: Iterable[Any]) -> bool:
        """Whether one of them is a parameter, or, as for torch.cat, has one in it."""
        return any(self.among(v) if isinstance(v, list | tuple) else id(v) in self.names for v in values)

    def name(self, t: Tensor | None) -> str | None:
        return None if t is None else self.names.get(id(t))


class _GradientRecorder(CallRecorder):
    """Keeps what every use of a parameter needs for its gradient."""

    def __init__(self, params: Params, moves: Gradients, examples: _Examples, copies: bool) -> None:
        super().__init__({id(t): name for name, t in params.items()}, _LAYERS)
        self.moves, self.examples, self.copies = moves, examples, copies
        self.calls: list[_LayerCall] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        return super().__torch_function__(func, types, args, kwargs)

    def keep(self, call: _LayerCall) -> Tensor:
        self.calls.append(call)
        return call.out.clone() if self.copies else call.out

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = F.linear(input, weight, bias)
        if self.moves:
            rows = input.reshape(self.examples.problems, -1, input.shape[-1])
            out = out + self.by_move(rows, self.moves[self.names[id(weight)]], bias).view_as(out)
        return self.keep(_Linear(input, out, self.names[id(weight)], self.name(bias), out._version))

    def by_move(self, rows: Tensor, weight: Tensor | FactoredGradient, bias: Tensor | None) -> Tensor:
        """What the moves add to a fully connected layer's output (P, rows, out)."""
        if isinstance(weight, FactoredGradient):
            found = torch.bmm(torch.bmm(rows, weight.input.transpose(1, 2)), weight.signal)
        else:
            found = torch.bmm(rows, weight.transpose(1, 2))
        return found if bias is None else found + self.move(bias)[:, None]

    def move(self, t: Tensor) -> Tensor:
        """Each problem's own move of a parameter (P, ...)."""
        return _form(self.moves[self.names[id(t)]], t.shape)

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
        if groups != 1 or _pair(dilation) != (1, 1) or isinstance(padding, str) or input.dim() != 4:
            raise Unsupported("a convolution with groups, dilation or padding in words")
        if self.moves and input.shape[1] >= WIDE:
            raise Unsupported("a wide convolution with weights of each problem's own")
        kernel = (weight.shape[2], weight.shape[3])
        windows = _Windows(tuple(input.shape), kernel, _pair(stride), _pair(padding))
        names = self.names[id(weight)], self.name(bias)
        positions = self.examples.size * math.prod(windows.out)
        few = FactoredGradient.fewer(positions, weight.shape[0], weight[0].numel())
        if few or (input.shape[1] < WIDE and (self.moves or windows.numbers <= KEPT)):
            rows = self.examples.windows(input, windows)
            out = self.product(input, rows, weight, bias, windows)
            return self.keep(_Windowed(input, out, *names, out._version, rows, windows))
        out = _apply(_Convolution, input, weight, bias, windows)
        return self.keep(_Conv(input, out, *names, out._version, windows))

    def product(self, input: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, windows: "_Windows") -> Tensor:
        """A convolution by its input's windows, (N, out, h, w)."""
        if not self.moves:
            return _apply(_Product, input, rows, weight, bias, windows)
        out = torch.bmm(rows, _matrices(weight[None] + self.move(weight)).transpose(1, 2))
        out = out if bias is None else out + (bias + self.move(bias))[:, None]
        return out.view(len(input), *windows.out, -1).permute(0, 3, 1, 2)

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
        """weight * (input - centre) * spread + bias for each channel, with what does not depend on the input put together."""
        if weight is None or bias is None:
            raise Unsupported("a normalisation with only one of weight and bias")
        scale = self.own(weight) * _channels(spread)
        out = torch.addcmul(self.own(bias) - _channels(centre) * scale, input, scale)
        names = self.names[id(weight)], self.names[id(bias)]
        return self.keep(_Affine(input, out, *names, out._version, centre, spread))

    def own(self, t: Tensor) -> Tensor:
        """A parameter of the channels, as it is for each example."""
        if not self.moves:
            return _channels(t)
        return (t + self.move(t)).repeat_interleave(self.examples.size, 0)[:, :, None, None]


# not in the spy itself: a cycle of references would keep every iteration's graph until Python looks for cycles
_LAYERS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _GradientRecorder.linear,
    F.conv2d: _GradientRecorder.conv2d,
    F.batch_norm: _GradientRecorder.batch_norm,
    F.group_norm: _GradientRecorder.group_norm,
}


def _channels(t: Tensor) -> Tensor:
    return t.view(1, -1, 1, 1)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


# ------------------------------------------------------------------------------------------------------- convolutions


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    applied: Tensor = function.apply(*arguments)
    return applied


def _apply_two(function: type[Function], *arguments: Any) -> tuple[Tensor, Tensor]:
    applied: tuple[Tensor, Tensor] = function.apply(*arguments)
    return applied


class _ChannelSums(Function):
    """Sums (N, C) over positions of a signal, and of its product with an input."""

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


class _Convolution(Function):
    """A convolution by weights that need no gradient; torch's own second derivative computes one in vain."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, windows: "_Windows") -> Tensor:
        ctx.save_for_backward(weight)
        ctx.windows = windows
        return F.conv2d(x, weight, bias, windows.stride, windows.padding)

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return _apply(_Transposed, signal, weight, ctx.windows), None, None, None


class _Transposed(Function):
    """The adjoint of a convolution."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, weight: Tensor, windows: "_Windows") -> Tensor:
        ctx.save_for_backward(weight)
        ctx.windows = windows
        if windows.regular:  # an ordinary convolution too, for which there are the faster kernels
            margin = [k - 1 - m for k, m in zip(windows.kernel, windows.padding, strict=True)]
            return F.conv2d(signal, weight.flip(2, 3).transpose(0, 1), None, 1, margin)
        found: Tensor = nn_grad.conv2d_input(windows.shape, weight, signal, windows.stride, windows.padding)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return F.conv2d(g, weight, None, ctx.windows.stride, ctx.windows.padding), None, None


class _Product(Function):
    """A convolution, by weights that need no gradient, as a product with its input's windows.

    It is given both the input and the windows, and its derivative goes to one of them: to the windows, where the kernel's
    gradient adds its own before all are summed; or to the input, where there are many and the derivative is of the first
    order, to which the kernel's gradient has nothing to add.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, windows: "_Windows") -> Tensor:
        flat = _matrices(weight[None])[0]
        ctx.save_for_backward(weight, flat)
        ctx.windows, ctx.problems = windows, len(rows)
        shape = (len(x), len(flat), *windows.out)
        # no view of what is computed: a model may change it in place
        found = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        by_position = found.permute(0, 2, 3, 1).view(-1, len(flat))
        if bias is None:
            torch.mm(rows.flatten(0, 1), flat.T, out=by_position)
        else:
            torch.addmm(bias, rows.flatten(0, 1), flat.T, out=by_position)
        return found

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[Tensor | None, ...]:
        weight, flat = ctx.saved_tensors
        windows: _Windows = ctx.windows
        if torch.is_grad_enabled() and windows.regular and windows.numbers >= CACHE:
            return _apply(_Transposed, signal, weight, windows), None, None, None, None
        rows = signal.permute(0, 2, 3, 1).reshape(ctx.problems, -1, signal.shape[1])
        return None, rows @ flat, None, None, None


class _TapsGradient(Function):
    """The gradient (P, out, kh * kw * in) of a kernel without stride: for each of its places a product of shifted lines.

    With many channels a problem's windows would be large; here nothing is copied but the margins.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, signal: Tensor, lines: "_PixelRows") -> Tensor:
        x, s = lines.read(input), lines.written(signal)
        ctx.save_for_backward(x, s)
        ctx.lines = lines
        found = x.new_empty(lines.problems, s.shape[2], len(lines.taps) * x.shape[2])
        for tap, part in zip(lines.taps, found.chunk(len(lines.taps), 2), strict=True):
            torch.bmm(s.transpose(1, 2), x[:, tap : tap + s.shape[1]], out=part)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, s = ctx.saved_tensors
        lines: _PixelRows = ctx.lines
        by_input, by_signal = torch.zeros_like(x), torch.zeros_like(s)
        for tap, part in zip(lines.taps, g.chunk(len(lines.taps), 2), strict=True):
            here = slice(tap, tap + s.shape[1])
            if ctx.needs_input_grad[0]:
                by_input[:, here].baddbmm_(s, part)
            if ctx.needs_input_grad[1]:
                by_signal.baddbmm_(x[:, here], part.transpose(1, 2))
        return lines.of_read(by_input), lines.of_written(by_signal), None


@dataclass(frozen=True)
class _PixelRows:
    """Images of P problems as rows of positions, in which each place of a kernel without stride is a shift of all rows.

    A margin of zeros parts the lines of an image, and the images of a problem: what is right of one is left of the next.
    """

    problems: int
    windows: "_Windows"

    @cached_property
    def grid(self) -> tuple[int, int]:
        (_, _, high, wide), (above, before) = self.windows.shape, self.windows.padding
        return high + above, wide + before

    @cached_property
    def taps(self) -> list[int]:
        """How many positions after an output's own each place of the kernel reads."""
        high, wide = self.windows.kernel
        return [row * self.grid[1] + column for row in range(high) for column in range(wide)]

    def read(self, x: Tensor) -> Tensor:
        """(P, positions, C) of (N, C, H, W), margins included."""
        places = len(x) // self.problems * math.prod(self.grid)
        rows = x.new_zeros(self.problems, places + self.taps[-1], x.shape[1])
        self._inside(rows).copy_(self._examples(x))
        return rows

    def written(self, s: Tensor) -> Tensor:
        """(P, positions, C) of an output's (N, C, h, w), zero at places of margins."""
        rows = s.new_zeros(self.problems, len(s) // self.problems * math.prod(self.grid), s.shape[1])
        self._images(rows, self.windows.out).copy_(self._examples(s))
        return rows

    def of_read(self, rows: Tensor) -> Tensor:
        """The inverse of `read`; of the margins nothing is left."""
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


class _KernelGradient(Function):
    """The gradient (P, out, kh * kw * in) of a convolution's kernel for each problem: windows of the input times signals.

    Windows are laid out with channels last, so that they are copied and summed in runs of kw * in numbers, and made for a
    few problems at a time, so that they stay in the cache; torch's own unfold and fold do neither.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, signal: Tensor, problems: int, windows: "_Windows") -> Tensor:
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
    input: Tensor, signal: Tensor, problems: int, windows: "_Windows"
) -> Iterator[tuple["_Windows", int, Tensor, Tensor]]:
    """(windows, problems, input, signal) of a few problems at a time, whose windows take about CACHE numbers."""
    size = len(input) // problems
    few = max(1, min(problems, CACHE * problems // windows.numbers))
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


class _Unfold(Function):
    """Windows (P, positions, kh * kw * C) of an input (N, C, H, W); its adjoint is `_Fold`, and the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: "_Windows", problems: int) -> Tensor:
        ctx.shape, ctx.problems = shape, problems
        ctx.set_materialize_grads(False)
        return shape.of(x, problems)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        return None if g is None else _apply(_Fold, g, ctx.shape, ctx.problems), None, None


class _Fold(Function):
    @staticmethod
    def forward(ctx: Any, windows: Tensor, shape: "_Windows", problems: int) -> Tensor:
        ctx.shape, ctx.problems = shape, problems
        return shape.summed(windows.contiguous())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(_Unfold, g, ctx.shape, ctx.problems), None, None


@dataclass(frozen=True)
class _Windows:
    """What a convolution's kernel sees at each output position of an input (N, C, H, W)."""

    shape: Sequence[int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @cached_property
    def regular(self) -> bool:
        """Whether the adjoint is a convolution of the same kind."""
        return self.stride == (1, 1) and all(m < k for m, k in zip(self.padding, self.kernel, strict=True))

    @cached_property
    def numbers(self) -> int:
        """Numbers of all windows."""
        return self.shape[0] * math.prod(self.out) * math.prod(self.kernel) * self.shape[1]

    @cached_property
    def padded(self) -> tuple[int, int]:
        return self.shape[2] + 2 * self.padding[0], self.shape[3] + 2 * self.padding[1]

    @cached_property
    def out(self) -> tuple[int, int]:
        high, wide = self.padded
        return (high - self.kernel[0]) // self.stride[0] + 1, (wide - self.kernel[1]) // self.stride[1] + 1

    def of(self, x: Tensor, problems: int) -> Tensor:
        """(P, positions of all examples of a problem, kh * kw * C)."""
        n, c, _, _ = self.shape
        (high, wide), (rows, columns) = self.padded, self.out
        image = self._inside(canvas := x.new_zeros(n, high, wide, c))
        image.copy_(x.permute(0, 2, 3, 1))
        strides = (high * wide * c, self.stride[0] * wide * c, self.stride[1] * c, wide * c, 1)
        windows = canvas.as_strided((n, rows, columns, self.kernel[0], self.kernel[1] * c), strides)
        return windows.reshape(problems, -1, self.kernel[0] * self.kernel[1] * c)

    def summed(self, windows: Tensor) -> Tensor:
        """The adjoint of `of`: each window's numbers added where they came from; (N, C, H, W)."""
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
    apart = -(-width // step)  # so many runs on, they no longer overlap
    for first in range(min(apart, places)):
        count = -(-(places - first) // apart)
        room = total.as_strided((n, count, m, width), (m * length, apart * step, length, 1), first * step)
        room.add_(runs[:, first::apart])
    return total
