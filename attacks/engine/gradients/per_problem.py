"""Gradients of many problems that share weights, in one forward and backward pass, differentiable once more.

The model runs on all problems' examples as one batch, with one copy of the weights. A layer's input and the loss's
derivative by its output then give its gradient for each problem: a batched product. For a fully connected layer, or a
convolution with few positions, this product need not be formed, since inner products follow from the two factors. After
local steps, a problem's weights are the shared ones plus its own change. vmap gives the same result, several times slower.
"""

import math
from collections.abc import Callable
from typing import cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedgauge.attacks.engine.batch_limiter import exhausted
from fedgauge.attacks.engine.gradients.factored import Gradients, formed, is_large, plus
from fedgauge.attacks.engine.gradients.layers import Examples, GradientRecorder, LayerUse
from fedgauge.client.chain import Chain
from fedgauge.client.gradient import StochasticLayer, without_running_stats
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.losses import is_cross_entropy, loss_of
from fedgauge.client.transforms import UpdateTransform, is_identity, per_example
from fedgauge.client.update import Loss, Params, Transform, Update


def gradients(
    model: nn.Module, params: Params, x: Tensor, y: Tensor, factor: float, factors: bool, loss: Loss = F.cross_entropy
) -> Gradients:
    """The gradients (P, ...) of P problems' losses by every parameter, times `factor`.

    Args:
        x: (P, B, ...), the model's input; requires grad, as the results will.
        y: (P, B) labels, or (P, B, classes) probabilities.
        factors: return large gradients that are products as FactoredGradient.
        loss: the mean of the losses of its examples.

    Raises:
        Unsupported: the model uses an unknown layer, or mixes examples.
    """
    return _gradients(model, params, {}, Examples(x, y), factor, factors, loss)


def local_training_changes(
    model: nn.Module,
    params: Params,
    x: Tensor,
    y: Tensor,
    local: local_sgd,
    factors: bool,
    loss: Loss = F.cross_entropy,
) -> Gradients:
    """The changes (P, ...) of the weights by local steps on the whole batch; arguments as in `gradients`."""
    examples = Examples(x, y)
    change: Gradients = {}
    for i in range(local.steps):
        step = _gradients(model, local.start(params, i), change, examples, -local.rate, True, loss)
        kept = 1 - local.rate * local.proximal_mu
        change = {k: plus(t, change.get(k), kept, params[k].shape) for k, t in step.items()}
    if (beside := local.beside) is not None:
        return {k: formed(t, params[k].shape) + beside[k] for k, t in change.items()}
    return change if factors else {k: formed(t, params[k].shape) for k, t in change.items()}


def _gradients(
    model: nn.Module, params: Params, moves: Gradients, examples: Examples, factor: float, factors: bool, loss: Loss
) -> Gradients:
    """`gradients` at weights that differ from params by each problem's own `moves`, if there are any."""
    problems = examples.problems
    logits, uses = _run(model, params, moves, examples)
    if is_cross_entropy(loss):
        total = F.cross_entropy(logits, examples.y, reduction="sum")
        if logits.dim() > 2:
            total = total / logits[0, 0].numel()  # a mean over a mask's pixels
    else:
        total = loss_of(loss, logits, examples.y, examples.x) * len(logits)
    total = total * (factor / examples.size)
    signals = torch.autograd.grad(total, [use.out for use in uses], create_graph=True, materialize_grads=True)
    result: Gradients = {}
    for use, signal in zip(uses, signals, strict=True):
        for name, part in use.parts(signal, problems).items():
            # added up if a weight is used more than once
            result[name] = plus(part, result.get(name), 1, params[name].shape)
    unused = params.keys() - result.keys()
    result |= {name: logits.new_zeros(problems, *params[name].shape) for name in unused}
    return {k: result[k] if factors and is_large(result[k]) else formed(result[k], p.shape) for k, p in params.items()}


# models that change a layer's output in place, or read its strides (`view`), as their first run showed
_overwriting: WeakSet[nn.Module] = WeakSet()
_reading_strides: WeakSet[nn.Module] = WeakSet()


def _run(model: nn.Module, params: Params, moves: Gradients, examples: Examples) -> tuple[Tensor, list[LayerUse]]:
    """Logits, and every use of a parameter; runs again on copies if the model overwrites a layer's output or reads its strides."""
    strict = model in _reading_strides
    recorder = GradientRecorder(params, moves, examples, copies=model in _overwriting, contiguous=strict)
    try:
        with recorder, without_running_stats(model):
            logits: Tensor = functional_call(model, params, (examples.x,))
    except RuntimeError as error:
        if strict or exhausted(error) or all(use.out.is_contiguous() for use in recorder.uses):
            raise
        _reading_strides.add(model)
        return _run(model, params, moves, examples)
    if any(use.out._version != use.version for use in recorder.uses):
        _overwriting.add(model)
        return _run(model, params, moves, examples)
    return logits, recorder.uses


def examples_are_independent(model: nn.Module, params: Params, x: Tensor) -> bool:
    """True if the first problem of x (P, B, ...) has the same logits without the others, and no layer draws noise."""
    if any(isinstance(m, StochasticLayer) for m in model.modules()):  # its term of the loss is no cross-entropy either
        return False
    with torch.no_grad(), without_running_stats(model):
        together = functional_call(model, params, (x.flatten(0, 1),))[: x.shape[1]]
        alone = functional_call(model, params, (x[0],))
    size = float(alone.abs().max())
    return math.isfinite(size) and torch.allclose(together, alone, rtol=1e-3, atol=1e-5 * size)


Step = Callable[[nn.Module, Params, Tensor, Tensor, bool], Gradients]


def whole_batch_update(
    chain: Chain, loss: Loss = F.cross_entropy, rng: torch.Generator | None = None, by_example: bool = False
) -> Step | None:
    """Compute updates in one pass, for a chain with whole-batch local steps; None for any other chain.

    Other links may change the finished update, or the only gradient. The loss is the mean of its examples' losses.

    Args:
        rng: of the links' draws, separate ones for each problem.
        by_example: the first links may take the examples of a batch one by one.
    """
    steps, place = chain.local, chain.links.index(chain.local)
    parts = chain.links[:place], chain.links[place + 1 :]
    before, after = ([k for k in part if not is_identity(k)] for part in parts)
    each = [k.inner for k in before if by_example and isinstance(k, per_example)]
    whole = before[len(each) :]
    if not steps.plain or steps.batch_size is not None or (before and steps.steps > 1):
        return None
    if not before and not after:
        return lambda model, params, x, y, factors: local_training_changes(model, params, x, y, steps, factors, loss)
    if not all(isinstance(link, UpdateTransform) for link in [*each, *whole, *after]):
        return None

    def through(links: list[Transform], found: Gradients) -> Update:
        for link in cast(list[UpdateTransform], links):
            found = {**vmap(lambda one, link=link: link.apply(one, rng), randomness="different")(found)}
        return cast(Update, found)

    def update(model: nn.Module, params: Params, x: Tensor, y: Tensor, factors: bool) -> Gradients:
        if not before:
            return {**through(after, local_training_changes(model, params, x, y, steps, False, loss))}
        size = x.shape[1]
        if each:
            x, y = x.flatten(0, 1)[:, None], y.flatten(0, 1)[:, None]
        found = through(each, gradients(model, params, x, y, 1.0, False, loss))
        if each:
            found = {k: t.view(-1, size, *t.shape[1:]).mean(1) for k, t in found.items()}
        return {**through(after, {k: -steps.rate * t for k, t in through(whole, {**found}).items()})}

    return update
