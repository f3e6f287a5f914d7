"""Reads one example off a chain of layers, from the last layer to the first (after R-GAP, Zhu and Blaschko, ICLR 2021).

The last layer's gradient has rank one, which gives its input and the error signal of the logits. The input of each layer below
solves two sets of linear equations: its weight gradient, sum_p D_p x_p^T over error signals D and patches x, and its output,
from inverting the activation. They are weighted by their precision. A clip scales gradients and error signals alike.

A shortcut's block, GELU, SiLU or GroupNorm bends the equations; the same two sets are then solved by Gauss-Newton steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from fedgauge.attacks.base import Knowledge, Reconstruction, Wave
from fedgauge.attacks.engine.batch_limiter import raise_if_exhausted
from fedgauge.attacks.engine.compatibility import doubled
from fedgauge.attacks.engine.computation import LayerCall, LayerCallRecorder, along, close, run, undisturbed
from fedgauge.attacks.exact.closed_form import ClosedForm, Reader, check_one_example, labels_of
from fedgauge.attacks.gaussian_prior import GaussianPrior, class_means, deviations
from fedgauge.attacks.matching.priors import mahalanobis
from fedgauge.attacks.problem import Problem, Unattackable
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Params, Update, relative_error

LARGEST = 4096  # values that a layer reads, up to which its equations are solved in seconds
LARGEST_BENT = 2400  # the same where they are solved again at each step
STEPS = 30  # of Gauss and Newton's method
DAMPING = 1e-2  # of the first step, relative to the root mean square slope
DAMPED = 12  # tries of one step, each more damped
SOLVED = 100.0  # standard deviations, root mean square, up to which bent equations are solved
REACH = 64.0  # values before an activation lie between -REACH and REACH
HALVINGS = 60
ROUNDING = 1e-7  # of a gradient in float32, relative to its root mean square
DETERMINED = 1e4  # least diagonal entry of the triangular factor from which the prior changes nothing
CERTAIN = 5.0  # standard deviations from an activation's flat part beyond which a value lies outside
EXACT = 1e-5  # relative error of the update, below which nothing is refined
INEXACT = 1e-3  # relative error above which the example is not the one behind the update
REFINED = 100  # steps of the refinement
AT_ONCE = 256  # unit vectors whose patches are formed together


@dataclass(frozen=True, eq=False)
class _Step:
    """One operation of the chain on one example x (1, ...).

    Args:
        kind: "layer" if it has a trained weight, "affine", "activation" or "bent".
        shape, result: of its input and output, without the batch.
        names: trained parameters of an operation, or of all those round a shortcut.
        settings: of a convolution, as F.unfold takes them; None: fully connected.
    """

    name: str
    kind: str
    apply: Callable[[Params, Tensor], Tensor]
    shape: tuple[int, ...]
    result: tuple[int, ...]
    names: tuple[str, ...] = ()
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


class _Operation(NamedTuple):
    """One operation on values that follow from the example: given by their places; apply: from all values by place."""

    name: str
    given: Sequence[int]
    apply: Callable[[Params, Mapping[int, Tensor]], Tensor]
    weights: tuple[str, ...]
    call: LayerCall | None


class _Recorder(LayerCallRecorder):
    """Records each operation on what follows from the example."""

    def __init__(self, params: Params, x: Tensor) -> None:
        super().__init__(params)
        self.params, self.derived = params, [x]
        self.operations: list[_Operation] = []  # the one at k made the derived one at k + 1

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        given = [i for i, t in enumerate(self.derived) if any(t is other for other in leaves)]
        before, versions = len(self.calls), {id(t): t._version for t in leaves}
        result = super().__torch_function__(func, types, args, kwargs)
        if not given or not isinstance(result, Tensor):
            return result
        weights = [self.names[id(t)] for t in leaves if id(t) in self.names]
        name = weights[0].rpartition(".")[0] or weights[0] if weights else getattr(func, "__name__", str(func))
        place = next((i for i in given if result is self.derived[i]), None)
        if place is not None and result._version == versions[id(result)]:
            return result
        apply, call = self._replayed(func, args, kwargs, given), next(iter(self.calls[before:]), None)
        self.operations.append(_Operation(name, given, apply, tuple(weights), call))
        if place is None:
            result = result.clone()
        else:
            self.derived[place] = result.clone()  # in place: the same object has a new value
        self.derived.append(result)
        return result

    def _replayed(self, func: Any, args: Any, kwargs: Any, given: Sequence[int]) -> Callable[..., Tensor]:
        places = {id(self.derived[i]): i for i in given}

        def apply(params: Params, values: Mapping[int, Tensor]) -> Tensor:
            def put(t: Any) -> Any:
                if id(t) in places:
                    return values[places[id(t)]].clone()
                if isinstance(t, Tensor) and t.is_floating_point():
                    some = next(iter(values.values()))
                    return params[self.names[id(t)]] if id(t) in self.names else t.to(some)
                return t

            result: Tensor = func(*tree_map(put, args), **tree_map(put, kwargs))
            return result

        return apply

    def steps(self) -> list[_Step]:
        """The operations between values that every path passes, as one step each."""
        steps, start = [], 0
        for end in range(1, len(self.derived)):
            if self.derived[end].is_floating_point() and all(min(o.given) >= end for o in self.operations[end:]):
                steps.append(self._step(start, end))
                start = end
        return steps

    def _step(self, start: int, end: int) -> _Step:
        within = self.operations[start:end]

        def apply(params: Params, x: Tensor) -> Tensor:
            values = {start: x}
            for k, operation in enumerate(within, start + 1):
                values[k] = operation.apply(params, values)
            return values[end]

        names = tuple(dict.fromkeys(name for operation in within for name in operation.weights))
        shape, result = (tuple(self.derived[i].shape[1:]) for i in (start, end))
        name = next((operation.name for operation in within if operation.weights), within[-1].name)
        step = _Step(name, "bent" if len(within) > 1 and names else "", apply, shape, result, names)
        if len(within) > 1 or (call := within[0].call) is None:
            return step
        return _layer(step, call, self.params[call.weight].shape[2:])


def _layer(step: _Step, call: LayerCall, kernel: Sequence[int]) -> _Step:
    """The step as a layer's call; kernel: a convolution's, else empty."""
    settings = {k: call.settings.get(k, default) for k, default in (("dilation", 1), ("padding", 0), ("stride", 1))}
    if call.settings.get("groups", 1) != 1 or isinstance(settings["padding"], str):
        return replace(step, kind="bent")
    convolution = {"kernel_size": kernel, **settings} if kernel else None
    return replace(step, kind="layer", weight=call.weight, bias=call.bias, settings=convolution)


def _decline(layer: str, why: str) -> NoReturn:
    remedy = "the attack reads layer by layer; use a search, such as inverting_gradients"
    raise Unattackable(Problem("no chain", f"operation {layer!r}", why, remedy))


class _Stage(NamedTuple):
    """Affine operations, the last one possibly bent, from one activation to the next one, if any."""

    steps: tuple[_Step, ...]
    activation: _Step | None

    @property
    def name(self) -> str:
        return next((s.name for s in self.steps if s.weight), self.steps[0].name)

    @property
    def bent(self) -> bool:
        return self.steps[-1].kind == "bent"

    @property
    def whole(self) -> "_Stage":
        """The stage with a branched activation as its last operation, bent; else the stage."""
        if self.activation is None or self.activation.kind != "branched":
            return self
        return _Stage((*self.steps, replace(self.activation, kind="bent")), None)

    @property
    def size(self) -> int:
        return math.prod(self.steps[0].shape)

    @property
    def limit(self) -> int:
        """The largest size that is solved in seconds."""
        return LARGEST_BENT if self.whole.bent else LARGEST

    def apply(self, params: Params, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step.apply(params, x)
        return x

    def open(self, params: Params, last: bool) -> int:
        """Dimensions of its input that cannot be determined, by counting equations."""
        equations = 0 if last else math.prod(self.steps[-1].result)
        for step in self.steps:
            if step.kind == "bent":
                equations += sum(params[name].numel() for name in step.names)
            elif step.weight:
                rows = params[step.weight].flatten(1)
                positions = math.prod(step.result) // len(rows)
                equations += min(min(len(rows), positions) * rows.shape[1], math.prod(step.shape))
        return max(0, self.size - equations)


def stages_of(model: nn.Module, shape: Sequence[int]) -> list[_Stage]:
    """The network as a chain of stages, from the example to the logits, in the order of its computation.

    Raises:
        Unattackable: it is no such chain; the first operation that does not fit is named.
    """
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    x, other = torch.rand(2, 1, *shape, generator=generator("made-up example")).to(next(iter(params.values())))
    with torch.no_grad(), undisturbed(model, x.device), _Recorder(params, x) as recorder:
        try:
            run(model, params, x)
            again = run(model, params, other)
        except Exception as error:  # a user's network may raise anything for one example
            raise_if_exhausted(error)
            _decline("forward", f"fails on one example ({type(error).__name__})")
    own = {k: p.double().cpu() for k, p in params.items()}
    steps = [_classified(step, own) for step in recorder.steps()]
    stages: list[_Stage] = []
    now: list[_Step] = []
    used: set[str] = set()
    for step in steps:
        if own_weights := set(step.names if step.kind == "bent" else (step.weight,)) - {""}:
            if own_weights & used:
                _decline(step.name, "is used more than once")
            used |= own_weights
        if step.kind == "branched" and not now:
            step = replace(step, kind="bent")
        if step.kind not in ("activation", "branched"):
            now.append(step)
        elif not now and not (stages and stages[-1].activation is None):
            _decline(step.name, "follows another activation")
        elif not now:
            stages[-1] = stages[-1]._replace(activation=step)
        if now and step.kind in ("activation", "branched", "bent"):
            stages.append(_Stage(tuple(now), None if step.kind == "bent" else step))
            now = []
    if not now or not now[-1].weight or now[-1].settings is not None or len(now[-1].shape) != 1:
        _decline(steps[-1].name if steps else "forward", "is the last that can be followed, and not a linear layer")
    stages.append(_Stage(tuple(now), None))
    _check_sizes(stages, own)
    value = other.double()
    for step in steps:
        value = step.apply(own, value)
    if not isinstance(again, Tensor) or not close(value, again.double()):
        _decline("forward", "cannot be repeated operation by operation on another example")
    return stages


def _check_sizes(stages: Sequence[_Stage], params: Params) -> None:
    """Decline what is too large to solve, for the last layer that leaves dimensions open, if there is one."""
    large = [stage for stage in stages if stage.size > stage.limit]
    if not large:
        return
    for stage in reversed(stages):
        if count := stage.open(params, stage is stages[-1]):
            _decline(stage.name, f"leaves at least {count:,} of {stage.size:,} dimensions open")
    _decline(large[-1].name, f"reads {large[-1].size:,} values, and {large[-1].limit:,} can be solved in seconds")


def _classified(step: _Step, params: Params) -> _Step:
    if step.kind == "layer" or (step.kind and math.prod(step.shape) > LARGEST_BENT):
        return step
    rng, apply = generator("made-up values"), partial(step.apply, params)
    a, b = (3 * torch.randn(1, *step.shape, generator=rng, dtype=torch.float64) for _ in range(2))
    if step.kind:
        return _differentiable(step, params, torch.stack([a, b]))
    of_a, of_b, of_zero, of_sum = (apply(t) for t in (a, b, torch.zeros_like(a), a + b))
    if bool((of_a + of_b - of_zero - of_sum).abs().max() <= 1e-9 * (1 + of_sum.abs().max())):
        return replace(step, kind="affine")
    chosen = torch.rand(a.shape, generator=rng) < 0.5
    if of_a.shape == a.shape and torch.allclose(
        apply(torch.where(chosen, a, b)), torch.where(chosen, of_a, of_b), rtol=1e-12, atol=0
    ):
        grid = torch.linspace(-8, 8, 129, dtype=torch.float64)
        values = (apply(torch.full_like(a, float(v))) for v in grid)
        if all(bool((after >= before).all()) for before, after in pairwise(values)):
            return replace(step, kind="activation")
        return _differentiable(replace(step, kind="branched"), params, torch.stack([a, b]))
    elif of_a.numel() < a.numel() and not step.names:
        _decline(step.name, "keeps some of its values, which the gradient does not name")
    return _differentiable(replace(step, kind="bent"), params, torch.stack([a, b]))


def _differentiable(step: _Step, params: Params, values: Tensor) -> _Step:
    def gradients(x: Tensor) -> Any:
        out, back, *_ = vjp(lambda own: step.apply({**params, **own}, x), {k: params[k] for k in step.names})
        return out, back(torch.ones_like(out))

    try:
        along(gradients, values[0], values)
    except RuntimeError as error:
        _decline(step.name, f"has no second derivative ({type(error).__name__})")
    return step


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
    grid = torch.linspace(-REACH, REACH, 513, dtype=torch.float64)
    low = grid[torch.stack([apply(torch.full_like(value, float(v))) for v in grid]).argmin(0)]
    high = torch.full_like(value, REACH)
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
    """Weighted least squares of equations (rows, n + 1), right sides last, with a prior of standard deviation 1."""
    n = mean.numel()
    prior = torch.cat([torch.eye(n, dtype=torch.float64), mean.view(-1, 1)], 1)
    triangle = torch.linalg.qr(torch.cat(list(equations)), mode="r").R
    if len(triangle) < n or bool(triangle.diagonal()[:n].abs().min() < DETERMINED):
        triangle = torch.linalg.qr(torch.cat([triangle, prior]), mode="r").R
    factor = triangle[:n, :n]
    value = torch.linalg.solve_triangular(factor, triangle[:n, n:], upper=True)
    inverse = torch.linalg.solve_triangular(factor, torch.eye(n, dtype=torch.float64), upper=True)
    return _Estimate(value.view(1, *stage.steps[0].shape), factor, inverse.norm(dim=1).view(1, *stage.steps[0].shape))


def _linear(
    stage: _Stage, delta: Tensor, above: _Estimate | None, gradient: Update, params: Params, noise: float, mean: Tensor
) -> tuple[_Estimate, Tensor]:
    """Solve a stage's linear equations; and the error signals (1, ...) at its input."""
    equations = []
    read, out = _affine(stage, params)
    if above is not None:
        equations.append(above.factor @ torch.cat([out[1:], above.value.flatten()[None] - out[:1]]).T)
    *signals, delta = _signals_in(stage, params, delta)
    for step, values, signal in zip([s for s in stage.steps if s.weight], read, signals, strict=True):
        if (own := gradient.get(step.weight)) is not None:
            equations.append(_gradient_equations(step, values, signal, own) / _deviation(own, noise))
    return _solved(stage, equations, mean), delta


def _bent(
    stage: _Stage, delta: Tensor, known: _Estimate, gradient: Update, params: Params, noise: float, mean: Tensor,
    start: _Estimate | None,
) -> tuple[_Estimate, bool]:  # fmt: skip
    """Solve a stage's equations by damped Gauss-Newton steps; and whether they are solved.

    Args:
        known: the stage's output.
        start: the solution if each unit's input is on the increasing branch; None: starts at the mean.
    """
    names = (name for step in stage.steps for name in step.names if name in gradient)
    wanted = {k: gradient[k] / _deviation(gradient[k], noise) for k in names}
    units = torch.eye(mean.numel(), dtype=torch.float64)

    def misfits(x: Tensor) -> Tensor:
        def apply(own: Params) -> Tensor:
            return stage.apply({**params, **own}, x.view(1, *stage.steps[0].shape))

        out, back, *_ = vjp(apply, {k: params[k] for k in wanted})
        (made,) = back(delta.view_as(out))
        each = (made[k] / _deviation(gradient[k], noise) - t for k, t in wanted.items())
        return torch.cat([known.factor @ (out - known.value).flatten(), *(t.flatten() for t in each)])

    def cost(x: Tensor) -> float:
        return float(misfits(x).square().sum() + (x - mean.flatten()).square().sum())

    def slopes(x: Tensor) -> Tensor:
        return torch.cat([along(misfits, x, part) for part in units.split(AT_ONCE)]).T

    x, damping = (mean if start is None else start.value).flatten(), DAMPING
    now, enough = cost(x), SOLVED**2 * len(misfits(x))
    if start is not None and now <= enough:
        return start, True
    for _ in range(STEPS):
        slope, before = slopes(x), now
        square = slope.T @ slope + units
        down = slope.T @ misfits(x) + x - mean.flatten()
        for _ in range(DAMPED):
            pull = damping**2 * square.diagonal().mean()
            factor, failed = torch.linalg.cholesky_ex(square + pull * units)
            tried = x - torch.cholesky_solve(down[:, None], factor).flatten()
            if not failed and (reached := cost(tried)) < now:
                x, now, damping = tried, reached, damping / 9
                break
            damping *= 4
        if now > (0.5 if now <= enough else 0.999) * before:
            break
    slope = slopes(x)
    estimate = _solved(stage, [torch.cat([slope, (slope @ x - misfits(x))[:, None]], 1)], mean)
    better = cost(estimate.value.flatten()) < now
    return (estimate if better else estimate._replace(value=x.view_as(estimate.value))), now <= enough


def _deviation(own: Tensor, noise: float) -> float:
    return math.hypot(noise, ROUNDING * float(own.square().mean().sqrt())) or 1.0


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
        centre = mean if stage is stages[0] else torch.zeros(stage.steps[0].shape, dtype=torch.float64)
        whole, above, signals = stage.whole, known, delta
        if above is not None and stage.activation is not None:
            before, slope = _inverse(partial(stage.activation.apply, params), above.value, above.deviation)
            above, signals = _Estimate(before, above.factor * slope.flatten(), above.deviation), delta * slope
        if not stage.bent:
            estimate, through = _linear(stage, signals, above, gradient, params, noise, centre)
        if whole.bent:
            assert known is not None and above is not None  # a fully connected layer is the last
            start = None if stage.bent else estimate
            behind = (signals, above) if stage.bent else (delta, known)
            estimate, solved = _bent(whole, *behind, gradient, params, noise, centre, start)
            if not solved:
                notes.append(f"layer {stage.name!r}: its equations are not solved")
            out, back, *_ = vjp(partial(whole.apply, params), estimate.value)
            (through,) = back(behind[0].view_as(out))
        known, delta = estimate, through
        dimensions = float(known.deviation.square().sum())
        if dimensions >= 0.5:
            notes.append(f"layer {stage.name!r}: {dimensions:,.0f} of {known.value.numel():,} dimensions stay open")
    assert known is not None
    return known.value, noise, notes


@dataclass(frozen=True)
class recursive(ClosedForm):
    """One example from a chain of convolutions and fully connected layers, layer by layer by least squares (R-GAP).

    Reads behind a clip of unknown scale. Under noise a short search by the update's likelihood follows, under
    a Gaussian prior by class from auxiliary images.
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
    """The likeliest input, by L-BFGS from the closed form; and the evaluations. Auxiliary images with classes are the prior."""
    double, trained = doubled(known), [k for k in gradient]
    sigma = {k: _deviation(t, noise) for k, t in gradient.items()}
    leaves = {k: p.clone().requires_grad_(k in gradient) for k, p in params.items()}
    low, high = known.normalise(torch.zeros(known.shape)).double(), known.normalise(torch.ones(known.shape)).double()
    prior = None
    if known.auxiliary is not None and not y.is_floating_point():
        with suppress(ValueError):  # the auxiliary images do not differ
            fitted = GaussianPrior.fit(deviations(known.public))
            prior = partial(mahalanobis, known, class_means(known.public, y).flatten(1), fitted)
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
        total = misfit + (2 * prior(x) if prior else (x - mean).square().sum())
        if float(total.detach()) < best[0]:
            best = float(total.detach()), x.detach().clone()
        (x.grad,) = torch.autograd.grad(total, [x])
        return total.detach()

    with undisturbed(double.model, x.device), torch.enable_grad():
        search.step(loss)
    return best[1], spent
