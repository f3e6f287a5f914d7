"""Labels under any loss: the classifier's gradient gives the outputs of a single example, and the loss then its label.

For one example the weight gradient is g e^T and the bias gradient g = dL/dz. Both give the features e, and so the outputs
z = W e + b. The label has the derivative g at z. For B examples, each of over B binary labels, the gradient is a sum of B
such products: its columns span the derivatives g_i, which few label combinations fit.
"""

from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement, takewhile
from math import comb

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.computation import ACTIVATIONS, LayerCall, close
from fedgauge.client.label_kinds import Binary
from fedgauge.client.models.losses import loss_of

OPTIMISED = "an attack that searches (inverting_gradients, dlg, tableak) optimises them together with the examples"
MOST_FINDINGS = 12  # all combinations of so many are tried
MOST_BATCHES = 20_000  # combinations of examples that are compared
VERIFIED = 10  # of them, the likeliest, whose features are solved for
ROUNDS = 30  # in which outputs and features are made consistent
PROVEN = 1e-4  # relative error from which on they explain the gradient


class NotRestored(ValueError):
    """The labels cannot be restored, but a search may optimise them together with the examples."""

    def __str__(self) -> str:
        return f"{super().__str__()}; {OPTIMISED}"


Outputs = Callable[[Tensor], Tensor]  # the classifier's outputs (N, D) -> the network's outputs


def outputs_of(last: LayerCall, result: Tensor) -> Outputs:
    """A network's outputs as a function of its classifier's, in float64, from one call and its result.

    Raises:
        NotRestored: they are no activation of them.
    """
    z, result = last.output.detach(), result.detach()
    if z.shape[:1] == result.shape[:1] and z.numel() == result.numel():
        scaled = partial(torch.mul, other=float((z.flatten() @ result.flatten()) / z.square().sum()))
        shares = partial(torch.softmax, dim=-1), partial(torch.log_softmax, dim=-1)
        tried: list[Callable[[Tensor], Tensor]] = [*ACTIVATIONS.values(), *shares, scaled]
        for activation in tried:
            if close(activation(z).view_as(result), result):
                return lambda z: activation(z).view(len(z), *result.shape[1:])
    raise NotRestored(f"the network's outputs are no plain function of its last fully connected layer, {last.name!r}")


def derivative(known: Knowledge, outputs: Outputs, z: Tensor, y: Tensor) -> Tensor:
    """The derivatives (N, D) of examples' losses by their classifier's outputs z, differentiable by y; the loss is their mean."""
    at, x = z.requires_grad_(), torch.zeros(1, *known.shape).expand(len(z), *known.shape)
    with torch.enable_grad():
        try:
            value = loss_of(known.loss, outputs(at), y.double() if y.is_floating_point() else y, x.double())
        except RuntimeError:  # a user's loss may insist on floats
            value = loss_of(known.loss, outputs(at).float(), y.float() if y.is_floating_point() else y, x)
        (slope,) = torch.autograd.grad(value, at, create_graph=True)
    return slope * len(z)


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
        raise NotRestored("the classifier has no bias gradient, which gives the outputs of the example")
    features = bias @ weight / bias.square().sum()
    z = (layer @ features + offset)[None]

    found = known.label_kind.solved(partial(derivative, known, outputs, z), bias, exact, known.classes)
    if found is None:
        raise NotRestored("no label explains the classifier's gradient under this loss")
    return found


def findings_of_batch(
    gradient: Tensor, layer: Tensor, offset: Tensor, known: Knowledge, outputs: Outputs, public: Tensor
) -> Tensor:
    """The findings (B, K) of several examples, fewer than findings, from their classifier's gradient in float64.

    The likeliest by the span of the gradient and its sum; of these, those that features explain exactly.

    Args:
        gradient: (K, D + 1) by weights and bias, summed over the examples.
        public: the classifier's outputs (N, K) for other examples.

    Raises:
        NotRestored: there are too few findings, or too many.
    """
    size, width = known.batch_size, len(gradient)
    if not size < width <= MOST_FINDINGS:
        raise NotRestored(f"of multi-label targets more labels than examples are needed, at most {MOST_FINDINGS}")
    every = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * width)
    if bool((known.label_kind.public.sum(1) == 1).all()):
        every = torch.eye(width, dtype=torch.float64)
    pairs = public.repeat(len(every), 1), every.repeat_interleave(len(public), 0)
    slopes = derivative(known, outputs, *pairs).detach().view(len(every), len(public), width)
    usual, apart = slopes.mean(1), (slopes - slopes.mean(1, keepdim=True)).flatten(0, 1)
    spread = apart.T @ apart / len(apart)
    spread += spread.trace() * PROVEN**2 * torch.eye(width)
    outside = torch.linalg.svd(gradient).U[:, size:]  # no derivative of an example has a part there
    unlikely = _distance(usual @ outside, outside.T @ spread @ outside)
    most = sum(1 for _ in takewhile(lambda m: comb(m + size - 1, size) <= MOST_BATCHES, range(1, len(every) + 1)))
    few = unlikely.argsort()[:most]
    chosen = few[torch.tensor(list(combinations_with_replacement(range(len(few)), size)))]
    sums = usual[chosen].sum(1) - gradient[:, -1]
    order = (_distance(sums, size * spread) + unlikely[chosen].sum(1)).argsort()[:VERIFIED]
    for y, slope in zip(every[chosen[order]], usual[chosen[order]], strict=True):
        for _ in range(ROUNDS):
            features = torch.linalg.lstsq(slope.T, gradient).solution
            slope = derivative(known, outputs, features[:, :-1] @ layer.T + offset, y).detach()
        off = (slope.T @ features - gradient).norm() / gradient.norm()
        if float(off) < PROVEN and float((features[:, -1] - 1).abs().max()) < PROVEN:
            found: Tensor = y
            return found.float()
    return every[chosen[order[0]]].float()


def _distance(off: Tensor, spread: Tensor) -> Tensor:
    """Squared lengths (N,) of vectors (N, D) in units of their covariance (D, D)."""
    each: Tensor = off @ torch.linalg.inv(spread) * off
    return each.sum(1)


def like_two_logits(known: Knowledge, outputs: Outputs) -> bool:
    """Return whether one output is a pair of logits (0, z): the loss is the binary cross-entropy, of sigmoid(z) - y."""
    if type(known.label_kind) is not Binary:
        return False
    z, y = torch.linspace(-2, 2, 10, dtype=torch.float64), torch.arange(10) % 2
    return bool((derivative(known, outputs, z[:, None].clone(), y)[:, 0] - (z.sigmoid() - y)).abs().max() < 1e-4)
