"""Whether gradient matching can run a model at all: a sentence for whoever brought it, before the first iteration."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from fedgauge.attacks.base import Knowledge
from fedgauge.client.training import without_running_stats
from fedgauge.client.update import Params

SAME = 1e-4  # relative difference between two passes up to which they are equal
OTHERWISE = "or use an attack that needs no derivative"


def check_model(known: Knowledge, params: Params, x: Tensor) -> None:
    """Run a model on a batch of random examples x (B, ...).

    Raises:
        ValueError: it is lazy, fails, does not return a batch of logits, draws random numbers, or its logits are not finite.
    """
    model = known.model
    check_parameters(model, params)
    lazy = [
        name for name, m in model.named_modules() if any(map(is_lazy, (*m._parameters.values(), *m._buffers.values())))
    ]
    if lazy:
        kind = type(model.get_submodule(lazy[0])).__name__
        raise ValueError(
            f"layer {lazy[0]!r} ({kind}) has no weights before its first batch: give it its number of inputs, "
            "or run the model once on a batch before it is returned"
        )
    try:
        logits = _passed(model, params, x)
    except Exception as error:  # a user's model may raise anything
        words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ValueError(
            f"the model fails on a batch of shape {tuple(x.shape)} ({words}): it is called with the examples alone, "
            "normalised, in the shape of the dataset"
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
        name, kind = _first(model, params, x, lambda out, _: not out.isfinite().all()) or ("", type(model).__name__)
        raise ValueError(
            f"the model's output is not finite on random examples, first in layer {name!r} ({kind}): "
            "its weights have diverged or its initial ones are too large; lower the rate, or change the initialisation"
        )
    if drawing := _first(model, params, x, lambda out, again: not _equal(out, again)):
        name, kind = drawing
        raise ValueError(
            f"layer {name!r} ({kind}) draws random numbers, and the attacker's differentiable update lacks its draws: "
            "set its probability to 0, or put it in eval mode"
        )


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
    _check_memory(model, params, x)
    own = {k: p for k, p in model.named_parameters() if p.requires_grad}
    held = {k: b.clone() for k, b in model.named_buffers()}
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.enable_grad(), torch.random.fork_rng(devices=devices), without_running_stats(model):
        out = functional_call(model, {**{k: p.detach().clone() for k, p in params.items()}, **held}, (x.clone(),))
        if not out.requires_grad:
            return
        # none of them took part, unless the forward pass found it elsewhere
        slopes = torch.autograd.grad(out.square().sum(), list(own.values()), allow_unused=True)
    if found := [name for name, slope in zip(own, slopes, strict=True) if slope is not None]:
        raise ValueError(
            f"the forward pass takes parameter {found[0]!r} from a list, dict or other object, where weights that are handed "
            "in do not reach it, so its gradient is missed: let forward read it by its module's attribute (self.layer.weight)"
        )


def _check_memory(model: nn.Module, params: Params, x: Tensor) -> None:
    """Refuse layers that keep something made of parameters from one pass to the next: it would not follow the weights."""
    buffers = {k: b.clone() for k, b in model.named_buffers()}
    leaves = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
    before = {id(t) for t in (*model.parameters(), *model.buffers(), *leaves.values())}
    devices = [x.device] if x.device.type == "cuda" else []
    with (
        _forgetting(model),
        torch.enable_grad(),
        torch.random.fork_rng(devices=devices),
        without_running_stats(model),
    ):
        functional_call(model, {**leaves, **buffers}, (x.clone(),))
        for name, module in model.named_modules():
            for attribute, held in _containers(module).items():
                kept = [t for t in tree_leaves(held) if isinstance(t, Tensor) and id(t) not in before]
                if any(t.requires_grad for t in kept):
                    raise ValueError(
                        f"layer {name!r} ({type(module).__name__}) keeps what it made of its parameters from one pass to the next "
                        f"({attribute}), so their gradient is missed: let it compute this anew in every pass; some layers do so in "
                        "train mode"
                    )


def _containers(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes that may hold tensors, beside its parameters and buffers."""
    own = ("_parameters", "_buffers", "_modules")
    return {k: v for k, v in vars(module).items() if k not in own and isinstance(v, dict | list)}


@contextmanager
def _forgetting(model: nn.Module) -> Iterator[None]:
    """A context after which the model's dicts and lists hold what they held before."""
    held = [(v, v.copy()) for m in model.modules() for v in _containers(m).values()]
    try:
        yield
    finally:
        for now, before in held:
            now.clear()
            now.update(before) if isinstance(now, dict) else now.extend(before)


def layer_without(model: nn.Module, params: Params, x: Tensor, error: Exception) -> str:
    """In words, which layer has no second derivative; the innermost that fails by itself."""
    for name, module, inputs in _calls(model, params, x):
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
    """The output for a copy of x, with the model's buffers and torch's random numbers left as they are."""
    buffers = {k: b.clone() for k, b in model.named_buffers()}
    devices = [x.device] if x.device.type == "cuda" else []
    with _forgetting(model), torch.no_grad(), torch.random.fork_rng(devices=devices), without_running_stats(model):
        torch.manual_seed(seed)
        return functional_call(model, {**params, **buffers}, (x.clone(),))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=SAME, atol=SAME * float(a.abs().max()), equal_nan=True)


@contextmanager
def _watching(model: nn.Module, see: Any) -> Iterator[None]:
    hooks = [m.register_forward_hook(see(name, m)) for name, m in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _outputs(model: nn.Module, params: Params, x: Tensor, seed: int) -> list[tuple[str, str, list[Tensor]]]:
    """Every module's output, children before parents."""
    seen: list[tuple[str, str, list[Tensor]]] = []

    def see(name: str, module: nn.Module) -> Any:
        def keep(_: nn.Module, inputs: Any, out: Any) -> None:
            floats = [t.clone() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
            seen.append((name, type(module).__name__, floats))

        return keep

    with _watching(model, see):
        _passed(model, params, x, seed)
    return seen


def _first(
    model: nn.Module, params: Params, x: Tensor, wrong: Callable[[Tensor, Tensor], bool]
) -> tuple[str, str] | None:
    """Name and class of the first module whose outputs in two passes, with other draws, are wrong."""
    pairs = zip(_outputs(model, params, x, 0), _outputs(model, params, x, 1), strict=False)
    for (name, kind, outs), (_, _, again) in pairs:
        if any(wrong(a, b) for a, b in zip(outs, again, strict=False)):
            return name, kind
    return None


def _calls(model: nn.Module, params: Params, x: Tensor) -> list[tuple[str, nn.Module, Any]]:
    """Every module's inputs, children before parents."""
    seen: list[tuple[str, nn.Module, Any]] = []

    def see(name: str, module: nn.Module) -> Any:
        def keep(_: nn.Module, inputs: Any, out: Any) -> None:
            seen.append((name, module, tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, inputs)))

        return keep

    with _watching(model, see):
        _passed(model, params, x)
    return seen


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
