"""Labels under any loss: the classifier's gradient gives the outputs of a single example, and the loss then its label.

For one example the weight gradient is g e^T and the bias gradient g = dL/dz: both give the features e, and so the outputs
z = W e + b. The label is the one whose derivative at z is g.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.computation import ACTIVATIONS, called, close
from fedgauge.client.labels import Binary
from fedgauge.client.models.losses import loss_of
from fedgauge.client.update import Params

OPTIMISED = "an attack that searches (inverting_gradients, dlg, tableak) optimises them together with the examples"
TRIED = 8  # public examples on which the network's last activation is recognised


class NotRestored(ValueError):
    """The labels cannot be restored, but a search may optimise them together with the examples."""


Outputs = Callable[[Tensor], Tensor]  # the classifier's outputs (N, D) -> the network's outputs


def outputs_of(known: Knowledge, params: Params, layer: str) -> Outputs:
    """The network's outputs as a function of its classifier's, in float64.

    Raises:
        NotRestored: they are no activation of them.
    """
    x = (
        torch.rand(TRIED, *known.shape, generator=torch.Generator().manual_seed(0))
        if known.auxiliary is None
        else known.auxiliary.x[:TRIED]
    )
    result, calls = called(known.model, params, known.normalise(x.to(next(iter(params.values())))))
    last = [call for call in calls if call.name == layer][-1]
    if last.output.shape[:1] == result.shape[:1] and last.output.numel() == result.numel():
        for activation in ACTIVATIONS.values():
            if close(activation(last.output).view_as(result), result):
                return partial(_outputs, activation, result.shape[1:])
    raise NotRestored(
        f"the network's outputs are no plain function of its last fully connected layer, {layer!r}; {OPTIMISED}"
    )


def _outputs(activation: Callable[[Tensor], Tensor], shape: torch.Size, z: Tensor) -> Tensor:
    return activation(z).view(len(z), *shape)


def derivative(known: Knowledge, outputs: Outputs, z: Tensor, y: Tensor) -> Tensor:
    """The derivative (1, D) of one example's loss by its classifier's outputs z, differentiable by y."""
    at, y = z.requires_grad_(), y.double() if y.is_floating_point() else y
    with torch.enable_grad():
        value = loss_of(known.loss, outputs(at), y, torch.zeros(1, *known.shape, dtype=z.dtype))
        (slope,) = torch.autograd.grad(value, at, create_graph=True)
    return slope


def solved(
    weight: Tensor, bias: Tensor | None, layer: Tensor, offset: Tensor, known: Knowledge, outputs: Outputs, exact: bool
) -> Tensor:
    """The label (1, ...) of a single example from its classifier's gradient in float64.

    Args:
        layer, offset: the classifier's weights and biases.
        exact: the gradient's length is known, not only its direction.

    Raises:
        NotRestored: no label explains it.
    """
    if bias is None or not bias.any():
        raise NotRestored(f"the classifier has no bias gradient, which gives the outputs of the example; {OPTIMISED}")
    features = bias @ weight / bias.square().sum()
    z = (layer @ features + offset)[None]

    found = known.label_kind.solved(partial(derivative, known, outputs, z), bias, exact, known.classes)
    if found is None:
        raise NotRestored(f"no label explains the classifier's gradient under this loss; {OPTIMISED}")
    return found


def like_two_logits(known: Knowledge, outputs: Outputs) -> bool:
    """Return whether one output stands for two logits (0, z): the loss is the binary cross-entropy, of sigmoid(z) - y."""
    if type(known.label_kind) is not Binary:
        return False
    for z in torch.linspace(-2, 2, 5, dtype=torch.float64):
        slopes = [derivative(known, outputs, z.view(1, 1).clone(), torch.tensor([y])) for y in (0, 1)]
        expected = [z.sigmoid(), z.sigmoid() - 1]
        if not all(bool((s - e).abs().max() < 1e-4) for s, e in zip(slopes, expected, strict=True)):
            return False
    return True
