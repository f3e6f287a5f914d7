"""Separates a batch by the last layers' gradients, which determine what these layers read of each example.

The last layer's gradient is a sum of error signals times inputs, of rank B, so the inputs are M R with unknown M (B, B). The error
signals follow from them and the labels, and the gradient determines M, and its own scale behind a clip. Each fully connected layer
before it is a linear system then, as in R-GAP (Zhu and Blaschko, ICLR 2021).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement, islice, pairwise
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from fedgauge.attacks import label_restoration as labelling
from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Stream, Streams, Wave
from fedgauge.attacks.engine.compatibility import doubled
from fedgauge.attacks.engine.computation import (
    ACTIVATIONS,
    LayerCall,
    LayerCallRecorder,
    activation_between,
    layer_calls,
)
from fedgauge.attacks.engine.gradient_distances import each, squared
from fedgauge.attacks.engine.optimizers import lbfgs, minimise
from fedgauge.attacks.exact.analytic import slope_of
from fedgauge.attacks.exact.closed_form import EachByItself, Reader, check_steps
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import Energy, Prior, gaussian
from fedgauge.attacks.matching.search import LBFGSSearch
from fedgauge.client.gradient import gradient, without_running_stats
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.rng import generator
from fedgauge.client.transforms import UpdateDistribution
from fedgauge.client.update import Batch, Params, Update

LABELS = 64  # sets of labels that are tried
STARTS = 64  # of the separation with the likeliest labels
ALL_STARTS = 512  # of all sets of labels, if it fails
SPREAD = 3.0  # deviation of the logits at a start
STEPS = 100  # of a separation
SOLVED = 1e-6  # relative error of the last layer's gradient, below which a separation ends
SEPARATED = 1e-3  # above which it is not that of a batch without noise
NOISY = 0.03  # of the largest singular value: those beyond the batch's rank, above which noise is not weak
ROUNDING = 1e-7  # of a gradient in float32, relative to its root mean square
CERTAIN = (3.0, 10.0, 30.0, 100.0)  # standard deviations from zero, below which a ReLU counts as off at first
REPEATS = 5  # of a layer, whose inputs show which ReLUs were on
SHARE = 1e-3  # of the Gaussian prior, where the features do not determine the images
HISTORY = 50  # of L-BFGS
EXPLAINED = 0.3  # the largest part of an update that solved images may leave unexplained
SEARCHED = 1.0  # the same of searched images
READ = 1e-4  # the largest squared distance of solved images from the features, relative to their variance
LARGEST_NOISE = 1.5  # over its expected norm


@dataclass(frozen=True)
class feature_separation(EachByItself):
    """A batch of fewer examples than classes, by what the last fully connected layers read of each.

    Where these are fewer numbers than an example has, the images also match the gradients, under a Gaussian prior by class.
    Reads behind a clip of unknown scale. Under weak noise a search by the update's likelihood follows. Images are converged
    only if they have the features and leave at most 30 % of the update unexplained; searched ones, less than all but noise.
    """

    needs_derivative = True

    def readers(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> Sequence[Reader]:
        check_steps(known, known.chain.local.one_gradient, "a single gradient")
        if not is_cross_entropy(known.loss):
            raise ValueError("the attack needs a cross entropy as the loss")
        if known.batch_size >= known.classes:
            raise ValueError(f"{known.batch_size} examples are not fewer than {known.classes} classes")
        tail = tail_of(known.model, known.shape)
        return [partial(_read, tail, budget, stream) for stream in streams]


def tail_of(model: nn.Module, shape: Sequence[int]) -> list[tuple[LayerCall, str]]:
    """The fully connected layers at a network's end, from the last, each with the activation through which it reads the next.

    Raises:
        ValueError: the last layer is not fully connected, or has no bias.
    """
    above, *calls = reversed(layer_calls(model, shape))
    if not above.dense or above.input.ndim != 2 or not above.bias:
        raise ValueError(f"layer {above.name!r} ends the network, and a fully connected one with a bias has to")
    tail = []
    for below in calls:
        if not below.dense or below.input.ndim != 2:
            break
        try:
            tail.append((above, activation_between(below, above)))
        except ValueError:  # what lies between them is not known
            break
        above = below
    return [*tail, (above, "")]


def _read(
    tail: Sequence[tuple[LayerCall, str]], budget: Budget, stream: Stream, alone: Wave, known: Knowledge
) -> Reconstruction:
    size, pixels = known.batch_size, math.prod(known.shape)
    seen = {k: -t.double() / known.scale for k, t in alone.alone(0).items()}
    params = {k: t.double() for k, t in alone.params.items()}
    scaled = not labelling.literal(alone.alone(0), alone.params, known)
    y, inputs = _inputs(tail, seen, params, _labels(alone, known, seen[tail[0][0].bias]), scaled)
    features, double = _Features(1.0, tail[-1][0].weight, inputs), doubled(known)
    judged = partial(_judged, known=double, params=params, seen=seen, y=y, scaled=scaled)
    labelled, search = replace(known, labels=y[None]), LBFGSSearch(history=HISTORY, double=True)
    if features.inputs.shape[1] < pixels:
        objective = Objective(each(squared()), (features, gaussian(2 * SHARE / (size * pixels), by_class=True)))
        (result,) = GradientMatching(objective, search).reconstruct(alone, labelled, budget, [stream])
        return judged(result, most=SEARCHED)
    distances = features.distances(double, params)

    def evaluate(points: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        x = points.detach().requires_grad_()
        with torch.enable_grad():
            values = distances(x.view(-1, *known.shape), chosen)
            return values.detach(), torch.autograd.grad(values.sum(), x)[0]

    start = torch.randn(size, pixels, generator=stream("start", 0)).double()
    found = minimise(evaluate, start, torch.full((size,), budget.iterations), lbfgs(history=HISTORY))
    x, spent = known.examples(found.x.view(-1, *known.shape)).float(), int(found.spent.max())
    if known.chain.mean != known.chain:  # noise
        likeliest = GradientMatching(Objective(priors=(gaussian(by_class=True),)), search)
        (result,) = likeliest.continued(alone, labelled, budget, [stream], x[None])
        return judged(result, most=SEARCHED)
    distance = float(found.f.mean())
    result = Reconstruction(x, y, distance, spent, 0.0, "converged")
    if not distance < READ:
        reason = f"no images have the features found, up to {distance:.0e}"
        return replace(result, status="out_of_budget", reason=reason)
    return judged(result, most=EXPLAINED)


def _judged(
    result: Reconstruction, known: Knowledge, params: Params, seen: Update, y: Tensor, scaled: bool, most: float
) -> Reconstruction:
    """The result, which is not converged if its images leave more than this part of a gradient unexplained, and noise."""
    if result.x is None:
        return result
    client, sent = gradient(known.model, known.loss, known.normalise), [k for k in seen if k not in known.chain.hidden]
    found = client(params, Batch(result.x.double(), y), None)
    whole, made = (torch.cat([part[k].flatten() for k in sent]) for part in (seen, found))
    factor = max(0.0, float((whole @ made) / made.square().sum())) if scaled else 1.0
    density = known.chain.update_distribution or UpdateDistribution()
    noise = math.sqrt(density.variance * len(whole)) / known.scale
    rest, size = float((whole - factor * made).norm()), float(whole.norm())
    if rest < most * size + LARGEST_NOISE * noise:
        return result
    why = f"the images found leave {rest:.1e} of a gradient of {size:.1e} unexplained"
    return replace(result, status="out_of_budget", reason=why)


def _labels(alone: Wave, known: Knowledge, bias: Tensor) -> Iterator[Tensor]:
    """The labels (B,) that were given or are restored first, then others that include every class with a negative error signal."""
    yield labelling.restore(alone, known)[0]
    if known.labels is None:
        present = (bias < 0).nonzero().flatten()
        for more in combinations_with_replacement(range(len(bias)), max(0, known.batch_size - len(present))):
            yield torch.cat([present, torch.tensor(more, dtype=torch.int64)])[: known.batch_size]


@dataclass(frozen=True, eq=False)
class _Features(Prior):
    """The squared distance from what a fully connected layer reads (B, n), relative to its variance."""

    weight: float
    weight_name: str
    inputs: Tensor

    def distances(self, known: Knowledge, params: Params) -> Callable[[Tensor, Tensor], Tensor]:
        """The distances (N,) of normalised images (N, ...) from the examples of these numbers (N,)."""
        variance = self.inputs.var()

        def of(x: Tensor, chosen: Tensor) -> Tensor:
            with without_running_stats(known.model), LayerCallRecorder(params) as on:
                functional_call(known.model, params, (x,))
            (read,) = (call.input for call in on.calls if call.weight == self.weight_name)
            off: Tensor = read - self.inputs[chosen]
            return off.square().mean(1) / variance

        return of

    def bind(self, known: Knowledge, params: Params) -> Energy:
        distances, every = self.distances(known, params), torch.arange(len(self.inputs))
        return lambda x: distances(x, every).mean()


def _inputs(
    tail: Sequence[tuple[LayerCall, str]], gradient: Update, params: Params, labels: Iterable[Tensor], scaled: bool
) -> tuple[Tensor, Tensor]:
    """The labels (B,) that explain the last layer's gradient, and what the first layer of the tail reads of each example (B, n)."""
    some, rng = torch.stack(list(islice(labels, LABELS))), generator("starts of a separation")
    best = _separated(tail[0][0], gradient, params, some[:1].expand(STARTS, -1), rng, scaled)
    if not best.explains:
        every = some.repeat(ALL_STARTS // len(some), 1)
        best = _separated(tail[0][0], gradient, params, every, rng, scaled)
    if not best.explains:
        raise ValueError(f"the last layer's gradient is not that of {some.shape[1]} examples, up to {best.error:.0e}")
    inputs, signals = best.inputs, best.signals
    for (above, activation), (below, _) in pairwise(tail):
        passed = signals @ params[above.weight]
        deviation = best.noise * torch.linalg.pinv(signals.T).norm(dim=1, keepdim=True)
        least, wide = math.inf, gradient[below.weight]
        for certain in CERTAIN:
            value = inputs * (inputs.abs() > certain * deviation)
            for _ in range(REPEATS):
                guess = passed * slope_of(activation, value)
                read = torch.linalg.pinv(guess.T) @ wide
                value = ACTIVATIONS[activation](F.linear(read, params[below.weight], params.get(below.bias)))
                if (rest := float((guess.T @ read - wide).norm())) < least:
                    least, found = rest, (read, guess)
        inputs, signals = found
    return best.labels, inputs


class _Separation(NamedTuple):
    """The last layer's inputs (B, n), one for each example, and the error signals (B, classes) of its logits, divided by B.

    Args:
        error: of the layer's gradient, relative.
        explains: the error is rounding's, or that of weak noise.
        noise: standard deviation of the gradient's entries.
    """

    error: float
    explains: bool
    noise: float
    labels: Tensor
    inputs: Tensor
    signals: Tensor


def _separated(
    last: LayerCall, gradient: Update, params: Params, y: Tensor, rng: Generator, scaled: bool
) -> _Separation:
    """Separate examples with labels y (N, B), each from a random start; return the best separation.

    Args:
        scaled: the gradient has an unknown factor, which the error signals then have too.
    """
    weight, bias, size = params[last.weight], params[last.bias], y.shape[1]
    whole = torch.cat([gradient[last.weight], gradient[last.bias][:, None]], 1)  # the bias reads 1 of each example
    left, values, right = torch.linalg.svd(whole, full_matrices=False)
    beyond = float(values[size:].norm() / values[0])  # no batch of this size explains it
    if not beyond < NOISY:
        raise ValueError(f"the last layer's gradient is not that of {size} examples, up to {beyond:.0e}")
    left, right = left[:, :size] * values[:size], right[:size]
    truth, logits = F.one_hot(y, len(weight)).double(), right[:, :-1] @ weight.T

    def signals(mix: Tensor, truth: Tensor) -> Tensor:
        found = (torch.softmax(mix @ logits + bias, 1) - truth) / size
        made = found.T @ mix
        return found * ((made * left).sum() / made.square().sum()) if scaled else found

    def off(mix: Tensor, truth: Tensor) -> Tensor:
        return torch.cat([((signals(mix, truth).T @ mix - left) / values[0]).flatten(), mix @ right[:, -1] - 1])

    guess = torch.softmax(bias + SPREAD * torch.randn(truth.shape, generator=rng, dtype=torch.float64), 2)
    mix = torch.linalg.pinv((guess - truth).mT) @ left
    mix = mix / (mix @ right[:, -1])[..., None]
    mix, error = _least_squares(off, mix, truth)
    best = int(error.argmin())
    rest = error[best] * values[0] / math.sqrt(size * (len(whole) + 1 - size))
    noise = float(rest.hypot(ROUNDING * whole.square().mean().sqrt()))
    found = mix[best] @ right[:, :-1], signals(mix[best], truth[best])
    return _Separation(float(error[best]), float(error[best]) < max(SEPARATED, beyond), noise, y[best], *found)


def _least_squares(off: Callable[[Tensor, Tensor], Tensor], x: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """N points x with the least |off(x, given)| by Levenberg and Marquardt's method, until one is solved, and their errors."""
    every, slopes = vmap(off), vmap(jacrev(off))
    rest, damping = every(x, given), x.new_full((len(x), 1, 1), 1e-3)
    for _ in range(STEPS):
        slope = slopes(x, given).flatten(2)
        square = slope.mT @ slope
        damped = square + damping * square.diagonal(dim1=1, dim2=2).clamp_min(1e-30).diag_embed()
        step = torch.linalg.solve_ex(damped, slope.mT @ rest[..., None]).result  # not finite: no step
        other = x - step.view_as(x)
        changed = every(other, given)
        better = changed.square().sum(1) < rest.square().sum(1)
        x, rest = torch.where(better[:, None, None], other, x), torch.where(better[:, None], changed, rest)
        damping = (damping * torch.where(better, 0.1, 10.0)[:, None, None]).clamp_min(1e-12)
        error = rest.norm(dim=1).nan_to_num(math.inf)
        best = error.argmin()
        if error[best] < SOLVED and not better[best]:
            break
    return x, error
