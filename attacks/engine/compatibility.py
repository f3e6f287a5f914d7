"""Checks of a model before an attack: its parameters, its forward pass and its derivatives.

`parameter_problem`, `forward_problem` and `lookup_problem` return a model's fault, with the layer and the remedy.
`differentiation_of` chooses the fastest route that agrees with plain autograd on two problems of random examples: one pass
over all problems, vmap, or a loop over problems.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.batch_limiter import raise_if_exhausted
from fedgauge.attacks.engine.computation import containers, error_line, run, undisturbed
from fedgauge.attacks.engine.gradients.factored import formed
from fedgauge.attacks.engine.gradients.per_problem import local_training_changes
from fedgauge.attacks.problem import Problem, Unattackable, refuse
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.losses import loss_of
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Params, Update

SAME = 1e-4  # relative difference between two passes up to which they are equal
Route = Literal["one pass", "vmap", "loop"]
PROBLEMS = 2
# relative to a tensor's norm. The error of a wrong derivative is as large as the derivative; layers that always compute in
# float32 differ by about 1e-6, and deep networks in float32 by up to 1e-3
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}
DISPLACEMENTS = (1e-6, 1e-7, 1e-8)  # of pixels: one of them may cross a kink (relu, max pooling), hardly all
NEGLIGIBLE = 1e-3  # of the largest tensor's norm: a smaller tensor may consist of rounding errors only
SLOPE = 1e-2  # relative difference between a derivative and the quotient of differences, which includes rounding
ROUNDING = 2e-15  # relative error of a deep network's gradient in float64, some layers' rounding
READING = (".item()", "control flow", "data pointer", "aten::equal", "dynamic shape")  # in vmap's errors on value reads
INCOMPLETE = (
    "the descent is approximate: the model's second derivative lacks a part, as with detach(), a rounding, or a custom "
    "autograd function that gives a first derivative only"
)


# ---------------------------------------------------------------------------------------------- parameters and forward pass


def forward_problem(model: nn.Module, params: Params, x: Tensor, outputs: tuple[int, ...] = ()) -> Problem | None:
    """Run a model on a batch of examples x (B, ...) and return its problem, if any.

    Args:
        outputs: the shape that its logits must have; empty: any number of classes.
    """
    for name, module in model.named_modules():
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            why = "has no weights before its first batch"
            return Problem("lazy", _layer(name, module), why, "give it its number of inputs")
    with _layer_calls(model) as (running, ended):
        try:
            logits = _passed(model, params, x)
        except Exception as error:  # a user's model may raise anything
            if len(inputs := _inputs(model)) > 1:
                why = f"takes several inputs ({', '.join(inputs)}), and an example is one array"
                remedy = "put them side by side in one vector, and wrap the model in one that takes it apart"
                return Problem("several inputs", "the model", why, remedy)
            why = f"cannot take a batch of {' x '.join(map(str, x.shape))} ({error_line(error)})"
            return Problem("forward", running[-1] if running else "the model", why, "build it for such examples")
    if not isinstance(logits, Tensor):
        held = f" with {', '.join(map(str, logits))}" if isinstance(logits, dict) else ""
        why = f"returns a {type(logits).__name__}{held}, expected only the logits (B, classes)"
        return Problem("no logits", "the model", why, "wrap it in a module that returns them")
    shape = tuple(logits.shape)
    if not shape or len(logits) != len(x) or (outputs and shape != outputs):
        why = f"returns logits of shape {shape} for a batch of {len(x)}, expected {outputs or '(B, classes)'}"
        return Problem("logits", "the model", why, "its factory is offered `shape` and `classes`")
    if not logits.isfinite().all():
        layer = next(name for name, outs in ended if not all(t.isfinite().all() for t in outs))
        return Problem("not finite", layer, "gives numbers that are not finite", "smaller weights, or scaled data")
    with _layer_calls(model) as (_, again):
        _passed(model, params, x, seed=1)
    for (layer, outs), (_, others) in zip(ended, again, strict=False):
        if not all(map(_equal, outs, others)):  # functional dropout before a layer shows in that layer
            why = "draws random numbers or receives them, and the attacker's differentiable update lacks its draws"
            return Problem("draws", layer, why, "set the probability to 0, use eval mode, or let it return the mean")
    return None


def _inputs(model: nn.Module) -> list[str]:
    free = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(model.forward).parameters.values()
    return [p.name for p in given if p.kind in free and p.default is p.empty]


def parameter_problem(model: nn.Module, params: Params) -> Problem | None:
    """Return the problem of parameters without a real gradient, or of a model that accepts no weights."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in dict(module.named_children()):
            why = "is TorchScript or compiled by torch.compile, and an attack cannot safely hand weights to it"
            return Problem("scripted", _layer(name, module), why, "build it from the modules that were compiled")
    if not params:
        return Problem("no parameters", "the model", "has no parameters, so there is no update to attack")
    for name, p in params.items():
        if p.is_complex():
            return Problem("complex", f"parameter {name!r}", "is complex", "keep it as a real one (torch.view_as_real)")
        if not p.is_floating_point():
            return Problem("whole numbers", f"parameter {name!r}", "holds whole numbers", "make it a buffer")
    return None


def lookup_problem(model: nn.Module, params: Params, x: Tensor) -> Problem | None:
    """Return the problem of a parameter that the model does not read under its name, so that its gradient is missed."""
    leaves = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
    before = {id(t) for t in (*model.parameters(), *model.buffers(), *leaves.values())}
    own = {k: p for k, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), undisturbed(model, x.device):
        out = run(model, leaves, x)
        for name, module in model.named_modules():
            kept = [t for t in tree_leaves(containers(module)) if isinstance(t, Tensor) and id(t) not in before]
            if any(t.requires_grad for t in kept):
                why = "caches values computed from its parameters between passes, so their gradient is missed"
                return Problem("kept", _layer(name, module), why, "compute it in every pass, or use train mode")
    if not out.requires_grad:
        return None
    with _layer_calls(model) as (begun, ended):
        # a gradient of the model's own parameter means that the forward pass read it instead of the one given
        slopes = torch.autograd.grad(out.square().sum(), [*own.values(), *leaves.values()], allow_unused=True)
    if again := [*begun, *(name for name, _ in ended)]:
        why = "is computed again in the backward pass, which reads the module's own weights (gradient checkpointing)"
        return Problem("checkpoint", again[0], why, "turn checkpointing off: it changes no gradient")
    if found := [name for name, slope in zip(own, slopes, strict=False) if slope is not None]:
        why = "is read from a list, dict or other object, where weights that are handed in do not reach it"
        return Problem("lookup", f"parameter {found[0]!r}", why, "read it by its module's attribute")
    return None


def _layer(name: str, module: nn.Module) -> str:
    return f"layer {name!r} ({type(module).__name__})" if name else "the model itself"


def _passed(model: nn.Module, params: Params, x: Tensor, seed: int = 0) -> Any:
    with torch.no_grad(), undisturbed(model, x.device, seed):
        return run(model, params, x)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=SAME, atol=SAME * float(a.abs().max()), equal_nan=True)


@contextmanager
def _layer_calls(model: nn.Module) -> Iterator[tuple[list[str], list[tuple[str, list[Tensor]]]]]:
    """A context that lists the running calls of a model's layers, and the finished ones with their outputs."""
    running: list[str] = []
    ended: list[tuple[str, list[Tensor]]] = []
    names = {m: _layer(name, m) for name, m in model.named_modules()}

    def enter(module: nn.Module, given: Any) -> None:
        if module in names:
            running.append(names[module])

    def leave(module: nn.Module, given: Any, out: Any) -> None:
        if module in names:
            floats = [t.clone() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
            ended.append((running.pop(), floats))

    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave):
        yield running, ended


# ------------------------------------------------------------------------------------------------------- differentiation


@dataclass(frozen=True)
class Differentiation:
    """The route by which a model's gradients are computed and differentiated.

    Args:
        composed: layers without a second derivative are computed by `twice_differentiable`.
        note: a warning for the user, usually empty.
    """

    route: Route
    composed: bool = False
    note: str = ""

    def __call__(self) -> AbstractContextManager[None]:
        return twice_differentiable() if self.composed else nullcontext()


class _Derivatives(NamedTuple):
    """First derivatives of each problem, (2, ...) by name, and those of a projection of them by the images."""

    updates: Update
    slopes: Tensor


@dataclass(frozen=True, eq=False)
class _Trial:
    """Two problems: examples x (2, B, ...), normalised, with labels y, and the weights of the projection."""

    known: Knowledge
    params: Params
    local: local_sgd
    x: Tensor
    y: Tensor
    weights: Update

    def doubled(self) -> "_Trial":
        """Return the trial in float64, or unchanged if the model does not compute in float64."""
        try:
            params, weights = ({k: t.double() for k, t in part.items()} for part in (self.params, self.weights))
            y = self.y.double() if self.y.is_floating_point() else self.y
            trial = replace(self, known=doubled(self.known), params=params, x=self.x.double(), y=y, weights=weights)
            with torch.no_grad():
                found = trial.updates(trial.x)
        except Exception as error:  # a user's model may raise anything, such as by an assertion of float32
            raise_if_exhausted(error)
            return self
        return trial if all(t.dtype == torch.float64 for t in found.values()) else self

    def projected(self, update: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(t * self.weights[k]).sum() for k, t in update.items()]).sum()

    def updates(self, x: Tensor) -> Update:
        """The updates of problems x, one after the other by plain autograd."""
        client = self.local(gradient(self.known.model, self.known.loss, plain=True))
        updates = [client(self.params, Batch(x[i].clone(), self.y[i]), None) for i in range(len(x))]
        return {k: torch.stack([u[k] for u in updates]) for k in self.params}


Differentiate = Callable[[_Trial], _Derivatives]
_chosen: WeakKeyDictionary[nn.Module, dict[Any, Differentiation]] = WeakKeyDictionary()


def differentiation_of(known: Knowledge, params: Params, one_pass: bool) -> Differentiation:
    """Choose a route of differentiation for a model under an attacker's knowledge.

    Args:
        one_pass: True if the chain allows one pass.

    Raises:
        Unattackable: the model cannot be run or differentiated twice.
    """
    refuse(parameter_problem(known.model, params))
    examples = known.chain.slice_of(known.batch_size)
    like = next(iter(params.values()))
    if like.dtype not in TOLERANCE:
        why = f"are {str(like.dtype).removeprefix('torch.')}, which is too coarse for a search"
        remedy = "set double = true where the attack has it, or build the model in float32 (model.float())"
        refuse(Problem("half precision", "the parameters", why, remedy))
    rng = generator("derivatives")
    x = known.normalise(torch.rand(PROBLEMS, examples, *known.shape, generator=rng)).to(like)
    refuse(forward_problem(known.model, params, x[0]))
    states = tuple(m.training for m in known.model.modules())
    steps = min(2, known.chain.local.steps)
    # a loss in float64 is written as its original is; a module does not write the function within it
    loss = f"{known.loss}{getattr(known.loss, 'loss', '')}"
    key = (one_pass, examples, steps, known.shape, known.classes, loss, like.device, states)
    found = _chosen.setdefault(known.model, {})
    # a trial is in float64 wherever the model computes in it, also for a search in float32
    if (key, torch.float64) not in found and (key, like.dtype) not in found:
        labels = known.label_kind.trial(PROBLEMS * examples, known.classes).to(like.device)
        y = labels.unflatten(0, (PROBLEMS, examples))
        weights = {k: torch.randn(p.shape, generator=rng).to(like) for k, p in params.items()}
        try:
            refuse(lookup_problem(known.model, params, x[0]))
            trial = _Trial(known, params, local_sgd(known.chain.local.rate, steps), x, y, weights)
            trial = trial.doubled()
            found[key, trial.x.dtype] = _choose(trial, one_pass)
        except Exception as error:  # a user's model may raise anything
            raise_if_exhausted(error)
            if isinstance(error, ValueError):
                raise
            why = f"cannot be differentiated twice ({error_line(error)})"
            remedy = "replace the layer or loss, or use an attack that needs no derivative"
            raise Unattackable(Problem("derivative", "the model", why, remedy)) from error
    return found.get((key, torch.float64)) or found[key, like.dtype]


def doubled(known: Knowledge) -> Knowledge:
    """The knowledge with copies of the model and the loss in float64; Unattackable where they cannot be copied."""
    try:
        model = copy.deepcopy(known.model).double()
        loss = copy.deepcopy(known.loss).double() if isinstance(known.loss, nn.Module) else known.loss
    except Exception as error:  # a user's object may raise anything
        why = f"cannot be copied ({error_line(error)}), and float64 needs a copy"
        remedy = "set double = false, or keep what cannot be copied out of the module"
        refuse(Problem("copy", "the model", why, remedy))
    # a copy is differentiated as the original
    _chosen[model] = _chosen.setdefault(known.model, {})
    return replace(known, model=model, loss=loss)


def _choose(trial: _Trial, one_pass: bool) -> Differentiation:
    routes: dict[Route, Differentiate] = {"one pass": _in_one_pass} if one_pass else {}
    routes["vmap"] = _by_vmap
    expected, composed = _expected(trial)
    note = "" if bool(expected.slopes.any()) and _is_slope(trial, expected) else INCOMPLETE
    for decomposed in (True,) if composed else (False, True):
        for route, differentiate in routes.items():
            way = Differentiation(route, decomposed, note)
            if not (route == "one pass" and _reads_values(way, trial)) and _agrees(way, differentiate, trial, expected):
                return way
    return Differentiation("loop", composed, note)


def _is_slope(trial: _Trial, found: _Derivatives) -> bool:
    """Compare the second derivative with differences of the first one; True where rounding would hide a fault."""
    if trial.x.dtype != torch.float64 or _in_float32(trial):
        return True
    direction = torch.randn(trial.x.shape, generator=generator("direction")).to(trial.x)
    slopes, expected = found.slopes, (found.slopes * direction).sum()

    def at(step: float) -> Tensor:
        with torch.no_grad():
            return trial.projected(trial.updates(trial.x + step * direction))

    size = torch.maximum(expected.abs(), NEGLIGIBLE * slopes.norm() * direction.norm())
    terms = torch.stack([(t * trial.weights[k]).norm() for k, t in found.updates.items()])
    gaps = ((at(step) - at(-step)) / (2 * step) - expected for step in DISPLACEMENTS)
    tolerance = SLOPE * size + ROUNDING / DISPLACEMENTS[0] * terms.norm()
    return any(bool(gap.abs() <= tolerance) for gap in gaps)


def _in_float32(trial: _Trial) -> bool:
    """True if the loss computes its derivative in float32 whatever the outputs are, such as by weights or labels in float32."""
    known, x, slopes = trial.known, trial.x[0], []
    outputs = _passed(known.model, trial.params, x)
    for at in (outputs, 1.37 * outputs):
        at.requires_grad_()
        with torch.enable_grad():
            slopes += torch.autograd.grad(loss_of(known.loss, at, trial.y[0], x), at)
    return not torch.equal(*slopes) and all(torch.equal(slope, slope.float().double()) for slope in slopes)


def _expected(trial: _Trial) -> tuple[_Derivatives, bool]:
    """Differentiate by plain autograd; True if layers must be composed. RuntimeError without a second derivative."""
    try:
        found = _differentiated(trial, trial.updates)
        if any(bool(t.any()) for t in found.updates.values()):
            return found, False
    except RuntimeError as error:
        raise_if_exhausted(error)
        with twice_differentiable():
            return _differentiated(trial, trial.updates), True
    raise RuntimeError("every gradient is zero, as reentrant checkpointing makes them")


def _agrees(way: Differentiation, differentiate: Differentiate, trial: _Trial, expected: _Derivatives) -> bool:
    try:
        with way():
            found = differentiate(trial)
    except Exception as error:  # a user's model may raise anything under vmap, and the next route may work
        raise_if_exhausted(error)
        return False
    tolerance = TOLERANCE[trial.x.dtype]
    slopes = ({"": found.slopes}, {"": expected.slopes})
    return _close(found.updates, expected.updates, tolerance) and _close(*slopes, tolerance)


def _reads_values(way: Differentiation, trial: _Trial) -> bool:
    """Detect control flow that depends on the batch's values, which problems in one pass would share."""
    known = trial.known

    def one(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(known.loss, functional_call(known.model, trial.params, (x,)), y, x)

    try:
        with way(), torch.no_grad(), undisturbed(known.model, trial.x.device), _rules_alone():
            vmap(one, randomness="same")(trial.x, trial.y)
    except RuntimeError as error:
        return any(words in str(error) for words in READING)
    return False


def _close(found: Update, expected: Update, tolerance: float) -> bool:
    floor = NEGLIGIBLE * max(float(t.norm()) for t in expected.values())
    apart = {k: float((found[k] - t).norm()) for k, t in expected.items()}
    return all(gap <= tolerance * (float(expected[k].norm()) + floor) for k, gap in apart.items())


# ----------------------------------------------------------------------------------------------------------- the routes


def _in_one_pass(trial: _Trial) -> _Derivatives:
    def updates(x: Tensor) -> Update:
        known, params = trial.known, trial.params
        changes = local_training_changes(known.model, params, x, trial.y, trial.local, False, known.loss)
        return {k: formed(t, params[k].shape) for k, t in changes.items()}

    return _differentiated(trial, updates)


def _differentiated(trial: _Trial, compute: Callable[[Tensor], Update]) -> _Derivatives:
    x = trial.x.detach().requires_grad_()
    with torch.enable_grad():
        updates = compute(x)
        total = trial.projected(updates)
        slopes = torch.zeros_like(x)
        if total.requires_grad:
            (slopes,) = torch.autograd.grad(total, x, materialize_grads=True)
    return _Derivatives({k: t.detach() for k, t in updates.items()}, slopes)


def _by_vmap(trial: _Trial) -> _Derivatives:
    client = trial.local(gradient(trial.known.model, trial.known.loss))

    def one(x: Tensor, y: Tensor) -> tuple[Tensor, Update]:
        update = client(trial.params, Batch(x, y), None)
        return trial.projected(update), update

    with _rules_alone():
        slopes, updates = vmap(grad(one, has_aux=True))(trial.x, trial.y)
    return _Derivatives(updates, slopes)


@contextmanager
def _rules_alone() -> Iterator[None]:
    """A context in which vmap fails without a rule, instead of a fallback loop that is slower than ours."""
    switch: Callable[[bool], None] = getattr(torch._C._functorch, "_set_vmap_fallback_enabled")  # noqa: B009  # has no stub
    switch(False)
    try:
        yield
    finally:
        switch(True)


# --------------------------------------------------------------------------------------- layers without a second derivative


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """A context in which all layers have a second derivative; values and first derivatives stay the same.

    Hard sigmoid by clamping; weighted embedding bags by embeddings; attention by its formula instead of fused kernels.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _Composed(), sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Composed(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _COMPOSED.get(func, func)(*args, **(kwargs or {}))


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    found = (input + 3).clamp(0, 6) / 6
    return input.copy_(found) if inplace else found


def _embedding_bag(input: Tensor, weight: Tensor, *further: Any, **settings: Any) -> Tensor:
    """Bags that are the rows of a matrix; anything else by the original."""
    left = {k: v for k, v in settings.items() if k not in ("mode", "per_sample_weights")}
    plain = not any(v for v in (*further, *left.values()) if not isinstance(v, float)) and input.dim() == 2
    mode, weights = settings.get("mode", "mean"), settings.get("per_sample_weights")
    if not plain or mode not in ("sum", "mean"):
        return F.embedding_bag(input, weight, *further, **settings)
    rows = F.embedding(input, weight)
    rows = rows if weights is None else rows * weights[..., None]
    return rows.sum(1) if mode == "sum" else rows.mean(1)


_COMPOSED: dict[Any, Callable[..., Any]] = {F.hardsigmoid: _hardsigmoid, F.embedding_bag: _embedding_bag}
