"""Observe how a client trains: network, batches, labels, loss, optimizer and clipping, without a change to its code.

Torch's own entry points are watched in the process that runs the app: calls of modules, functions of losses, steps of
optimizers. The app computes the same.
"""

import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.overrides import handle_torch_function, has_torch_function

from fedgauge.client.transforms import transformed

MOST_IDLE = 300_000  # events of Python's profile, about .1 s
MOST_PASSES = 4  # before their losses
MOST_BYTES = 1 << 28  # of the inputs kept for one client and round
LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "ctc_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "multi_margin_loss", "multilabel_margin_loss"),
    *("multilabel_soft_margin_loss", "poisson_nll_loss", "gaussian_nll_loss", "hinge_embedding_loss"),
    *("soft_margin_loss", "cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss"),
)
OF_CLASSES = ("cross_entropy", "nll_loss")
TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "labels", "num_items_in_batch"}
WRAPPERS = ("_module", "module", "_orig_mod")  # where Opacus, data parallelism and torch.compile keep the network


@dataclass
class Built:
    """A call that built a network: a function or class at the top of a module, with its arguments."""

    module: str
    name: str
    arguments: dict[str, Any]


@dataclass
class Step:
    """One step of an optimizer: its settings by parameter group, and the number of passes before it."""

    optimizer: str
    groups: list[dict[str, Any]]
    passes: int
    max_norm: float | None


@dataclass
class Training:
    """One client's training in one round."""

    network: nn.Module | None = None  # the first module with parameters to train that a pass with gradients called
    x: list[Tensor] = field(default_factory=list)  # inputs of each pass; in the end, of those that are used
    y: list[Tensor | None] = field(default_factory=list)  # labels of the same
    output: tuple[int, ...] = ()  # shape of the network's output
    outputs: dict[int, Tensor] = field(default_factory=dict)  # its values in the last passes, by pass
    losses: dict[str, dict[str, Any]] = field(default_factory=dict)  # name and options of each loss of a pass
    scales: list[float] = field(default_factory=list)  # what each backward pass minimised, by the loss of its passes
    steps: list[Step] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)  # parameters of the last step
    with_slopes: set[int] = field(default_factory=set)  # parameters that had a gradient in a step
    optimised: set[int] = field(default_factory=set)  # parameters that an optimizer was given
    used: set[int] = field(default_factory=set)  # passes that a backward pass reached
    cleared: set[int] = field(default_factory=set)  # passes whose gradients were set to zero
    passes: int = 0
    built: list[Built] = field(default_factory=list)
    modes: dict[str, bool] = field(default_factory=dict)
    normalised: tuple[list[float], list[float]] | None = None
    dp: dict[str, float] | None = None  # noise multiplier and clipping norm of Opacus' optimizer
    start: dict[str, Tensor] | None = None  # the network's state before the first pass, of the process's first training
    proximal_mu: float | None = None  # the weight of FedProx's term, if the server sends one
    pad: int | None = None  # the token id at positions that an attention mask hides
    tokenizers: list[Any] = field(default_factory=list)  # in memory at the first pass; most apps drop them then
    notes: dict[str, str] = field(default_factory=dict)  # what a scenario cannot express, by code
    uploads: bool = False  # arrays were sent, and arrays came back
    bytes: int = 0
    depth: int = 0
    back: bool = False  # within a backward pass
    max_norm: float | None = None
    means: list[tuple[int, float]] = field(default_factory=list)  # of losses before their backward pass, by pass
    drawn: set[int] = field(default_factory=set)  # passes that drew random numbers
    random: list[Tensor] = field(default_factory=list)  # states of generators before the pass
    factor: float = 1.0  # of a gradient scaler
    outermost: nn.Module = field(default_factory=nn.Module)  # of the modules that are being called
    passed: tuple[str, Sequence[Tensor]] = ("", ())  # the last other network, and its outputs without gradients

    def enters(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a call of a module that no other module called."""
        self.outermost = module
        own = {id(p) for p in module.parameters() if p.requires_grad}
        if not torch.is_grad_enabled() or not own:
            return
        if self.optimised and not own & self.optimised:
            if module is self.network and not next(module.parameters()).is_leaf:
                self.notes["unread"] = "the network is also called with other weights than its own, as in MAML"
            return
        parts = {id(part) for part in module.modules()}
        if not self.used and module is not self.network and id(self.network) in parts:
            # a part of it was called alone, such as to size a layer
            self.network, self.notes = None, {}
            self.x, self.y, self.means, self.losses, self.drawn, self.outputs = [], [], [], {}, set(), {}
            self.passes, self.bytes = 0, 0
        if self.network is None:
            self.network = module
            inner = unwrapped(module)
            self.modes = {name: m.training for name, m in inner.named_modules()}
            if self.start is not None:
                kept = {name: t for name, t in inner.state_dict().items() if isinstance(t, Tensor)}  # not extra states
                self.start = {name: t.detach().clone().contiguous() for name, t in kept.items() if not is_lazy(t)}
            halves = any(p.dtype in (torch.bfloat16, torch.float16) for p in inner.parameters())
            if halves or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                self.notes["autocast"] = "passes run in half or mixed precision (autocast), the draft in float32"
        elif module is not self.network:
            self.notes["networks"] = f"a step calls several networks, also {type(module).__name__}"
            return
        self.passes, self.random = self.passes + 1, _random()
        named = {k: v for k, v in _named(module, args, kwargs).items() if isinstance(v, Tensor)}
        ids = named.get("input_ids")
        tensors = [t for name, t in named.items() if name != "labels"] if ids is None else [ids]
        if ids is not None:
            self._reads(named)
            if self.start is not None and not self.x:
                self.tokenizers = _tokenizers()
        elif {*named} - {"labels"} != _alone(module):
            names = ", ".join(_signature(module).parameters)
            self.notes["inputs"] = f"the network is not called with one tensor, as net(x), but as forward({names})"
        if not tensors:
            return
        name, outputs = self.passed
        if any(t.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr() for t in outputs):
            self.notes["features"] = f"inputs are outputs (features) of {name}, which are attacked, not its inputs"
        self.bytes += tensors[0].nbytes
        if self.bytes > MOST_BYTES:
            self.notes["large"] = "a client trains on more data than is kept in memory; the first part was kept"
            return
        self.x.append(tensors[0].detach().clone())
        labels = None if ids is None else named.get("labels")
        self.y.append(None if labels is None else labels.detach().clone())

    def normalises(self, module: nn.Module) -> None:
        """Note torchvision's Normalize, unless it is a part of a network."""
        mean, std = (vars(module).get(name) for name in ("mean", "std"))
        if isinstance(mean, Sequence) and isinstance(std, Sequence) and not [*self.outermost.parameters()]:
            self.normalised = ([float(m) for m in mean], [float(s) for s in std])

    def _reads(self, named: Mapping[str, Tensor]) -> None:
        """Note padding, other inputs and masked labels of a batch of sentences."""
        ids, mask, labels = (named.get(key) for key in ("input_ids", "attention_mask", "labels"))
        if other := named.keys() - TEXT_INPUTS:
            self.notes["inputs"] = f"sentences come with {', '.join(sorted(other))}"
        if ids is None or mask is None or mask.shape != ids.shape:
            return
        hidden = mask == 0
        if hidden.any():
            self.pad = int(ids[hidden][0])
            if hidden[:, 0].any():
                self.notes["padding"] = "sentences are padded on the left; the draft pads on the right"
        if labels is not None and labels.shape == ids.shape and (labels != ids)[~hidden].any():
            self.notes["labels"] = "the loss is computed on some tokens only; the draft takes all"

    def leaves(self, module: nn.Module, result: object) -> None:
        """Record the output of the network; a forward hook."""
        result = getattr(result, "logits", result)  # as Hugging Face's networks return them
        if module is not self.network:
            if next(module.parameters(), None) is not None:
                parts = [*result.values()] if isinstance(result, Mapping) else result
                outputs = [t for t in (parts if isinstance(parts, list | tuple) else [parts]) if isinstance(t, Tensor)]
                self.passed = type(module).__name__, outputs
            return
        if not torch.is_grad_enabled():
            return
        if not all(map(torch.equal, self.random, _random())):
            self.drawn.add(self.passes - 1)
        if not isinstance(result, Tensor) or not result.requires_grad:
            self.used.add(self.passes - 1)
        else:
            result.register_hook(lambda _, number=self.passes - 1: self.uses(number))
        if isinstance(result, Tensor):
            self.output = tuple(result.shape)
            self.outputs[self.passes - 1] = result.detach()
            self.outputs.pop(self.passes - 1 - MOST_PASSES, None)
        else:
            many = len(result) if isinstance(result, Sequence | Mapping) else 1
            self.notes["output"] = f"returns a {type(result).__name__} of {many} parts"

    def uses(self, number: int) -> None:
        """Note that a backward pass reached a pass."""
        self.used.add(number)
        self.cleared.discard(number)

    def clears(self, cleared: nn.Module | Optimizer, *args: object, **kwargs: object) -> None:
        """Note that gradients are set to zero: passes since the last step only made adversarial examples."""
        groups = cleared.param_groups if isinstance(cleared, Optimizer) else [{"params": [*cleared.parameters()]}]
        own = {id(p) for p in self.network.parameters()} if self.network is not None else set()
        if not own & {id(p) for group in groups for p in group["params"]}:
            return
        self.cleared = set() if self.dp else {*self.used}  # Opacus keeps gradients elsewhere
        self.means = [each for each in self.means if each[0] not in self.cleared]
        self.max_norm = None  # of a step that was left out, as a gradient scaler does

    def clips(self, parameters: object, max_norm: float, norm_type: float = 2.0, *_: object, **__: object) -> None:
        if norm_type != 2 or self.max_norm is not None:
            why = "gradients are clipped in parts or by another norm; the draft clips the norm of all"
            self.notes["clipping"] = why
        self.max_norm = float(max_norm)

    def clips_values(self, *args: object, **kwargs: object) -> None:
        self.notes["clipping"] = "gradients are clipped by value; the draft leaves it out"

    def gives(self, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        """Note the parameters that an optimizer is given."""
        self.optimised |= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def scales_loss(self, scaler: torch.amp.GradScaler, *args: object, **kwargs: object) -> None:
        self.factor = float(scaler.get_scale()) if scaler.is_enabled() else 1.0

    def steps_privately(self, optimizer: Any, *args: object, **kwargs: object) -> None:
        """Note noise and clipping of Opacus' optimizer, which steps through another one."""
        norm = optimizer.max_grad_norm
        bound = float(norm) if isinstance(norm, int | float) else float("nan")
        self.dp = {"noise_multiplier": float(optimizer.noise_multiplier), "max_norm": bound}

    def ends(self, factories: "_Factories") -> None:
        """Leave out passes that nothing was learnt from, such as those that only measure."""
        if self.used:
            self.x = [t for k, t in enumerate(self.x) if k in self.used]
            self.y = [t for k, t in enumerate(self.y) if k in self.used]
        if self.drawn & self.used:
            self.notes["dropout"] = "the network draws random numbers, as dropout and stochastic depth do"
        if self.network is not None:
            self.built = factories.of(unwrapped(self.network))

    def computes(self, name: str, call: inspect.BoundArguments, value: object) -> None:
        """Note a loss: its target belongs to the pass whose output it reads, else to the last one."""
        if not self.passes:
            return  # of other values than the network's
        of, target = call.arguments.get("input"), call.arguments.get("target")
        number, values = self.passes - 1, self.outputs.get(self.passes - 1)
        if isinstance(of, Tensor):
            same = (each for each in self.outputs.items() if each[1].data_ptr() == of.data_ptr())
            number, values = next(same, (number, values))
        if isinstance(of, Tensor) and values is not None and of.numel() == values.numel():
            read, given = of.detach().flatten().to(values), values.flatten()
            if name == "binary_cross_entropy" and torch.equal(read, given.sigmoid()):
                name += "_with_logits"  # the app calls sigmoid itself
            elif len(self.output) == 2 and name not in ("nll_loss", "kl_div") and not torch.equal(read, given):
                self.notes["loss"] = f"{name} reads values computed from the output; the draft takes the output"
        options = {k: v for k, v in call.arguments.items() if k not in ("input", "target", "size_average", "reduce")}
        self.losses[name] = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in options.items()}
        if not isinstance(of, Tensor) or not isinstance(target, Tensor) or not isinstance(value, Tensor):
            return
        if values is not None and of.numel() != values.numel():
            seen, output = tuple(of.shape), tuple(values.shape)
            self.notes["values"] = f"returns shape {output}, and {name} reads values of shape {seen}"
        if name not in OF_CLASSES and of.shape != target.shape:
            shapes = f"{tuple(of.shape)} with {tuple(target.shape)}"
            self.notes["loss"] = f"{name} compares values of shape {shapes}, each with each; the draft does not"
        kept = number < len(self.y) and self.y[number] is None
        if kept and name != "kl_div":  # which compares with another network's output
            self.y[number] = target.detach().clone()
        terms = 1 if options.get("reduction", "mean") == "mean" else len(of) if name in OF_CLASSES else of.numel()
        if value.requires_grad and number not in self.used:  # else it is only shown
            self.means.append((number, float(value.detach().sum()) / max(terms, 1)))  # a batch may be empty

    def goes_back(self, value: Tensor) -> None:
        """Note a backward pass from a value, after it."""
        means = [each for each in self.means if each[0] in self.used]
        if len(means) > len(dict(means)):
            self.notes["loss"] = "several losses are added up; the draft takes one"
        elif (total := sum(mean for _, mean in means)) and value.numel() == 1:
            self.scales.append(float(value.detach()) / total / self.factor)
        self.means = [each for each in self.means if each[0] not in self.used]

    def steps_by(self, optimizer: Optimizer) -> None:
        """Note a step of an optimizer, after it: some pass data through the network within the step."""
        groups = [
            {k: v for k, v in group.items() if isinstance(v, bool | int | float | tuple | list) and k != "params"}
            | {"lr": float(group.get("lr", 1.0))}  # a tensor, or absent in an optimizer of the app
            for group in optimizer.param_groups
        ]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moved, with_slopes = {id(p) for p in parameters}, {id(p) for p in parameters if p.grad is not None}
        self.trained |= moved
        kind, last = type(optimizer).__name__, self.steps[-1] if self.steps else None
        if last and last.passes == len(self.used) and not moved & self.moved:  # each optimizer makes a part of the step
            last.groups += groups
            self.moved |= moved
            self.with_slopes |= with_slopes
            if kind != last.optimizer:
                self.notes["turns"] = f"a step is made by {last.optimizer} and {kind}"
            return
        if self.with_slopes and with_slopes and not with_slopes & self.with_slopes:
            self.notes["turns"] = "different parameters are trained by turns"
        self.moved, self.with_slopes = moved, self.with_slopes | with_slopes
        self.used -= self.cleared - {*sorted(self.used)[: last.passes if last else 0]}
        self.steps.append(Step(kind, groups, len(self.used), self.max_norm))
        self.max_norm = None


def _signature(module: nn.Module) -> inspect.Signature:
    network = unwrapped(module)
    return inspect.signature(getattr(network, "get_base_model", lambda: network)().forward)  # peft's has no names


def _alone(module: nn.Module) -> set[str]:
    """Return the name of the argument that a network takes in net(x); none if it needs others."""
    with suppress(TypeError):
        return {*_signature(module).bind(None).arguments}
    return set()


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a network's call by name, and the contents of those that are mappings."""
    names = [*_signature(module).parameters, *map(str, range(len(args)))]
    found: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    return found | {k: v for a in args if isinstance(a, Mapping) for k, v in a.items()}


def _random() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _tokenizers() -> list[Any]:
    kind: Any = getattr(sys.modules.get("transformers"), "PreTrainedTokenizerBase", ())
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the network inside the wrappers of Opacus, data parallelism and torch.compile."""
    while True:
        parts = dict(module.named_children())
        inner = next((parts[name] for name in WRAPPERS if name in parts), None)
        if inner is None or len(parts) != 1:
            return module
        module = inner


class Observer:
    """Watches torch in this process; create one, before the app is imported."""

    def __init__(self) -> None:
        self._now: Training | None = None
        self._factories = _Factories()
        self._trained = False
        nn.Module.__call__ = self._watched(nn.Module.__call__)  # type: ignore[method-assign]
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._note(Training.steps_by, optimizer))
        for place in (nn.utils, nn.utils.clip_grad):
            self._after(place, "clip_grad_norm_", Training.clips)
            self._after(place, "clip_grad_value_", Training.clips_values)
        for name in LOSSES:
            setattr(F, name, self._loss(name, getattr(F, name)))
        torch.autograd.backward = self._backward(torch.autograd.backward)
        self._after(torch.amp.GradScaler, "scale", Training.scales_loss)
        self._after(Optimizer, "add_param_group", Training.gives)
        for name in ("__init__", "__setstate__"):  # of a new module, of a copy
            self._after(nn.Module, name, self._builds)
        for kind in (Optimizer, nn.Module):
            self._after(kind, "zero_grad", Training.clears)

    @contextmanager
    def training(self) -> Iterator[Training]:
        """Observe one client in one round."""
        self._now = now = Training(start=None if self._trained else {})
        self._factories = _Factories()
        self._builds(now)
        try:
            yield now
        finally:
            if isinstance(sys.getprofile(), _Factories):
                sys.setprofile(None)
            self._note(Training.ends, self._factories)
            self._now = None
            self._trained |= now.network is not None

    def _note(self, note: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """Note a call of the client that trains; an error of the observer must not reach the app."""
        if (now := self._now) is None or torch.compiler.is_compiling():
            return
        try:
            note(now, *args, **kwargs)
        except Exception as error:  # an app's objects may raise anything
            now.notes["unread"] = f"the training cannot be observed ({type(error).__name__}: {error})"

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # the graph has the app's calls only
                return call(module, *args, **kwargs)
            now = self._now
            if now is None or now.back or torch._C._is_tracing() or transformed():  # a trace would hold what is noted
                if now is not None and now.back and not transformed():
                    now.notes["checkpoint"] = "turn gradient checkpointing off: it changes no update"
                elif now is not None and now.network is None and not torch._C._is_tracing():
                    now.notes["func"] = "torch.func computes gradients, and is not observed"
                return call(module, *args, **kwargs)
            now.depth += 1
            try:
                if now.depth == 1:
                    self._note(Training.enters, module, args, kwargs)
                    self._watch_opacus()  # which the app may have imported only now
                if type(module).__name__ == "Normalize":
                    self._note(Training.normalises, module)
                result = call(module, *args, **kwargs)
                if now.depth == 1:
                    self._note(Training.leaves, module, result)
                return result
            finally:
                now.depth -= 1

        return watched

    def _loss(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            if has_torch_function(given := (*args, *kwargs.values())):
                return handle_torch_function(watched, given, *args, **kwargs)  # a tensor of the app knows us only
            value = function(*args, **kwargs)
            if torch.is_grad_enabled() and not transformed():
                self._note(lambda now: now.computes(name, signature.bind(*args, **kwargs), value))
            return value

        # torch.jit.script compiles the function itself
        vars(watched).update(__script_if_tracing_wrapper=True, __original_fn=function)
        return watched

    def _backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if torch.compiler.is_compiling() or now is None or now.back:
                return function(*args, **kwargs)
            now.back = True
            try:
                result = function(*args, **kwargs)
            finally:
                now.back = False
            if args and isinstance(args[0], Tensor):
                self._note(Training.goes_back, args[0])
            return result

        return watched

    def _builds(self, now: Training, *args: object, **kwargs: object) -> None:
        if now.network is None:
            self._factories.idle = 0
            if sys.getprofile() is None:  # the app may profile itself
                sys.setprofile(self._factories)

    def _after(self, place: Any, name: str, note: Callable[..., None]) -> None:
        """Note the arguments of each call of a function, after it."""
        function = getattr(place, name)

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._note(note, *args, **kwargs)
            return result

        setattr(place, name, watched)

    def _watch_opacus(self) -> None:
        kind = getattr(sys.modules.get("opacus.optimizers.optimizer"), "DPOptimizer", None)
        if kind is not None and not hasattr(kind, "_fedgauge"):
            self._after(kind, "step", Training.steps_privately)
            kind._fedgauge = True


class _Factories:
    """Notes, as Python's profile function, which functions and classes return or initialise a network.

    It ends itself a while after the last module was built, so that the rest runs at full speed.
    """

    def __init__(self) -> None:
        self._found: list[tuple[nn.Module, Built]] = []
        self.idle = 0  # events since the last module was built

    def __call__(self, frame: types.FrameType, event: str, value: object) -> None:
        self.idle += 1
        if self.idle > MOST_IDLE:
            sys.setprofile(None)
        try:
            if event == "return":
                self._note(frame, value)
        except Exception:  # it would reach the app, whose objects may raise anything; this call is not noted
            return

    def _note(self, frame: types.FrameType, value: object) -> None:
        code = frame.f_code
        if isinstance(value, nn.Module) and "." not in code.co_qualname:
            self._found.append((value, Built(frame.f_globals.get("__name__", ""), code.co_qualname, _given(frame, 0))))
        elif code.co_name == "__init__" and code.co_argcount and isinstance(value, types.NoneType):
            module = frame.f_locals.get(code.co_varnames[0])
            kind = type(module)
            own = getattr(inspect.getattr_static(kind, "__init__"), "__code__", None) is code
            if isinstance(module, nn.Module) and own and "." not in kind.__qualname__:
                self._found.append((module, Built(kind.__module__, kind.__qualname__, _given(frame, 1))))

    def of(self, network: nn.Module) -> list[Built]:
        """Return the calls that built this network, the app's own functions before classes; its class if it was built earlier."""
        kind = type(network)
        calls = [built for module, built in reversed(self._found) if module is network]
        own = kind.__module__, kind.__qualname__
        calls += [] if "." in own[1] or own in [(call.module, call.name) for call in calls] else [Built(*own, {})]
        others = ("torch", "fedgauge", "copy")  # a Sequential has no arguments that a scenario could write
        return [built for built in calls if built.module.partition(".")[0] not in others]


def _given(frame: types.FrameType, first: int) -> dict[str, Any]:
    code = frame.f_code
    names = code.co_varnames[first : code.co_argcount + code.co_kwonlyargcount]
    given = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        further = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        given |= frame.f_locals.get(code.co_varnames[further], {})
    return given
