"""Whether and how a model can be attacked, tried once for each model: its parameters, its forward pass and its derivatives.

`check_parameters`, `check_forward` and `check_lookups` refuse a model by a ValueError that names the layer and the remedy.
`differentiation_of` finds the fastest way to differentiate its gradients that gives what plain autograd gives: in one pass
over all problems, by vmap, or one problem after the other, each tried on two problems of random examples.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.batch_limiter import exhausted
from fedgauge.attacks.engine.computation import containers, run, undisturbed
from fedgauge.attacks.engine.gradients.factored import formed
from fedgauge.attacks.engine.gradients.per_problem import local_training_changes
from fedgauge.attacks.engine.second_derivatives import twice_differentiable
from fedgauge.attacks.engine.value_reads import ValueReads
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.update import Batch, Params, Update

SAME = 1e-4  # relative difference between two passes up to which they are equal
OTHERWISE = "or use an attack that needs no derivative"
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


# ---------------------------------------------------------------------------------------------- parameters and forward pass


def check_forward(model: nn.Module, params: Params, x: Tensor) -> Tensor:
    """Run a model on a batch of examples x (B, ...); returns its logits.

    Raises:
        ValueError: it is lazy, fails, does not return a batch of logits, draws random numbers, or its logits are not finite. The
            message names the layer; what the model itself raised is the cause.
    """
    lazy = [
        name for name, m in model.named_modules() if any(map(is_lazy, (*m._parameters.values(), *m._buffers.values())))
    ]
    if lazy:
        kind = type(model.get_submodule(lazy[0])).__name__
        raise ValueError(
            f"layer {lazy[0]!r} ({kind}) has no weights before its first batch: give it its number of inputs, "
            "or run the model once on a batch before it is returned"
        )
    with _LayerCalls(model) as calls:
        try:
            logits = _passed(model, params, x)
        except Exception as error:  # a user's model may raise anything
            raise ValueError(
                f"the model fails on a batch of shape {tuple(x.shape)}: {(calls.running or ['its forward fails'])[-1]} "
                f"({_line(error)}); it is called with the normalised examples and nothing else"
            ) from error
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"the model returns {_form(logits)}, expected the logits (B, classes) alone: wrap it in a module that returns them"
        )
    if logits.dim() < 2 or len(logits) != len(x):
        raise ValueError(
            f"the model returns shape {tuple(logits.shape)} for a batch of {len(x)}, expected (B, classes): one row an example"
        )
    if not logits.isfinite().all():
        name, kind = next(
            (name, type(m).__name__) for name, m, _, outs in calls.ended if not all(t.isfinite().all() for t in outs)
        )
        raise ValueError(
            f"the model's output is not finite, first in layer {name!r} ({kind}): its weights have diverged, its initial ones "
            "are too large, or mean and std of the data are wrong"
        )
    for (name, module, _, outs), (*_, again) in zip(calls.ended, _calls(model, params, x, seed=1), strict=False):
        if not all(map(_equal, outs, again)):
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) draws random numbers, and the attacker's differentiable update lacks "
                "its draws: set its probability to 0, or put it in eval mode"
            )
    return logits


def check_parameters(model: nn.Module, params: Params) -> None:
    """Refuse what has no real gradient, or takes no weights: ValueError names it and the remedy."""
    if scripted := [name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]:
        raise ValueError(
            f"layer {scripted[0]!r} is TorchScript, into which an attack cannot hand weights safely: build the network from the "
            "modules that were scripted or traced"
        )
    if not params:
        raise ValueError("the model has no parameters, so its update says nothing: name a network that is trained")
    for name, p in params.items():
        if p.is_complex():
            raise ValueError(
                f"parameter {name!r} is complex, and updates are compared as real numbers: keep its real and imaginary "
                "parts in a real parameter (torch.view_as_real), and join them in the forward pass"
            )
        if not p.is_floating_point():
            raise ValueError(f"parameter {name!r} holds whole numbers, which are not trained: make it a buffer")


def check_lookups(model: nn.Module, params: Params, x: Tensor) -> None:
    """Refuse a model that computes with a parameter other than the one under its name, kept in a list or from a pass before.

    Raises:
        ValueError: the gradient of such a parameter is missed wherever weights are handed in; the message names it.
    """
    leaves = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
    before = {id(t) for t in (*model.parameters(), *model.buffers(), *leaves.values())}
    own = {k: p for k, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), undisturbed(model, x.device):
        out = run(model, leaves, x)
        for name, module in model.named_modules():
            for attribute, held in containers(module).items():
                kept = [t for t in tree_leaves(held) if isinstance(t, Tensor) and id(t) not in before]
                if any(t.requires_grad for t in kept):
                    raise ValueError(
                        f"layer {name!r} ({type(module).__name__}) keeps what it made of its parameters from one pass to the next "
                        f"({attribute}), so their gradient is missed: let it compute this anew in every pass; some layers do so in "
                        "train mode"
                    )
    if not out.requires_grad:
        return
    # none of them took part, unless the forward pass found it elsewhere
    slopes = torch.autograd.grad(out.square().sum(), list(own.values()), allow_unused=True)
    if found := [name for name, slope in zip(own, slopes, strict=True) if slope is not None]:
        raise ValueError(
            f"the forward pass takes parameter {found[0]!r} from a list, dict or other object, where weights that are handed "
            "in do not reach it, so its gradient is missed: let forward read it by its module's attribute (self.layer.weight)"
        )


def layer_without(model: nn.Module, params: Params, x: Tensor, error: Exception) -> str:
    """In words, which layer has no second derivative; the innermost that fails by itself."""
    for name, module, inputs, _ in _calls(model, params, x):
        floats = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.is_floating_point()]
        if floats and not _twice(module, inputs):
            return (
                f"layer {name!r} ({type(module).__name__}) cannot be differentiated twice ({_line(error)}): replace it by one "
                f"that can, {OTHERWISE}"
            )
    return not_differentiable(error)


def not_differentiable(error: Exception) -> str:
    """In words, that a model refused to be differentiated, without a layer to blame."""
    return f"the model cannot be differentiated twice ({_line(error)}): replace the layer that uses this function, {OTHERWISE}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _form(value: object) -> str:
    if isinstance(value, dict):
        return f"a {type(value).__name__} with {', '.join(map(str, value)) or 'nothing'}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple) else "")


def _passed(model: nn.Module, params: Params, x: Tensor, seed: int = 0) -> Any:
    with torch.no_grad(), undisturbed(model, x.device, seed):
        return run(model, params, x)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=SAME, atol=SAME * float(a.abs().max()), equal_nan=True)


class _LayerCalls:
    """A context that keeps what every module takes and gives, children before parents, and which one is at work."""

    def __init__(self, model: nn.Module) -> None:
        self.running: list[str] = []
        self.ended: list[tuple[str, nn.Module, Any, list[Tensor]]] = []
        self._model = model

    def __enter__(self) -> "_LayerCalls":
        self._hooks: list[RemovableHandle] = []
        for name, module in self._model.named_modules():
            hooks = (
                module.register_forward_pre_hook(partial(self._enter, name)),
                module.register_forward_hook(partial(self._leave, name)),
            )
            self._hooks += hooks
        return self

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        form = " x ".join(map(str, given[0].shape)) if given and isinstance(given[0], Tensor) else "its arguments"
        self.running.append(
            f"layer {name!r} ({type(module).__name__}) cannot take {form}" if name else "its forward fails"
        )

    def _leave(self, name: str, module: nn.Module, given: Any, out: Any) -> None:
        self.running.pop()
        floats = [t.clone() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        self.ended.append((name, module, given, floats))


def _calls(
    model: nn.Module, params: Params, x: Tensor, seed: int = 0
) -> list[tuple[str, nn.Module, Any, list[Tensor]]]:
    with _LayerCalls(model) as calls:
        _passed(model, params, x, seed)
    return calls.ended


def _twice(module: nn.Module, inputs: Any) -> bool:
    """Whether a module by itself can be differentiated twice."""
    leaves: list[Tensor] = []

    def leaf(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        leaves.append(t.detach().requires_grad_())
        return leaves[-1].clone()

    try:
        with torch.enable_grad():
            moved = tree_map(leaf, inputs)
            own = {k: p.to(leaves[0].dtype) for k, p in module.named_parameters()}  # the trial may be in float64
            outs = tree_leaves(functional_call(module, own, moved))
            total = torch.stack([o.tanh().sum() for o in outs if isinstance(o, Tensor) and o.requires_grad]).sum()
            slopes = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
            square = torch.stack([s.square().sum() for s in slopes]).sum()
            if square.requires_grad:
                torch.autograd.grad(square, leaves, materialize_grads=True)
    except RuntimeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------- differentiation


@dataclass(frozen=True)
class Differentiation:
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


_chosen: WeakKeyDictionary[nn.Module, dict[Any, Differentiation]] = WeakKeyDictionary()


def differentiation_of(known: Knowledge, params: Params, one_pass: bool) -> Differentiation:
    """How a model under an attacker's knowledge is differentiated.

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
    check_forward(known.model, params, x[0])
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


def _choose(trial: _Trial, params: Params, one_pass: bool) -> Differentiation:
    routes: dict[Route, Differentiate] = {"vmap": _by_vmap}
    if one_pass:
        routes = {"one pass": _in_one_pass, **routes}
    with _precise(trial, params) as (trial, params):
        expected, composed = _expected(trial, params)
        note = "" if _is_slope(trial, params, expected.slopes) else INCOMPLETE
        for decomposed in (True,) if composed else (False, True):
            for route, differentiate in routes.items():
                if route == "one pass" and _reads_values(Differentiation("loop", decomposed), trial, params):
                    continue
                if _agrees(Differentiation(route, decomposed), differentiate, trial, params, expected):
                    return Differentiation(route, decomposed, note)
    return Differentiation("loop", composed, note)


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


def _agrees(
    way: Differentiation, differentiate: Differentiate, trial: _Trial, params: Params, expected: _Derivatives
) -> bool:
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


def _reads_values(way: Differentiation, trial: _Trial, params: Params) -> bool:
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
