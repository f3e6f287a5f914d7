"""Facts of a network, read from its computation: the layers that read the example, and the use of their outputs.

The network runs once on made-up examples under a TorchFunctionMode. A fact therefore does not depend on how the network is
written: nn.ReLU, F.relu and .relu() are alike, in whatever order its modules are registered.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedgauge.attacks.engine.batch_limiter import raise_if_exhausted
from fedgauge.client.gradient import without_running_stats
from fedgauge.client.rng import generator
from fedgauge.client.update import Params

SPREAD = 2.0  # made-up values lie between -2 and 2, about as normalised ones do
FLAT = (-1.0, 1.0)  # values of two constant examples, which give the scale and shift of what a layer reads
RANDOM = 2  # examples that confirm them
SAME = 1e-4  # relative difference up to which two tensors are equal but for rounding
PERTURBED = 0.02  # of the weights, so that a classifier of zeros lets a gradient through
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.conv2d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
}
_TRANSPOSED = (torch.t, torch.transpose, Tensor.t, Tensor.transpose, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
_PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a fully connected layer or a convolution with a trained weight.

    Args:
        weight, bias: the parameters' names; an empty bias: none.
        input: the values it was given; raw: whether no trained parameter takes part in them.
        output: its result, in the graph.
        settings: the further arguments of a convolution by name.
    """

    weight: str
    bias: str
    input: Tensor
    raw: bool
    output: Tensor
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The layer's name: that of the weight without its last part; empty for a model that is one layer."""
        return self.weight.rpartition(".")[0]

    @property
    def dense(self) -> bool:
        return not self.settings


@dataclass(frozen=True, eq=False)
class InputLayer(LayerCall):
    """The call of a layer that reads the example itself, up to a reshape and a fixed scale and shift of each value.

    Args:
        scale, shift: of each value, in the shape of an example.
        follows: the calls of the network after this one, in their order.
        relu: whether the layer's error signals are zero where its output is negative.
        only: True if no other call contributes to the gradient of the layer's parameters.
    """

    scale: Tensor
    shift: Tensor
    follows: tuple[LayerCall, ...]
    relu: bool
    only: bool

    def read(self, x: Tensor) -> Tensor:
        """The layer's input, computed from the network's input (..., *shape), in the same shape."""
        return x * self.scale.to(x) + self.shift.to(x)

    def example(self, read: Tensor) -> Tensor:
        """The inverse of `read`."""
        return (read - self.shift.to(read)) / self.scale.to(read)


def input_layers(model: nn.Module, shape: Sequence[int]) -> tuple[InputLayer, ...]:
    """The fully connected layers and convolutions that read the example itself, in the order of their calls.

    Raises:
        ValueError: the model fails on made-up examples of this shape.
    """
    with _failures_named(shape):
        rng = generator("made-up examples")
        x = 2 * SPREAD * torch.rand(len(FLAT) + RANDOM, *shape, generator=rng) - SPREAD
        x[: len(FLAT)] = torch.tensor(FLAT).view(-1, *(1 for _ in shape))
        params, x, result, calls = _tried(model, x)
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        total = torch.stack([(t * torch.randn(t.shape, generator=rng).to(t)).sum() for t in outputs]).sum()
        layers = (_input_layer(call, tuple(calls[i:]), x, params, total) for i, call in enumerate(calls, 1))
        return tuple(layer for layer in layers if layer is not None)


def layer_calls(model: nn.Module, shape: Sequence[int]) -> list[LayerCall]:
    """The calls of fully connected layers and convolutions on made-up examples; ValueError where the model fails on these."""
    with _failures_named(shape):
        return _tried(model, torch.rand(2, *shape, generator=generator("pixels")))[3]


_classifiers: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], tuple[str, str]]] = WeakKeyDictionary()


def classifier(model: nn.Module, shape: Sequence[int]) -> str:
    """The name of the fully connected layer that computes the logits, which is that of its `weight` and `bias`.

    Raises:
        ValueError: as `classifier_parameters`, or they have other names.
    """
    layer, _, part = (weight := classifier_parameters(model, shape)[0]).rpartition(".")
    if not layer or part != "weight":
        raise ValueError(f"the parameter {weight!r} computes the logits, and a layer's weight and bias have to")
    return layer


def classifier_parameters(model: nn.Module, shape: Sequence[int]) -> tuple[str, str]:
    """The names of the weight and bias (empty: none) that compute the logits; else of the last fully connected layer's.

    Raises:
        ValueError: there is none, or the model fails on made-up examples of this shape.
    """
    found, shape = _classifiers.setdefault(model, {}), tuple(shape)
    if shape not in found:
        with _failures_named(shape):
            _, _, result, calls = _tried(model, torch.rand(2, *shape, generator=generator("pixels")))
        dense = [call for call in calls if call.dense]
        if not dense:
            raise ValueError("the model has no fully connected layer, which label restoration reads")
        ends = [call for call in dense if isinstance(result, Tensor) and close(call.output, result)]
        found[shape] = (ends or dense)[-1].weight, (ends or dense)[-1].bias
    return found[shape]


@contextmanager
def _failures_named(shape: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a user's model may raise anything
        raise_if_exhausted(error)
        raise ValueError(f"the model fails on examples of shape {tuple(shape)} ({error_line(error)})") from error


def error_line(error: Exception) -> str:
    """The class of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _tried(model: nn.Module, x: Tensor) -> tuple[Params, Tensor, Any, list[LayerCall]]:
    own, rng = {k: p for k, p in model.named_parameters() if p.requires_grad}, generator("made-up weights")
    params = {k: (p.detach() + _noise(p, rng)).requires_grad_() for k, p in own.items()}
    x = x.to(next(iter(own.values()), x))
    return params, x, *called(model, params, x)


def dense_input_layer(model: nn.Module, shape: Sequence[int], biased: bool = True, relu: bool = False) -> InputLayer:
    """The fully connected layer that reads the example itself; one with a ReLU behind it if there are several.

    Raises:
        ValueError: there is none, it has no bias or no ReLU, as asked, or its parameters are used elsewhere as well.
    """
    layers = input_layers(model, shape)
    dense = sorted((layer for layer in layers if layer.dense), key=lambda own: (not own.bias, not own.relu))
    if not dense:
        found = f"; {layers[0].name!r} is a convolution" if layers else ""
        raise ValueError(f"no fully connected layer reads the example itself{found}")
    faults = {
        "has no bias, which would give the images' scale": biased and not dense[0].bias,
        "has parameters that are used more than once in a forward pass": not dense[0].only,
        "has no ReLU behind it, so its error signals have no zeros": relu and not dense[0].relu,
    }
    if wrong := [fault for fault, here in faults.items() if here]:
        raise ValueError(f"layer {dense[0].name!r} {wrong[0]}")
    return dense[0]


def called(model: nn.Module, params: Params, x: Tensor) -> tuple[Any, list[LayerCall]]:
    """The output of a network for x, and its calls of fully connected layers and convolutions with these weights."""
    with torch.enable_grad(), undisturbed(model, x.device), LayerCallRecorder(params) as on:
        return run(model, params, x), on.calls


def layer_inputs(
    model: nn.Module, params: Params, layers: Iterable[nn.Module], x: Tensor
) -> list[tuple[nn.Module, Tensor]]:
    """Each use of some layers on x, in order, with its input; running statistics stay as they are."""
    found: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found.append((module, inputs[0]))

    with ExitStack() as hooks, without_running_stats(model):
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(note))
        functional_call(model, params, (x,))
    return found


@contextmanager
def undisturbed(model: nn.Module, device: torch.device, seed: int = 0) -> Iterator[None]:
    """A context after which running statistics, the model's dicts and lists and torch's random numbers are as they were."""
    held = [(v, v.copy()) for m in model.modules() for v in containers(m)]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), without_running_stats(model):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            for now, before in held:
                now.clear()
                now.update(before) if isinstance(now, dict) else now.extend(before)


def containers(module: nn.Module) -> list[Any]:
    """A module's own dicts and lists, without its parameters and buffers."""
    own = ("_parameters", "_buffers", "_modules")
    return [v for k, v in vars(module).items() if k not in own and isinstance(v, dict | list)]


def run(model: nn.Module, params: Params, x: Tensor) -> Any:
    """The output for a copy of x, with copies of the model's buffers."""
    return functional_call(model, {**params, **{k: b.clone() for k, b in model.named_buffers()}}, (x.clone(),))


class LayerCallRecorder(TorchFunctionMode):
    """Records the calls of fully connected layers and convolutions with these parameters."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.calls: list[LayerCall] = []
        self.names = {id(p): name for name, p in params.items()}
        # weights by the id of their transpose, which is kept as well
        self.transposed: dict[int, tuple[Tensor, Tensor]] = {}
        self.products: dict[int, tuple[Tensor, int]] = {}  # of a bias yet to be added: result and number of the call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ARGUMENTS:
            given = dict(zip(_ARGUMENTS[func], args, strict=False)) | (kwargs or {})
            taken, weight, bias = (given.pop(name, None) for name in ("input", "weight", "bias"))
            return self._layer(taken, weight, bias, result, given)
        if kwargs:  # the operands of products and sums are hardly ever named
            return result
        if func in _TRANSPOSED and id(args[0]) in self.names and args[0].dim() == 2:
            self.transposed[id(result)] = result, args[0]
        elif func in _PRODUCTS and id(args[1]) in self.transposed:
            result = self._layer(args[0], self.transposed[id(args[1])][1], None, result, {})
            self.products[id(result)] = result, len(self.calls) - 1
        elif func is torch.addmm and id(args[2]) in self.transposed:
            return self._layer(args[1], self.transposed[id(args[2])][1], args[0], result, {})
        elif func in _SUMS and len(args) == 2:
            return self._sum(args, result)
        return result

    def _layer(self, taken: Tensor, weight: Any, bias: Any, result: Tensor, settings: Mapping[str, Any]) -> Tensor:
        """Note a call; return a copy of its result, which later operations may change."""
        if id(weight) not in self.names or not (bias is None or id(bias) in self.names):
            return result
        names = self.names[id(weight)], "" if bias is None else self.names[id(bias)]
        self.calls.append(LayerCall(*names, taken.clone(), not taken.requires_grad, result, settings))
        return result.clone()

    def _sum(self, terms: Sequence[Any], result: Tensor) -> Tensor:
        """Note a bias that is added to a product; return a copy of a new result, which later operations may change."""
        for product, bias in (terms, terms[::-1]):
            if id(product) in self.products and id(bias) in self.names and bias.shape == result.shape[-1:]:
                _, number = self.products.pop(id(product))
                self.calls[number] = replace(self.calls[number], bias=self.names[id(bias)], output=result)
                return result if result is product else result.clone()
        return result


def along(function: Callable[[Tensor], Any], x: Tensor, directions: Tensor) -> Any:
    """The derivatives of a function of x along directions (N, ...)."""
    with warnings.catch_warnings():  # torch compiles some rules on its first forward-mode derivative, with a warning
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        return vmap(lambda v: jvp(function, (x,), (v,))[1])(directions)


def _input_layer(
    call: LayerCall, follows: tuple[LayerCall, ...], x: Tensor, params: Params, total: Tensor
) -> InputLayer | None:
    shape = x.flatten(1).shape if call.dense else x.shape
    if not call.raw or not call.output.requires_grad or call.input.shape != shape:
        return None
    read = call.input.view_as(x)
    scale = (read[1] - read[0]) / (FLAT[1] - FLAT[0])
    shift = read[0] - FLAT[0] * scale
    if not bool((scale.abs() > SAME).all()) or not close(read, x * scale + shift):
        return None
    if not call.dense:
        return InputLayer(**vars(call), scale=scale, shift=shift, follows=follows, relu=False, only=False)
    wanted = [call.output, *(params[name] for name in (call.weight, call.bias) if name)]
    signal, *by = torch.autograd.grad(total, wanted, retain_graph=True, materialize_grads=True)
    expected = (signal.T @ call.input, signal.sum(0))
    only = all(close(a, b) for a, b in zip(by, expected, strict=False))
    off = call.output < 0
    relu = bool(off.any()) and not bool(signal[off].any()) and bool(signal.any())
    return InputLayer(**vars(call), scale=scale, shift=shift, follows=follows, relu=relu, only=only)


def activation_between(below: LayerCall, above: LayerCall) -> str:
    """The activation (of ACTIVATIONS) through which a layer reads another's output, up to a reshape.

    Raises:
        ValueError: it reads it through none of these.
    """
    for name, activation in ACTIVATIONS.items():
        if close(above.input.flatten(1), activation(below.output).flatten(1)):
            return name
    raise ValueError(f"layer {above.name!r} does not read layer {below.name!r} through a ReLU, sigmoid or tanh")


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= SAME * b.norm())


def _noise(p: Tensor, rng: torch.Generator) -> Tensor:
    fan_in = max(1, p.numel() // max(1, len(p))) if p.dim() > 1 else 1
    noise: Tensor = PERTURBED / fan_in**0.5 * torch.randn(p.shape, generator=rng).to(p)
    return noise
