"""A client is a function (params, batch, rng) -> update; defenses and local training wrap it.

The position of a transform in the chain says what it acts on: before `local_sgd` on the gradient of a local step (inside
`per_example` on each example's gradient), after it on the finished update.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

Params = dict[str, Tensor]
Update = dict[str, Tensor]


class Batch(NamedTuple):
    """Examples and labels: x (B, C, H, W) in [0, 1]; y (B,) int64, or (B, classes) probabilities in an attacker's hands."""

    x: Tensor
    y: Tensor


UpdateFn = Callable[[Params, Batch, Generator | None], Update]
Transform = Callable[[UpdateFn], UpdateFn]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Conditional:
    """How a seen update is distributed around its noise-free form, in units of the update: p(seen | x) as far as known.

    Args:
        sigma: standard deviation of normal noise in every entry.
        scale: of Laplace noise in every entry.
        sparse: entries that are exactly zero were dropped and tell nothing.
        shrink: the noise-free form is this part of a visible entry's expectation (an unknown mask shows keep of them).
        signed: only the signs of the noisy values are seen.
    """

    sigma: float = 0.0
    scale: float = 0.0
    sparse: bool = False
    shrink: float = 1.0
    signed: bool = False

    @property
    def noisy(self) -> bool:
        """Whether noise of a known density was added."""
        return self.sigma > 0 or self.scale > 0


class Link(ABC):
    """A transform that a scenario can name: a frozen dataclass whose fields are its arguments."""

    @abstractmethod
    def __call__(self, compute: UpdateFn) -> UpdateFn:
        """Wrap a client."""

    @property
    def mean(self) -> Transform:
        """The differentiable, noise-free form; a link that draws noise or has no useful derivative overrides it."""
        return self

    def conditional(self, before: Conditional) -> Conditional | None:
        """What the link makes of the distribution that comes in; None: not known in closed form."""
        return before if before == Conditional() else None


def mean_of(transform: Transform) -> Transform:
    """The differentiable, noise-free form of any transform: a Link's `.mean`, else the transform itself."""
    return transform.mean if isinstance(transform, Link | Chain | per_example) else transform


@dataclass(frozen=True)
class Chain:
    """Transforms applied in the order a gradient travels: the first is nearest the gradient."""

    links: tuple[Transform, ...]

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        for link in self.links:
            compute = link(compute)
        return compute

    @property
    def mean(self) -> "Chain":
        return Chain(tuple(mean_of(link) for link in self.links))

    @property
    def conditional(self) -> Conditional | None:
        """The distribution of what the chain uploads around its noise-free form; None: not known in closed form."""
        known: Conditional | None = Conditional()
        for link in self.links:
            if isinstance(link, Link) and known is not None:
                known = link.conditional(known)
            elif mean_of(link) != link or known != Conditional():
                return None
        return known

    @property
    def local(self) -> "local_sgd":
        """The chain's one `local_sgd`; ValueError when there is none or more than one."""
        found = [link for link in self.links if isinstance(link, local_sgd)]
        if len(found) != 1:
            raise ValueError(
                f"a chain needs exactly one local_sgd, which turns gradients into an update; this one has {len(found)}"
            )
        return found[0]


def chain(*links: Transform) -> Chain:
    """Compose transforms: `chain(clip(1.0), local_sgd(0.1))(gradient(model))` is a whole client."""
    return Chain(links)


def gradient(
    model: nn.Module,
    loss: Loss = F.cross_entropy,
    normalise: Callable[[Tensor], Tensor] | None = None,
    track: bool = False,
) -> UpdateFn:
    """The bare client: the loss's gradient by every parameter, summed or averaged over the batch as the loss does.

    Args:
        model: its named parameters give the update its names; its buffers are used as they stand.
        loss: (logits (B, classes), y) -> scalar.
        normalise: applied to x before the model, so that a batch stays in [0, 1] pixels.
        track: whether BatchNorm in train mode moves its running statistics, as at a client; an attacker's does not.
    """

    def compute(params: Params, batch: Batch, rng: Generator | None) -> Update:
        x = batch.x if normalise is None else normalise(batch.x)

        def objective(at: Params) -> Tensor:
            return loss(functional_call(model, at, (x,)), batch.y)

        with untracked(model) as tracking:
            update = dict(grad(objective)(params))
        if track and tracking:
            with torch.no_grad():
                functional_call(model, params, (x,))
        return update

    return compute


@contextmanager
def untracked(model: nn.Module) -> Iterator[Sequence[nn.Module]]:
    """BatchNorm in train mode normalises by the batch without moving its running statistics, which grad and vmap refuse.

    Gives the layers that it stills.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    tracking = [m for m in norms if m.training and m.track_running_stats]
    for layer in tracking:
        layer.track_running_stats = False
    try:
        yield tracking
    finally:
        for layer in tracking:
            layer.track_running_stats = True


@dataclass(frozen=True)
class local_sgd(Link):
    """Local training: turns a gradient function into a weight-change function (FedSGD is one step).

    Args:
        rate: learning rate of the local steps, > 0.
        steps: local steps, >= 1. E epochs over n examples in batches of b are E * n / b steps.
        batch_size: examples a step; step t takes slice number t of the round's batch, in order and round again.
            Default: the whole batch in every step.
        proximal_mu: FedProx's proximal weight: mu * (theta - theta_global) is added to each step's gradient.
    """

    rate: float
    steps: int = 1
    batch_size: int | None = None
    proximal_mu: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"rate must be above 0, got {self.rate}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not self.proximal_mu >= 0:
            raise ValueError(f"proximal_mu must not be negative, got {self.proximal_mu}")

    @property
    def scale(self) -> float:
        """How far one unit of a constant gradient moves the weights: update ~ -scale * gradient."""
        return self.rate * self.steps

    def conditional(self, before: Conditional) -> Conditional | None:
        """Noise of each step is scaled by the rate; over several steps its sum is nearly normal."""
        if self.steps == 1:
            return replace(before, sigma=self.rate * before.sigma, scale=self.rate * before.scale)
        if before.sparse or before.signed:
            return None
        variance = before.sigma**2 + 2 * before.scale**2
        return Conditional(sigma=self.rate * math.sqrt(self.steps * variance))

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        def train(params: Params, batch: Batch, rng: Generator | None) -> Update:
            # the change itself is accumulated, never theta + change - theta, which would cost 2.5e-6 of rounding
            change: Update = {}
            for step in range(self.steps):
                here = {k: p + change[k] for k, p in params.items()} if change else params
                g = compute(here, self._slice(batch, step), rng)
                if self.proximal_mu and change:
                    g = {k: t + self.proximal_mu * change[k] for k, t in g.items()}
                change = {k: change[k] - self.rate * t if change else -self.rate * t for k, t in g.items()}
            return change

        return train

    def _slice(self, batch: Batch, step: int) -> Batch:
        size = len(batch.x)
        if self.batch_size is None or self.batch_size >= size:
            return batch
        slices = size // self.batch_size
        first = (step % slices) * self.batch_size
        return Batch(batch.x[first : first + self.batch_size], batch.y[first : first + self.batch_size])


@dataclass(frozen=True)
class per_example:
    """Apply a transform to each example's update by itself, then average: the place of clipping in DP-SGD."""

    inner: Transform

    @property
    def mean(self) -> "per_example":
        return per_example(mean_of(self.inner))

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        defended = self.inner(compute)

        def average(params: Params, batch: Batch, rng: Generator | None) -> Update:
            def one(x: Tensor, y: Tensor) -> Update:
                return defended(params, Batch(x[None], y[None]), rng)

            updates = vmap(one, randomness="different")(batch.x, batch.y)
            return {k: u.mean(0) for k, u in updates.items()}

        return average


class OnUpdate(Link):
    """A transform of a finished update (or, before `local_sgd`, of a gradient): a defense writes only `apply`."""

    @abstractmethod
    def apply(self, update: Update, rng: Generator | None) -> Update:
        """The defended update, as new tensors; all randomness comes from rng."""

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        def defended(params: Params, batch: Batch, rng: Generator | None) -> Update:
            return self.apply(compute(params, batch, rng), rng)

        return defended


def norm(update: Update) -> Tensor:
    """Euclidean norm over all entries of an update, a scalar; safe to differentiate at zero."""
    squares = torch.stack([t.square().sum() for t in update.values()]).sum()
    return torch.where(squares > 0, torch.where(squares > 0, squares, 1.0).sqrt(), 0.0)
