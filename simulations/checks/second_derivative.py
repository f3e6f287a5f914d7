"""The second derivative of a network, which every matching attack needs, against a finite difference.

It is compared at a generic point, the first training images mixed with noise, and in one random direction: on the flat areas of
a real image the entries of a max-pool are tied, and there the gradient has a kink, where no finite difference agrees with any
derivative. Elsewhere a step may still cross the kinks of about step * units rectifiers, or be long beside the scale on which the
gradient changes (BatchNorm over few examples), so that several steps are tried, and one that agrees decides. A derivative counts
as false where two steps agree with each other and none with it. Rounding is off by 1e-16 / step times the gradient, a central
difference by step^2, both far below the tolerance at some step; a term that is missing in one of many parameters is above it, as
each weighs about the same.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from fedgauge.attacks.engine.second_derivatives import twice_differentiable
from fedgauge.client.data.images import batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient
from fedgauge.client.update import Batch
from fedgauge.simulations.checks.check_result import CheckFailed

STEPS = {
    torch.float64: (1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-11),
    torch.float32: (1e-2, 3e-3, 1e-3),
}  # pixels are in [0, 1]
RELATIVE = {torch.float64: 1e-3, torch.float32: 0.1}
SMALLEST = 1e-5  # of the largest gradient: some parameters' are zero except for rounding


def check_second_derivative(fed: Federation, again: Federation) -> str:
    """Compare the derivative of a client's gradient by the image with a finite difference.

    Args:
        again: a second build of the federation, whose model changes its precision.

    Raises:
        CheckFailed: they differ, or there is none.
    """
    with twice_differentiable():  # as attacks take the layers of which torch has no second derivative
        return _compared(fed, again)


def _compared(fed: Federation, again: Federation) -> str:
    try:
        point = _Point(fed, again.model.double(), torch.float64)
    except RuntimeError as error:
        if "ouble" not in str(error):
            raise
        point = _Point(fed, again.model.float(), torch.float32)  # it computes in single precision whatever it is given
    verdict = point.verdict(list(point.params))
    if verdict == "differs":
        raise CheckFailed(
            f"it differs from the change of the gradient of {point.one_of(list(point.params))!r}: does the model use an autograd "
            "Function that has only a first derivative, or detach something?"
        )
    found = (
        "equal to the finite difference"
        if verdict == "agrees"
        else "not comparable: the gradient changes within any step"
    )
    return found + (f"; no gradient reaches {', '.join(point.idle[:3])}" if point.idle else "")


class _Point:
    """Examples, a direction from them, and one number of each parameter's gradient there, all of about the same size."""

    def __init__(self, fed: Federation, model: nn.Module, dtype: torch.dtype) -> None:
        data, loss = fed.shards.dataset, fed.loss
        if isinstance(loss, nn.Module):
            loss = copy.deepcopy(loss).to(dtype)
        self.dtype, self.params = dtype, {k: p.detach().to(dtype) for k, p in model.named_parameters()}
        self._compute = gradient(model, loss, normalise=data.normalise)
        first, rng = batch_of(data.x, data.y, torch.arange(2 if fed.shards.batch_size > 1 else 1)), generator("doctor")
        if isinstance(model, LanguageModel):
            self._x = model.embed(first.x).detach()
        else:
            noise = torch.rand(first.x.shape, generator=rng, dtype=dtype)
            self._x = (first.x.to(dtype) + noise) / 2
        self._y, self._direction = first.y, torch.randn(self._x.shape, generator=rng, dtype=dtype)
        found = {k: t.detach() for k, t in self._compute(self.params, Batch(self._x, self._y), None).items()}
        self.idle = [name for name, t in found.items() if not t.any()]
        largest = max(float(t.norm()) for t in found.values())
        self._weights = {
            k: torch.randn(t.shape, generator=rng, dtype=dtype) / max(float(t.norm()), SMALLEST * largest)
            for k, t in found.items()
        }

    def verdict(self, names: Sequence[str]) -> Literal["agrees", "differs", "rough"]:
        """Whether the change of these parameters' gradients along the direction is the derived one, or another, or neither."""
        x = self._x.clone().requires_grad_()
        total = self._projected(x, names)
        if not total.requires_grad:
            raise CheckFailed("the gradient does not depend on the image: is something detached in the model?")
        (slope,) = torch.autograd.grad(total, x)
        if not slope.isfinite().all():
            raise CheckFailed("it is not finite: a square root, norm or division at zero in the model or loss?")
        expected, changes = float((slope * self._direction).sum()), []
        zero = 100 * torch.finfo(self.dtype).eps * len(names) / max(STEPS[self.dtype])  # but for rounding
        for step in STEPS[self.dtype]:
            ends = [self._projected(self._x + sign * step * self._direction, names).detach() for sign in (1, -1)]
            changes.append(float(ends[0] - ends[1]) / (2 * step))
            if self._same(changes[-1], expected, zero):
                return "agrees"
        return "differs" if any(self._same(a, b, zero) for a, b in pairwise(changes)) else "rough"

    def _same(self, a: float, b: float, zero: float) -> bool:
        return abs(a - b) <= RELATIVE[self.dtype] * max(abs(a), abs(b)) + zero

    def one_of(self, names: Sequence[str]) -> str:
        """One of the parameters, which differ together, that differs: always in the half that does."""
        while len(names) > 1:
            half = names[: len(names) // 2]
            names = half if self.verdict(half) == "differs" else names[len(names) // 2 :]
        return names[0]

    def _projected(self, x: Tensor, names: Sequence[str]) -> Tensor:
        found = self._compute(self.params, Batch(x, self._y), None)
        return torch.stack([(found[k] * self._weights[k]).sum() for k in names]).sum()
