"""The analytic attack: reads the input of a fully connected network with biases off its gradient (Geiping et al., Prop. 3.1).

For one example dL/dA_i = (dL/db_i) x: any row with a nonzero bias gradient gives the input. If the first layers lack a bias,
the chain rule gives their error signals, from the first biased layer downwards. Masks and pruning hide entries of this matrix
of rank one: those left give each value that they connect with a bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge, Reconstruction, Wave
from fedgauge.attacks.engine.computation import InputLayer, LayerCall, activation_between, dense_input_layer
from fedgauge.attacks.exact.closed_form import ClosedForm, Reader, check_one_example, labels_of

PASSES = 20  # over the entries that a mask leaves


@dataclass(frozen=True)
class analytic(ClosedForm):
    """Exact inversion of a network that begins with fully connected layers, for updates of one example."""

    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        check_one_example(known)
        reads = dense_input_layer(known.model, known.shape, biased=False)
        layers: list[LayerCall] = [reads]  # up to the first one with a bias
        for above in reads.follows:
            if layers[-1].bias:
                break
            layers.append(above)
        if not layers[-1].bias:
            raise ValueError("no fully connected layer that reads the example has a bias")
        activations = [activation_between(below, above) for below, above in pairwise(layers)]
        return partial(_inverted, reads, layers, activations)


def _inverted(
    reads: InputLayer, layers: Sequence[LayerCall], activations: Sequence[str], alone: Wave, known: Knowledge
) -> Reconstruction:
    """Read the example, from the last of these layers to the first one, which reads it; activations: between them."""
    gradient = {k: -t.double() for k, t in alone.alone(0).items()}  # its scale cancels in every step below
    density = known.chain.update_distribution
    passes = PASSES if density is not None and not (density.noisy or density.signed) else 0
    y = labels_of(alone, known)  # the images do not depend on them
    above = layers[-1]
    signal = gradient[above.bias]  # dL/d(pre-activation)
    value, signal = _rank_one(gradient[above.weight], signal, passes)
    for below, activation in zip(layers[-2::-1], activations[::-1], strict=True):
        signal = (alone.params[above.weight].double().T @ signal) * slope_of(activation, value)
        value, signal = _rank_one(gradient[below.weight], signal, passes)
        above = below
    if not bool(signal.any()):
        reason = "the first biased layer's gradient is zero"
        return Reconstruction(None, y, float("nan"), 1, 0.0, "not_applicable", reason)
    x = known.examples(reads.example(value.view(1, *known.shape))).float()
    return Reconstruction(x, y, 0.0, 1, 0.0, "converged")


def _rank_one(weight: Tensor, signal: Tensor, passes: int) -> tuple[Tensor, Tensor]:
    """x and signal from signal x^T, by least squares over all rows: rounding averages out. Behind a mask zeros are unknown."""
    x, seen = (signal @ weight) / signal.square().sum(), (weight != 0).double()
    for _ in range(0 if bool(seen[signal != 0].all()) else passes):
        x = (signal @ weight) / (signal.square() @ seen).clamp_min(1e-300)  # a known signal gives values
        signal = (weight @ x) / (seen @ x.square()).clamp_min(1e-300)  # and these other rows' signals
    return x, signal


def slope_of(activation: str, value: Tensor) -> Tensor:
    """The activation's derivative, from its output value."""
    if activation == "relu":
        return (value > 1e-9).double()
    if activation == "sigmoid":
        return value * (1 - value)
    if activation == "tanh":
        return 1 - value.square()
    return torch.ones_like(value)
