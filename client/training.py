"""The gradient of the loss, and `local_sgd`: plain SGD steps that turn it into an update."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedgauge.client.components import Count, NotNegative, Positive
from fedgauge.client.models.losses import loss_of
from fedgauge.client.transforms import Link, UpdateDistribution
from fedgauge.client.update import Batch, Loss, Params, Update, UpdateFn

LOCAL_TRAININGS = ("local_sgd", "local_training", "scaffold")  # the links that turn gradients into an update, by name


class StochasticLayer(nn.Module):
    """A layer that draws random numbers in its forward pass and may add to the loss: the base of a defense of the model.

    Attributes:
        rng: source of its draws; None: it uses their mean.
        noise: standard normal draws to use instead, e.g. an attacker's variable; None: its own.
        penalty: a scalar that the latest pass adds to the loss; None: nothing.
        drawn: how many numbers it draws for an example: noise is (B, drawn); 0: unknown.
    """

    rng: Generator | None = None
    noise: Tensor | None = None
    penalty: Tensor | None = None
    drawn: int = 0

    def __getstate__(self) -> dict[str, object]:
        """Without the state of a pass: its graph cannot be copied."""
        return {k: v for k, v in self.__dict__.items() if k not in ("rng", "noise", "penalty")}


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; afterwards restore each layer's mode."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def drawing(model: nn.Module, rng: Generator | None) -> Iterator[Sequence[StochasticLayer]]:
    """Give the stochastic layers a generator, and dropout a seed from it; afterwards the state of the pass is dropped."""
    layers = [m for m in model.modules() if isinstance(m, StochasticLayer)]
    drops = rng is not None and any(isinstance(m, _DropoutNd) and m.training and m.p for m in model.modules())
    for layer in layers:
        layer.rng = rng
    try:
        with torch.random.fork_rng(devices=[], enabled=drops):
            if drops:
                torch.manual_seed(int(torch.randint(2**62, (), generator=rng)))
            yield layers
    finally:
        for layer in layers:
            layer.rng = layer.penalty = None


def gradient(
    model: nn.Module,
    loss: Loss = F.cross_entropy,
    normalise: Callable[[Tensor], Tensor] | None = None,
    track: bool = False,
    plain: bool = False,
) -> UpdateFn:
    """The bare client: the loss's gradient by every parameter, summed or averaged over the batch as the loss does.

    Penalties of the model's `StochasticLayer` layers are part of the loss. Models that torch.func refuses (custom autograd
    functions of the old form, some layers) are differentiated by plain autograd.

    Args:
        model: the update has the names of its parameters; its buffers are used as they are.
        loss: (logits (B, classes), y) -> scalar.
        normalise: applied to x before the model, so that a batch stays in [0, 1] pixels.
        track: whether BatchNorm in train mode updates its running statistics, as at a client; not at an attacker.
        plain: plain autograd at once. It does not work under vmap.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> batch = Batch(torch.tensor([[2.0]]), torch.tensor([[0.0]]))
        >>> gradient(model, loss=lambda logits, y: (logits - y).sum())({"weight": torch.ones(1, 1)}, batch, None)
        {'weight': tensor([[2.]])}
    """

    def compute(params: Params, batch: Batch, rng: Generator | None) -> Update:
        x = batch.x if normalise is None else normalise(batch.x)

        with without_running_stats(model) as tracking, drawing(model, rng) as layers:
            held = {} if track else _kept(model)

            def objective(at: Params) -> Tensor:
                value = loss_of(loss, functional_call(model, {**at, **held}, (x,)), batch.y, x)
                for layer in layers:
                    value = value if layer.penalty is None else value + layer.penalty
                return value

            update = _plain(objective, params) if plain else _by_func(objective, params)
        if track and tracking:
            with torch.no_grad():
                functional_call(model, params, (x,))
        return update

    return compute


def _kept(model: nn.Module) -> Params:
    """Copies of the buffers that layers in train mode may move (spectral norm), as an attacker's passes must not."""
    moving = [m for m in model.modules() if m.training and m._buffers and not isinstance(m, _NormBase)]
    held = {id(b) for m in moving for b in m.buffers(recurse=False)}
    return {name: b.clone() for name, b in model.named_buffers() if id(b) in held} if held else {}


def _by_func(objective: Callable[[Params], Tensor], params: Params) -> Update:
    """By torch.func, which works under vmap; by plain autograd where it refuses the model."""
    try:
        return dict(grad(objective)(params))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise
        return _plain(objective, params)


def _plain(objective: Callable[[Params], Tensor], params: Params) -> Update:
    at = {k: p if p.requires_grad else p.detach().requires_grad_() for k, p in params.items()}
    asked = torch.is_grad_enabled()
    with torch.enable_grad():
        value = objective(at)
        # as torch.func: differentiable only by what the caller can differentiate by
        further = asked and bool(_leaves(value) - {p for k, p in at.items() if not params[k].requires_grad})
        slopes = torch.autograd.grad(value, list(at.values()), create_graph=further, materialize_grads=True)
    return dict(zip(at, slopes, strict=True))


def _leaves(value: Tensor) -> set[Tensor]:
    """The tensors by which a value can be differentiated."""
    found: set[Tensor] = set()
    seen, waiting = set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found |= {node.variable} if hasattr(node, "variable") else set()
        waiting += [before for before, _ in node.next_functions]
    return found


@contextmanager
def without_running_stats(model: nn.Module) -> Iterator[Sequence[nn.Module]]:
    """Norms in train mode normalise by the batch without moving their running statistics, which grad and vmap refuse.

    Yields the layers with held statistics.
    """
    norms = [m for m in model.modules() if isinstance(m, _NormBase)]
    tracking = [m for m in norms if m.training and m.track_running_stats]
    held = [(m._buffers, m.running_mean, m.running_var) for m in tracking if isinstance(m, _InstanceNorm)]
    for layer in tracking:
        layer.track_running_stats = False
    for buffers, _, _ in held:  # an instance norm would move them all the same
        buffers.update(running_mean=None, running_var=None)
    try:
        yield tracking
    finally:
        for layer in tracking:
            layer.track_running_stats = True
        for buffers, mean, variance in held:
            buffers.update(running_mean=mean, running_var=variance)


@dataclass(frozen=True)
class local_sgd(Link):
    """Local training: turns a gradient function into a weight-change function (FedSGD is one step).

    Args:
        rate: learning rate of the local steps, > 0.
        steps: local steps, >= 1. E epochs over n examples in batches of b are E * n / b steps.
        batch_size: examples a step; step t takes slice t of the round's batch, in order, then from the start again; the
            last slice may be smaller. Default: the whole batch in every step.
        proximal_mu: FedProx's proximal weight: mu * (theta - theta_global) is added to each step's gradient.

    Example:
        >>> local_sgd(rate=0.1, steps=4, batch_size=8).gradients(32)
        4
    """

    rate: Positive
    steps: Count = 1
    batch_size: Count | None = None
    proximal_mu: NotNegative = 0.0

    @property
    def accumulated(self) -> int:
        """Number of gradients that are averaged for one step."""
        return 1

    @property
    def plain(self) -> bool:
        """Check that each step is one rate times the gradient of the next slice, plus the proximal proximal."""
        return True

    @property
    def one_gradient(self) -> bool:
        """Check that the update is one gradient, times -rate."""
        return self.steps == 1

    @property
    def adaptive(self) -> bool:
        """Check for per-entry step sizes (Adam), with which the update hides the gradient's magnitudes."""
        return False

    @property
    def words(self) -> str:
        """The training in words."""
        return f"{self.steps} local step{'s' if self.steps > 1 else ''} of SGD"

    def gradients(self, size: int) -> int:
        """Count the gradients of training on a batch of this size."""
        return sum(map(len, islice(self.order(size, None), self.steps)))

    def order(self, size: int, rng: Generator | None) -> Iterator[tuple[slice | Tensor, ...]]:
        """The rows of each gradient of each step, without end; rng None: each epoch in the order given."""
        length = self.batch_size or size
        return cycle([(slice(i, i + length),) for i in range(0, size, length)])

    def rate_at(self, step: int) -> float:
        """The learning rate of a step."""
        return self.rate

    def direction(self, g: Update, here: Params, memory: dict[str, Update], step: int) -> Update:
        """The move of a step against which the weights go, for a rate of 1.

        Args:
            memory: what the optimizer keeps between the steps of a round; it is updated.
        """
        return g

    @property
    def scale(self) -> float:
        """Change of the weights by one unit of a constant gradient: update ~ -scale * gradient."""
        return self.rate * self.steps

    def start(self, params: Params, step: int) -> Params:
        """The weights to which a step adds what the gradients have moved so far."""
        return params

    @property
    def beside(self) -> Update | None:
        """The update's part that is no gradient; None: there is none."""
        return None

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """Noise of each step is scaled by the rate; over several steps its sum is nearly normal."""
        if self.steps == 1:
            return replace(before, sigma=self.rate * before.sigma, scale=self.rate * before.scale)
        if before.sparse or before.signed:
            return None
        variance = before.sigma**2 + 2 * before.scale**2
        return UpdateDistribution(sigma=self.rate * math.sqrt(self.steps * variance), hidden=before.hidden)

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        def train(params: Params, batch: Batch, rng: Generator | None) -> Update:
            # accumulates the change itself: theta + change - theta would cost 2.5e-6 of rounding
            change: Update = {}
            memory: dict[str, Update] = {}
            for step, parts in enumerate(islice(self.order(len(batch.x), rng), self.steps)):
                start = self.start(params, step)
                here = {k: (p + change[k]).to(p.dtype) for k, p in start.items()} if change else start
                found = [compute(here, Batch(batch.x[rows], batch.y[rows]), rng) for rows in parts]
                g = found[0]
                if self.accumulated > 1:
                    g = {k: sum((other[k] for other in found[1:]), t) / self.accumulated for k, t in g.items()}
                if self.proximal_mu and change:
                    proximal = self.proximal_mu * len(parts) / self.accumulated
                    g = {k: t + proximal * change[k] for k, t in g.items()}
                rate = self.rate_at(step)
                moved = self.direction(g, here, memory, step)
                change = {k: change[k] - rate * t if change else -rate * t for k, t in moved.items()}
            beside = self.beside
            return change if beside is None else {k: t + beside[k] for k, t in change.items()}

        return train
