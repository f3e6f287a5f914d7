"""The analytic attack: reads the input of a fully connected network with biases off its gradient (Geiping et al., Prop. 3.1).

For one example dL/dA_i = (dL/db_i) x: any row with a nonzero bias gradient gives the input. If the first layers lack a bias,
the stack is inverted from its first biased layer downwards: the chain rule gives the error signal of the layer below, and
that layer's weight gradient, of rank one, gives its input.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks import labels as labelling
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.engine.computation import ACTIVATIONS, InputLayer, LayerCall, close, dense_input_layer
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.update import Params, Update


@dataclass(frozen=True)
class analytic(Attack):
    """Exact inversion of a network that begins with fully connected layers, for updates of one example."""

    on_cpu = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        started = time.perf_counter()
        try:
            check_one_gradient(known)
            stack = _Stack.of(known)
            # the images depend neither on the labels nor on the loss
            y = labelling.restore(wave, known) if known.labels is not None or is_cross_entropy(known.loss) else None
        except ValueError as error:
            return not_applicable(wave, str(error))
        found = [self._invert(stack, wave.alone(k), wave.params, known) for k in range(len(wave))]
        seconds = (time.perf_counter() - started) / len(wave)
        return [self._answer(x, None if y is None else y[k], seconds) for k, x in enumerate(found)]

    def _answer(self, x: Tensor | None, y: Tensor | None, seconds: float) -> Reconstruction:
        if x is None:
            reason = "the first biased layer's gradient is zero"
            return Reconstruction(None, y, float("nan"), 1, seconds, "not_applicable", reason)
        if not torch.isfinite(x).all():
            return Reconstruction(None, y, float("nan"), 1, seconds, "diverged", "the image is not finite")
        return Reconstruction(x, y, 0.0, 1, seconds, "converged")

    def _invert(self, stack: "_Stack", update: Update, params: Params, known: Knowledge) -> Tensor | None:
        gradient = {k: -t.double() for k, t in update.items()}  # its scale cancels in every step below
        top = stack.layers[-1]
        signal = gradient[top.bias]  # dL/d(pre-activation)
        if not signal.abs().max() > 0:
            return None
        value = _rank_one_input(gradient[top.weight], signal)
        for below, activation, above in reversed(
            list(zip(stack.layers, stack.activations, stack.layers[1:], strict=False))
        ):
            slope = _slope(activation, value)
            signal = (params[above.weight].double().T @ signal) * slope
            if not signal.abs().max() > 0:
                return None
            value = _rank_one_input(gradient[below.weight], signal)
        return known.examples(stack.reads.example(value.view(1, *known.shape))).float()


@dataclass(frozen=True)
class _Stack:
    """The fully connected layers up to the first with a bias, and the names of the activations between them.

    Args:
        reads: the first of them, which reads the example.
    """

    reads: InputLayer
    layers: tuple[LayerCall, ...]
    activations: tuple[str, ...]

    @classmethod
    def of(cls, known: Knowledge) -> "_Stack":
        """The stack by the values that its layers hand on; ValueError if it cannot be inverted."""
        reads = dense_input_layer(known.model, known.shape, biased=False)
        layers, activations = [reads.call], []
        for above in reads.follows:
            below = layers[-1]
            if below.bias:
                break
            acts = [name for name, act in ACTIVATIONS.items() if above.dense and close(above.input, act(below.output))]
            if not acts:
                raise ValueError(
                    f"layer {above.name!r} does not read layer {below.name!r} through a ReLU, sigmoid or tanh, and "
                    f"layer {below.name!r} has no bias"
                )
            layers.append(above)
            activations.append(acts[0])
        if not layers[-1].bias:
            raise ValueError("no fully connected layer that follows from the example has a bias")
        return cls(reads, tuple(layers), tuple(activations))


def check_one_gradient(known: Knowledge) -> None:
    """ValueError unless an update is the gradient of one example, up to its scale."""
    if known.batch_size != 1:
        raise ValueError(f"the attack needs one example in each update, and this one sums {known.batch_size}")
    if known.chain.local.adaptive:
        raise ValueError(f"the attack needs a gradient's magnitudes, and the clients take {known.chain.local.words}")


def _rank_one_input(weight: Tensor, signal: Tensor) -> Tensor:
    """x from signal x^T, by least squares over all rows: rounding averages out."""
    return (signal @ weight) / signal.square().sum()


def _slope(activation: str, value: Tensor) -> Tensor:
    """The activation's derivative, from its output value."""
    if activation == "relu":
        return (value > 1e-9).double()
    if activation == "sigmoid":
        return value * (1 - value)
    if activation == "tanh":
        return 1 - value.square()
    return torch.ones_like(value)
