"""The analytic attack: reads the input of a fully connected network with biases off its gradient (Geiping et al., Prop. 3.1).

For one example dL/dA_i = (dL/db_i) x: any row with a nonzero bias gradient gives the input. If the first layers lack a bias,
the stack is inverted from its first biased layer downwards: the chain rule gives the error signal of the layer below, and
that layer's weight gradient, of rank one, gives its input.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedgauge.attacks import labels as labelling
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable
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
        if known.batch_size != 1:
            return not_applicable(
                wave, f"the attack needs one example in each update, and this one sums {known.batch_size}"
            )
        if known.chain.local.adaptive:
            return not_applicable(
                wave, f"the attack needs a gradient's magnitudes, and the clients take {known.chain.local.words}"
            )
        try:
            stack = _first_layers(known.model)
            y = self._labels(wave, known)
        except ValueError as error:
            return not_applicable(wave, str(error))
        found = [self._invert(stack, wave.alone(k), wave.params, known) for k in range(len(wave))]
        seconds = (time.perf_counter() - started) / len(wave)
        return [self._answer(x, None if y is None else y[k], seconds) for k, x in enumerate(found)]

    def _labels(self, wave: Wave, known: Knowledge) -> Tensor | None:
        """Labels (K, 1) if they can be restored; the images depend neither on them nor on the loss."""
        if known.labels is None and not is_cross_entropy(known.loss):
            return None
        return labelling.restore(wave, known)

    def _answer(self, x: Tensor | None, y: Tensor | None, seconds: float) -> Reconstruction:
        if x is None:
            reason = "the first biased layer's gradient is zero"
            return Reconstruction(None, y, float("nan"), 1, seconds, "not_applicable", reason)
        if not torch.isfinite(x).all():
            return Reconstruction(None, y, float("nan"), 1, seconds, "diverged", "the image is not finite")
        return Reconstruction(x, y, 0.0, 1, seconds, "converged")

    def _invert(self, stack: "_Stack", update: Update, params: Params, known: Knowledge) -> Tensor | None:
        gradient = {k: -t.double() for k, t in update.items()}  # its scale cancels in every step below
        top = stack.linears[-1]
        signal = gradient[f"{top}.bias"]  # dL/d(pre-activation)
        if not signal.abs().max() > 0:
            return None
        value = _rank_one_input(gradient[f"{top}.weight"], signal)
        for below, activation, above in reversed(stack.steps()):
            slope = _slope(activation, value)
            signal = (params[f"{above}.weight"].double().T @ signal) * slope
            if not signal.abs().max() > 0:
                return None
            value = _rank_one_input(gradient[f"{below}.weight"], signal)
        return known.examples(value.view(1, *known.shape)).float()


@dataclass(frozen=True)
class _Stack:
    """Names of the fully connected layers up to the first with a bias, and the activations between them."""

    linears: tuple[str, ...]
    activations: tuple[nn.Module, ...]

    def steps(self) -> list[tuple[str, nn.Module, str]]:
        """(layer below, activation between, layer above), from the bottom up."""
        return list(zip(self.linears[:-1], self.activations, self.linears[1:], strict=True))


def _first_layers(model: nn.Module) -> _Stack:
    linears: list[str] = []
    activations: list[nn.Module] = []
    leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
    for name, module in leaves:
        if isinstance(module, nn.Linear):
            if len(activations) < len(linears):
                activations.append(nn.Identity())
            linears.append(name)
            if module.bias is not None:
                return _Stack(tuple(linears), tuple(activations))
        elif len(activations) < len(linears) and isinstance(module, nn.ReLU | nn.Sigmoid | nn.Tanh):
            activations.append(module)
        elif not isinstance(module, nn.Flatten | nn.Identity):
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) comes before the first fully connected layer with a bias"
            )
    raise ValueError("the model has no fully connected layer with a bias")


def _rank_one_input(weight: Tensor, signal: Tensor) -> Tensor:
    """x from signal x^T, by least squares over all rows: rounding averages out."""
    return (signal @ weight) / signal.square().sum()


def _slope(activation: nn.Module, value: Tensor) -> Tensor:
    """The activation's derivative, from its output value."""
    if isinstance(activation, nn.ReLU):
        return (value > 1e-9).double()
    if isinstance(activation, nn.Sigmoid):
        return value * (1 - value)
    if isinstance(activation, nn.Tanh):
        return 1 - value.square()
    return torch.ones_like(value)
