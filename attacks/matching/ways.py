"""The way in which a model's gradients are differentiated: the fastest that gives what plain autograd gives.

In one pass over all problems, by vmap, or one problem after the other. Each is tried once for each model, on two problems
of random images, against the first and second derivatives of plain autograd.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.batch_limiter import exhausted
from fedgauge.attacks.engine.gradients.factored import formed
from fedgauge.attacks.engine.gradients.per_problem import local_training_changes
from fedgauge.attacks.engine.second_derivatives import twice_differentiable
from fedgauge.attacks.matching.model_check import (
    check_lookups,
    check_model,
    check_parameters,
    layer_without,
    not_differentiable,
)
from fedgauge.attacks.matching.value_reads import ValueReads
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.update import Batch, Params, Update

Route = Literal["one pass", "vmap", "loop"]
PROBLEMS = 2
# relative to a tensor's norm. A wrong derivative is wrong by as much as its size; layers that compute in float32 whatever
# they are given differ by about 1e-6, and deep networks in float32 by up to 1e-3
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}
DISPLACEMENTS = (
    1e-6,
    1e-7,
    1e-8,
)  # of pixels: a kink (relu, max pooling) may lie within one of them, hardly within all
NEGLIGIBLE = 1e-3  # of the largest tensor's norm: below, a tensor's rounding may be as large as itself
SLOPE = 1e-2  # relative difference between a derivative and the quotient of differences, which holds rounding too
INCOMPLETE = (
    "the descent is approximate: the model's second derivative lacks a part, as with detach(), a rounding, or a custom "
    "autograd function that gives a first derivative only"
)


@dataclass(frozen=True)
class Way:
    """How a model's gradients are computed and differentiated.

    Args:
        composed: layers without a second derivative are computed by `twice_differentiable`.
        note: what its user should know; usually nothing.
    """

    route: Route
    composed: bool = False
    note: str = ""

    def __call__(self) -> AbstractContextManager[None]:
        """The context in which the model runs."""
        return twice_differentiable() if self.composed else nullcontext()


class _Derivatives(NamedTuple):
    """First derivatives of each problem, (2, ...) by name, and those of a projection of them by the images."""

    updates: Update
    slopes: Tensor


Differentiate = Callable[["_Trial", Params], _Derivatives]


@dataclass(frozen=True, eq=False)
class _Trial:
    known: Knowledge
    local: local_sgd
    x: Tensor  # (2, examples, ...), normalised
    y: Tensor
    weights: Update  # of the projection

    def to(self, dtype: torch.dtype) -> "_Trial":
        return replace(self, x=self.x.to(dtype), weights={k: t.to(dtype) for k, t in self.weights.items()})

    def projected(self, update: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(t * self.weights[k]).sum() for k, t in update.items()]).sum()


_chosen: WeakKeyDictionary[nn.Module, dict[Any, Way]] = WeakKeyDictionary()


def way_of(known: Knowledge, params: Params, one_pass: bool) -> Way:
    """The way for a model under an attacker's knowledge.

    Args:
        one_pass: whether the chain allows one pass.

    Raises:
        ValueError: the model cannot be run or differentiated twice; the message names the layer and the remedy.
    """
    check_parameters(known.model, params)
    examples = known.chain.slice_of(known.batch_size)
    dtype, device = (getattr(next(iter(params.values())), name) for name in ("dtype", "device"))
    if dtype not in TOLERANCE:
        raise ValueError(
            f"the parameters are {str(dtype).removeprefix('torch.')}, too coarse for the differences that the descent follows: "
            "set double = true where the attack has it, or build the model in float32 (model.float())"
        )
    rng = generator("derivatives")
    pixels = torch.rand(PROBLEMS, examples, *known.shape, generator=rng)
    x = known.normalise(pixels).to(dtype=dtype, device=device)
    check_model(known, params, x[0])
    states = tuple(m.training for m in known.model.modules())
    steps = min(2, known.chain.local.steps)
    key = (one_pass, examples, steps, known.shape, known.classes, known.loss, dtype, device, states)
    found = _chosen.setdefault(known.model, {})
    if key not in found:
        y = (torch.arange(PROBLEMS * examples, device=device) % known.classes).view(PROBLEMS, examples)
        weights = {k: torch.randn(p.shape, generator=rng).to(dtype=dtype, device=device) for k, p in params.items()}
        local = local_sgd(known.chain.local.rate, steps)
        try:
            check_lookups(known.model, params, x[0])
            found[key] = _choose(_Trial(known, local, x, y, weights), params, one_pass)
        except Exception as error:  # a user's model may raise anything
            if isinstance(error, ValueError) or exhausted(error):
                raise
            raise ValueError(not_differentiable(error)) from error
    return found[key]


def _choose(trial: _Trial, params: Params, one_pass: bool) -> Way:
    routes: dict[Route, Differentiate] = {"vmap": _by_vmap}
    if one_pass:
        routes = {"one pass": _in_one_pass, **routes}
    with _precise(trial, params) as (trial, params):
        expected, composed = _expected(trial, params)
        note = "" if _is_slope(trial, params, expected.slopes) else INCOMPLETE
        for decomposed in (True,) if composed else (False, True):
            for route, differentiate in routes.items():
                if route == "one pass" and _reads_values(Way("loop", decomposed), trial, params):
                    continue
                if _agrees(Way(route, decomposed), differentiate, trial, params, expected):
                    return Way(route, decomposed, note)
    return Way("loop", composed, note)


def _is_slope(trial: _Trial, params: Params, slopes: Tensor) -> bool:
    """Whether the second derivative is how the first one changes; True where rounding would hide it."""
    if trial.x.dtype != torch.float64:
        return True
    direction = torch.randn(trial.x.shape, generator=generator("direction")).to(trial.x)
    expected = (slopes * direction).sum()

    def at(step: float) -> Tensor:
        with torch.no_grad():
            updates = _each_update(trial, params, trial.x + step * direction)
            return trial.projected({k: torch.stack(t) for k, t in updates.items()})

    size = torch.maximum(expected.abs(), NEGLIGIBLE * slopes.norm() * direction.norm())
    gaps = ((at(step) - at(-step)) / (2 * step) - expected for step in DISPLACEMENTS)
    return any(bool(gap.abs() <= SLOPE * size) for gap in gaps)


def _expected(trial: _Trial, params: Params) -> tuple[_Derivatives, bool]:
    """What plain autograd gives, and whether it needs layers to be composed.

    Raises:
        ValueError: there is no second derivative.
    """
    try:
        return _by_autograd(trial, params), False
    except RuntimeError as error:
        if exhausted(error):
            raise
    with twice_differentiable():
        try:
            found = _by_autograd(trial, params)
        except RuntimeError as error:
            if exhausted(error):
                raise
            raise ValueError(layer_without(trial.known.model, params, trial.x[0], error)) from error
    with torch.no_grad():
        original = {k: torch.stack(t) for k, t in _each_update(trial, params, trial.x).items()}
    if not _close(found.updates, original, TOLERANCE[trial.x.dtype]):
        raise ValueError(
            "the model's hard sigmoids, attention or recurrent layers have no second derivative in torch, and replacing them "
            "by their formulas changes its gradient: use other layers, or an attack that needs no derivative"
        )
    return found, True


def _agrees(way: Way, differentiate: Differentiate, trial: _Trial, params: Params, expected: _Derivatives) -> bool:
    try:
        with way():
            found = differentiate(trial, params)
    except Exception as error:  # a user's model may raise anything under vmap, and the next way may do
        if exhausted(error):
            raise
        return False
    tolerance = TOLERANCE[trial.x.dtype]
    slopes = ({"": found.slopes}, {"": expected.slopes})
    return _close(found.updates, expected.updates, tolerance) and _close(*slopes, tolerance)


def _reads_values(way: Way, trial: _Trial, params: Params) -> bool:
    """Whether training reads values of the batch, so that problems in one pass would share what follows from them."""
    with way(), ValueReads(trial.x, trial.y) as reads:
        _each_update(trial, params, trial.x[:1])
    return reads.found


def _close(found: Update, expected: Update, tolerance: float) -> bool:
    floor = NEGLIGIBLE * max(float(t.norm()) for t in expected.values())
    apart = {k: float((found[k] - t).norm()) for k, t in expected.items()}
    return all(gap <= tolerance * (float(expected[k].norm()) + floor) for k, gap in apart.items())


# ------------------------------------------------------------------------------------------------------------- the ways


def _each_update(trial: _Trial, params: Params, x: Tensor) -> dict[str, list[Tensor]]:
    client = trial.local(gradient(trial.known.model, trial.known.loss, plain=True))
    updates = [client(params, Batch(x[i].clone(), trial.y[i]), None) for i in range(len(x))]
    return {k: [u[k] for u in updates] for k in params}


def _by_autograd(trial: _Trial, params: Params) -> _Derivatives:
    x = trial.x.detach().requires_grad_()
    with torch.enable_grad():
        updates = {k: torch.stack(t) for k, t in _each_update(trial, params, x).items()}
        return _Derivatives(*_differentiated(trial, updates, x))


def _in_one_pass(trial: _Trial, params: Params) -> _Derivatives:
    x, known = trial.x.detach().requires_grad_(), trial.known
    with torch.enable_grad():
        changes = local_training_changes(known.model, params, x, trial.y, trial.local, False, known.loss)
        updates = {k: formed(t, params[k].shape) for k, t in changes.items()}
        return _Derivatives(*_differentiated(trial, updates, x))


def _differentiated(trial: _Trial, updates: Update, x: Tensor) -> tuple[Update, Tensor]:
    total = trial.projected(updates)
    slopes = (
        torch.zeros_like(x) if not total.requires_grad else torch.autograd.grad(total, x, materialize_grads=True)[0]
    )
    return {k: t.detach() for k, t in updates.items()}, slopes


def _by_vmap(trial: _Trial, params: Params) -> _Derivatives:
    client = trial.local(gradient(trial.known.model, trial.known.loss))

    def one(x: Tensor, y: Tensor) -> tuple[Tensor, Update]:
        update = client(params, Batch(x, y), None)
        return trial.projected(update), update

    with _own_rules():
        slopes, updates = vmap(grad(one, has_aux=True))(trial.x, trial.y)
    return _Derivatives(updates, slopes)


@contextmanager
def _own_rules() -> Iterator[None]:
    """vmap by rules alone: without one, it would loop over the problems, slower than the loop itself."""
    switch: Callable[[bool], None] = getattr(torch._C._functorch, "_set_vmap_fallback_enabled")  # noqa: B009  # has no stub
    switch(False)
    try:
        yield
    finally:
        switch(True)


# ------------------------------------------------------------------------------------------------------------ precision


@contextmanager
def _precise(trial: _Trial, params: Params) -> Iterator[tuple[_Trial, Params]]:
    """Trial and params in float64 where the model computes in it, else as they are; its buffers stay as they were."""
    double = {k: p.double() for k, p in params.items()}
    with _buffers(trial.known.model, torch.float64):
        exact = trial.to(torch.float64)
        if _runs(exact, double):
            yield exact, double
            return
    with _buffers(trial.known.model, None):
        yield trial, params


def _runs(trial: _Trial, params: Params) -> bool:
    try:
        with torch.no_grad():
            found = _each_update(trial, params, trial.x)
    except (RuntimeError, TypeError, ValueError) as error:
        if exhausted(error):
            raise
        return False
    return all(t.dtype == torch.float64 for parts in found.values() for t in parts)


@contextmanager
def _buffers(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """A context in which the model has copies of its buffers, those of floating point in another dtype."""
    held = [(m, dict(m._buffers)) for m in model.modules()]
    for module, buffers in held:
        copies = {k: b.clone() for k, b in buffers.items() if b is not None}
        module._buffers.update({k: b.to(dtype) if b.is_floating_point() else b for k, b in copies.items()})
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.update(buffers)
