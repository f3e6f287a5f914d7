"""Reads one example off a chain of layers, from the last layer to the first (after R-GAP, Zhu and Blaschko, ICLR 2021).

The last layer's gradient has rank one, which gives its input and the error signal of the logits. The input of each layer below
solves two sets of linear equations: its weight gradient, sum_p D_p x_p^T over error signals D and patches x, and its output,
from inverting the activation. They are weighted by their precision. A clip scales gradients and error signals alike.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from fedgauge.attacks.base import Knowledge, Reconstruction, Wave
from fedgauge.attacks.engine.compatibility import doubled
from fedgauge.attacks.engine.computation import LayerCall, LayerCallRecorder, run, undisturbed
from fedgauge.attacks.exact.closed_form import ClosedForm, Reader, check_one_example, labels_of
from fedgauge.attacks.problem import Problem, Unattackable
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Params, Update, relative_error

LARGEST = 4096  # values that a layer reads, up to which its equations are solved in seconds
REACH = 64.0  # values before an activation lie between -REACH and REACH
HALVINGS = 60
ROUNDING = 1e-7  # of a gradient in float32, relative to its root mean square
SPREAD = 1.0  # prior standard deviation of what a layer reads
CERTAIN = 5.0  # standard deviations from an activation's flat part beyond which a value lies outside
EXACT = 1e-5  # relative error of the update, below which nothing is refined
INEXACT = 1e-3  # relative error above which the example is not the one behind the update
REFINED = 100  # steps of the refinement
AT_ONCE = 256  # unit vectors whose patches are formed together


@dataclass(frozen=True, eq=False)
class _Step:
    """One operation of the chain on one example x (1, ...).

    Args:
        kind: "layer" if it has a trained weight, "affine" or "activation".
        shape: of its input, without the batch.
        settings: of a convolution, as F.unfold takes them; None: fully connected.
    """

    name: str
    kind: str
    apply: Callable[[Params, Tensor], Tensor]
    shape: tuple[int, ...]
    weight: str = ""
    bias: str = ""
    settings: Mapping[str, Any] | None = None

    def patches(self, x: Tensor) -> Tensor:
        """Return the patches of inputs x (N, ...) for a row of the weight: (N, values, positions)."""
        if self.settings is None:
            return x.reshape(len(x), -1, x.shape[-1]).transpose(1, 2)
        return F.unfold(x, **self.settings)

    def signals(self, delta: Tensor) -> Tensor:
        """Error signals (1, ...) at its output as (outputs, positions)."""
        return delta.reshape(-1, delta.shape[-1]).T if self.settings is None else delta.flatten(2)[0]


class _Recorder(LayerCallRecorder):
    """Records each operation on what follows from the example."""

    def __init__(self, params: Params, x: Tensor) -> None:
        super().__init__(params)
        self.last, self.derived = x, [x]
        self.steps: list[_Step] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        given = [t for t in leaves if any(t is other for other in self.derived)]
        before = len(self.calls)
        result = super().__torch_function__(func, types, args, kwargs)
        if not given or not isinstance(result, Tensor):
            return result
        weights = [self.names[id(t)] for t in leaves if id(t) in self.names]
        name = weights[0].rpartition(".")[0] or weights[0] if weights else getattr(func, "__name__", str(func))
        if len(given) > 1 or given[0] is not self.last:
            _decline(name, "joins several paths")
        if result is given[0] and not func.__name__.endswith("_"):
            return result
        result = result.clone()  # an operation in place keeps its input
        step = _Step(name, "", self._replayed(func, args, kwargs, given[0]), tuple(given[0].shape[1:]))
        for call in self.calls[before:]:
            step = _layer(step, call, next(t for t in leaves if self.names.get(id(t)) == call.weight).shape[2:])
        self.steps.append(step)
        self.derived.append(result)
        self.last = result
        return result

    def _replayed(self, func: Any, args: Any, kwargs: Any, given: Tensor) -> Callable[[Params, Tensor], Tensor]:
        def apply(params: Params, x: Tensor) -> Tensor:
            def put(t: Any) -> Any:
                if t is given:
                    return x.clone()
                if isinstance(t, Tensor) and t.is_floating_point():
                    return params[self.names[id(t)]] if id(t) in self.names else t.to(x)
                return t

            result: Tensor = func(*tree_map(put, args), **tree_map(put, kwargs))
            return result

        return apply


def _layer(step: _Step, call: LayerCall, kernel: Sequence[int]) -> _Step:
    """The step as a layer's call; kernel: a convolution's, else empty."""
    step = replace(step, kind="layer", weight=call.weight, bias=call.bias)
    if not kernel:
        return step
    settings = {k: call.settings.get(k, default) for k, default in (("dilation", 1), ("padding", 0), ("stride", 1))}
    if call.settings.get("groups", 1) != 1 or isinstance(settings["padding"], str):
        _decline(step.name, "has groups, or a padding by name")
    return replace(step, settings={"kernel_size": kernel, **settings})


def _decline(layer: str, why: str) -> NoReturn:
    remedy = "the attack reads a chain of layers and rising activations; use a search, such as inverting_gradients"
    raise Unattackable(Problem("no chain", f"operation {layer!r}", why, remedy))


class _Stage(NamedTuple):
    """Affine operations from one activation to the next one, which is None behind the last stage."""

    steps: tuple[_Step, ...]
    activation: _Step | None

    @property
    def name(self) -> str:
        return next((s.name for s in self.steps if s.weight), self.steps[0].name)


def stages_of(model: nn.Module, shape: Sequence[int]) -> list[_Stage]:
    """The network as a chain of stages, from the example to the logits, in the order of its computation.

    Raises:
        Unattackable: it is no such chain; the first operation that does not fit is named.
    """
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    x = torch.rand(1, *shape, generator=generator("made-up example")).to(next(iter(params.values())))
    with torch.no_grad(), undisturbed(model, x.device), _Recorder(params, x) as recorder:
        try:
            out = run(model, params, x)
        except (RuntimeError, TypeError, ValueError) as error:  # the network's own words for one example
            if isinstance(error, Unattackable):
                raise
            _decline("forward", f"fails on one example ({type(error).__name__})")
    steps, own = recorder.steps, {k: p.double().cpu() for k, p in params.items()}
    if not steps or out is not recorder.last or steps[-1].settings is not None or len(steps[-1].shape) != 1:
        _decline(steps[-1].name if steps else "forward", "ends the network, and a fully connected layer has to")
    stages: list[_Stage] = []
    now: list[_Step] = []
    used: set[str] = set()
    for step in (_classified(step, own) for step in steps):
        if step.weight in used:
            _decline(step.name, "is used more than once")
        used |= {step.weight} - {""}
        if not now and math.prod(step.shape) > LARGEST:
            _decline(step.name, f"reads more than {LARGEST:,} values: more than can be solved in seconds")
        if step.kind != "activation":
            now.append(step)
        elif not now:
            _decline(step.name, "follows another activation")
        else:
            stages.append(_Stage(tuple(now), step))
            now = []
    if not now or not now[-1].weight:
        _decline(steps[-1].name, "ends the network, and a fully connected layer has to")
    return [*stages, _Stage(tuple(now), None)]


def _classified(step: _Step, params: Params) -> _Step:
    if step.kind:
        return step
    rng, apply = generator("made-up values"), partial(step.apply, params)
    a, b = (3 * torch.randn(1, *step.shape, generator=rng, dtype=torch.float64) for _ in range(2))
    of_a, of_b, of_zero, of_sum = (apply(t) for t in (a, b, torch.zeros_like(a), a + b))
    if bool((of_a + of_b - of_zero - of_sum).abs().max() <= 1e-9 * (1 + of_sum.abs().max())):
        return replace(step, kind="affine")
    chosen = torch.rand(a.shape, generator=rng) < 0.5
    if of_a.shape == a.shape and torch.allclose(
        apply(torch.where(chosen, a, b)), torch.where(chosen, of_a, of_b), rtol=1e-12, atol=0
    ):
        grid = torch.linspace(-8, 8, 129, dtype=torch.float64)
        if bool((torch.cat([apply(torch.full_like(a, float(v))) for v in grid]).diff(dim=0) >= 0).all()):
            return replace(step, kind="activation")
    _decline(step.name, "is neither affine nor a rising activation")


def _affine(stage: _Stage, params: Params) -> tuple[list[Tensor], Tensor]:
    """Return the input of each layer of a stage, and its output, for zeros and each unit vector: (1 + n, ...) each."""
    shape = stage.steps[0].shape
    n = math.prod(shape)
    x = torch.cat([torch.zeros(1, n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)]).view(n + 1, *shape)
    read = []
    for step in stage.steps:
        if step.weight:
            read.append(x)
        x = vmap(lambda t, step=step: step.apply(params, t[None])[0])(x)
    return read, torch.cat([x[:1], x[1:] - x[:1]]).flatten(1)


def _gradient_equations(step: _Step, read: Tensor, delta: Tensor, gradient: Tensor) -> Tensor:
    """The equations (rows, n + 1) from a layer's weight gradient, fewer by an orthogonal map if error signals are dependent."""
    left, short = torch.linalg.qr(step.signals(delta))
    wide = gradient.flatten(1)
    zero = short @ step.patches(read[:1])[0].T
    parts = [
        torch.einsum("nfp,kp->nkf", step.patches(part - read[:1]), short).flatten(1) for part in read[1:].split(AT_ONCE)
    ]
    return torch.cat([*parts, (left.T @ wide - zero).flatten()[None]]).T


def _signals_in(stage: _Stage, params: Params, delta: Tensor) -> list[Tensor]:
    """Error signals (1, ...) at the output of each layer of a stage, and last those at the stage's input."""
    x = torch.zeros(1, *stage.steps[0].shape, dtype=torch.float64)
    backward = []
    for step in stage.steps:
        x, back, *_ = vjp(partial(step.apply, params), x)
        backward.append(back)
    signals = []
    delta = delta.view_as(x)
    for step, back in zip(reversed(stage.steps), reversed(backward), strict=True):
        if step.weight:
            signals.append(delta)
        (delta,) = back(delta)
    return [*reversed(signals), delta]


def _inverse(apply: Callable[[Tensor], Tensor], value: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of an activation and its slope there, 0 on a flat part."""
    low, high = torch.full_like(value, -REACH), torch.full_like(value, REACH)
    flat = apply(low)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = apply(middle) < value
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    slope = vjp(apply, high)[1](torch.ones_like(value))[0]
    if not torch.equal(apply(torch.full_like(value, -1.0)), flat):
        return high, slope
    # flat below zero, as ReLU is: values below the flat part show the real error, which the deviation underestimates
    return high, slope * (value > flat + torch.maximum(CERTAIN * deviation, CERTAIN * (flat - value).max()))


class _Estimate(NamedTuple):
    """A stage's input (1, ...), the triangular factor (n, n) of its information, and its standard deviations."""

    value: Tensor
    factor: Tensor
    deviation: Tensor


def _solved(stage: _Stage, equations: Sequence[Tensor], mean: Tensor) -> _Estimate:
    """Weighted least squares of equations (rows, n + 1), right sides last, with a prior of standard deviation SPREAD."""
    n = mean.numel()
    prior = torch.cat([torch.eye(n, dtype=torch.float64), mean.view(-1, 1)], 1) / SPREAD
    triangle = torch.linalg.qr(torch.cat([*equations, prior]), mode="r").R
    factor = triangle[:n, :n]
    value = torch.linalg.solve_triangular(factor, triangle[:n, n:], upper=True)
    inverse = torch.linalg.solve_triangular(factor, torch.eye(n, dtype=torch.float64), upper=True)
    return _Estimate(value.view(1, *stage.steps[0].shape), factor, inverse.norm(dim=1).view(1, *stage.steps[0].shape))


def _logit_signals(step: _Step, gradient: Update, params: Params) -> tuple[Tensor, float]:
    """Error signals (1, classes) of the logits, and the noise's standard deviation, from the last layer's gradient."""
    weight = gradient[step.weight]
    whole = torch.cat([weight, gradient[step.bias][:, None]], 1) if step.bias in gradient else weight
    left, values, right = torch.linalg.svd(whole, full_matrices=False)
    noise = float(values[1:].norm()) / math.sqrt((len(whole) - 1) * whole.shape[1])
    if step.bias in gradient:
        return (left[:, :1] * values[0] * right[0, -1]).T, noise
    # without a bias the input's length is open: log p_i differ as the logits do, for all classes but the true one
    signal, features = left[:, 0], right[0]
    label = int(signal.abs().argmax())
    if signal[label] > 0:
        signal, features = -signal, -features
    others = torch.arange(len(signal)) != label
    weights = signal[others].clamp(min=1e-12)
    shift = params[step.bias][others] if step.bias else 0.0
    logs, logits = weights.log() - shift, (params[step.weight] @ features)[others]
    share = weights / weights.sum()
    logs, logits = logs - (share * logs).sum(), logits - (share * logits).sum()
    length = (share * logits * logs).sum() / (share * logits.square()).sum()
    if not bool(length > 0):
        raise ValueError(f"layer {step.name!r} has no bias, and its gradient does not show the length of its input")
    return (signal * values[0] / length)[None], noise


def _read(stages: Sequence[_Stage], gradient: Update, params: Params, mean: Tensor) -> tuple[Tensor, float, list[str]]:
    """The network's input (1, ...), the noise's standard deviation, and each stage that its equations leave open."""
    end = stages[-1].steps[-1]
    if end.weight not in gradient or not bool(gradient[end.weight].any()):
        raise ValueError("the last layer's gradient is zero, or not shared")
    delta, noise = _logit_signals(end, gradient, params)
    known: _Estimate | None = None
    notes = []
    for stage in reversed(stages):
        equations = []
        read, out = _affine(stage, params)
        if stage.activation is not None and known is not None:
            before, slope = _inverse(partial(stage.activation.apply, params), known.value, known.deviation)
            delta = delta * slope
            rows = known.factor * slope.flatten()
            equations.append(rows @ torch.cat([out[1:], before.flatten()[None] - out[:1]]).T)
        *signals, delta = _signals_in(stage, params, delta)
        for step, values, signal in zip([s for s in stage.steps if s.weight], read, signals, strict=True):
            if (own := gradient.get(step.weight)) is None:
                continue
            sigma = math.hypot(noise, ROUNDING * float(own.square().mean().sqrt())) or 1.0
            equations.append(_gradient_equations(step, values, signal, own) / sigma)
        first = stage is stages[0]
        known = _solved(stage, equations, mean if first else torch.zeros(stage.steps[0].shape, dtype=torch.float64))
        dimensions = float(known.deviation.square().sum()) / SPREAD**2
        if dimensions >= 0.5:
            notes.append(f"layer {stage.name!r}: {dimensions:,.0f} of {known.value.numel():,} dimensions stay open")
    assert known is not None
    return known.value, noise, notes


@dataclass(frozen=True)
class recursive(ClosedForm):
    """One example from a chain of convolutions and fully connected layers, layer by layer by least squares (R-GAP).

    Reads behind a clip of unknown scale. Under noise a short search by the update's likelihood follows.
    """

    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        check_one_example(known)
        return partial(_inverted, stages_of(known.model, known.shape))


def _inverted(stages: Sequence[_Stage], alone: Wave, known: Knowledge) -> Reconstruction:
    gradient = {k: -t.double() / known.scale for k, t in alone.alone(0).items()}
    params = {k: p.detach().double() for k, p in known.model.named_parameters()}
    params |= {k: p.double() for k, p in alone.params.items()}
    y = labels_of(alone, known)
    mean = known.normalise(torch.full(known.shape, 0.5, dtype=torch.float64))
    x, noise, notes = _read(stages, gradient, params, mean)
    spent = 1

    def error(x: Tensor, y: Tensor) -> float:
        batch = Batch(known.examples(x).to(next(iter(alone.params.values()))), y)
        return relative_error(known.forward(alone.params, batch, None), alone.alone(0))

    off = math.nan
    if y is not None:
        off = error(x, y)
        if not off < EXACT:
            x, spent = _refined(x, y, mean, noise, gradient, params, known)
            off = error(x, y)
        if off > INEXACT:
            notes.append(f"the example explains the update only to {off:.1%}")
    return Reconstruction(known.examples(x).float(), y, off, spent, 0.0, "converged", "; ".join(notes))


def _refined(
    start: Tensor, y: Tensor, mean: Tensor, noise: float, gradient: Update, params: Params, known: Knowledge
) -> tuple[Tensor, int]:
    """The input that explains the update best, by L-BFGS from the closed form; and the evaluations."""
    double, trained = doubled(known), [k for k in gradient]
    sigma = {k: math.hypot(noise, ROUNDING * float(t.square().mean().sqrt())) or 1.0 for k, t in gradient.items()}
    leaves = {k: p.clone().requires_grad_(k in gradient) for k, p in params.items()}
    low, high = known.normalise(torch.zeros(known.shape)).double(), known.normalise(torch.ones(known.shape)).double()
    x = start.clamp(low, high).requires_grad_()
    spent, best = 0, (math.inf, start)
    search = torch.optim.LBFGS(
        [x], max_iter=REFINED, max_eval=2 * REFINED, line_search_fn="strong_wolfe", history_size=50
    )

    def loss() -> Tensor:
        nonlocal spent, best
        spent += 1
        value = known.loss(run(double.model, leaves, x), y)
        made = torch.autograd.grad(value, [leaves[k] for k in trained], create_graph=True)
        weighted = [(m / sigma[k], gradient[k] / sigma[k]) for k, m in zip(trained, made, strict=True)]
        scale = sum((m * g).sum() for m, g in weighted) / sum(m.square().sum() for m, _ in weighted)
        misfit = sum((scale * m - g).square().sum() for m, g in weighted)
        total = misfit + ((x - mean) / SPREAD).square().sum()
        if float(total.detach()) < best[0]:
            best = float(total.detach()), x.detach().clone()
        (x.grad,) = torch.autograd.grad(total, [x])
        return total.detach()

    with undisturbed(double.model, x.device), torch.enable_grad():
        search.step(loss)
    return best[1], spent
