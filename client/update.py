"""A client is a function (params, batch, rng) -> update; defenses and local training wrap it.

The position of a transform in the chain says what it acts on: before `local_sgd` on the gradient of a local step (inside
`per_example` on each example's gradient), after it on the finished update.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

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
class UpdateDistribution:
    """How a seen update is distributed around its noise-free form, in units of the update: p(seen | x) as far as known.

    Args:
        sigma: standard deviation of normal noise in every entry.
        scale: of Laplace noise in every entry.
        sparse: entries that are exactly zero were dropped and tell nothing.
        shrink: the noise-free form is this part of a visible entry's expectation (an unknown mask shows keep of them).
        signed: only the signs of the noisy values are seen.
        hidden: parameters whose updates a defense has disturbed in a way that nobody can tell: left out of a match.
    """

    sigma: float = 0.0
    scale: float = 0.0
    sparse: bool = False
    shrink: float = 1.0
    signed: bool = False
    hidden: frozenset[str] = frozenset()

    @property
    def noisy(self) -> bool:
        """Whether noise of a known density was added."""
        return self.sigma > 0 or self.scale > 0


TransformState = dict[str, Tensor]  # what a client keeps from one round to the next; it never travels


class Link(ABC):
    """A transform that a scenario can name: a frozen dataclass whose fields are its arguments.

    Attributes:
        each: whether it takes a step's examples one by one, as `per_example` does.
    """

    each: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, compute: UpdateFn) -> UpdateFn:
        """Wrap a client."""

    @property
    def mean(self) -> Transform:
        """The differentiable, noise-free form; a link that draws noise or has no useful derivative overrides it."""
        return self

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """What the link makes of the distribution that comes in; None: not known in closed form."""
        return before if replace(before, hidden=frozenset()) == UpdateDistribution() else None


def noise_free(transform: Transform) -> Transform:
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
        return Chain(tuple(noise_free(link) for link in self.links))

    @property
    def update_distribution(self) -> UpdateDistribution | None:
        """The distribution of what the chain uploads around its noise-free form; None: not known in closed form."""
        known: UpdateDistribution | None = UpdateDistribution()
        for link in self.links:
            if isinstance(link, Link) and known is not None:
                known = link.update_distribution(known)
            elif noise_free(link) != link or known != UpdateDistribution():
                return None
        return known

    @property
    def visible(self) -> "Chain":
        """The chain without the links that only drop entries: for an attacker who compares what is left.

        Which entries a guess would lose says nothing of those that were seen.
        """
        return Chain(tuple(link for link in self.links if not _drops(link)))

    @property
    def parts(self) -> int:
        """Clients in the update, where it matters which of them has which examples; else 1."""
        return next((link.members for link in self.links if isinstance(link, GroupMean) and not link.together), 1)

    def slice_of(self, batch_size: int) -> int:
        """Examples that one local step of one client takes, of the so many behind an update."""
        own = batch_size // self.parts
        return min(self.local.batch_size or own, own)

    @property
    def hidden(self) -> frozenset[str]:
        """Parameters whose updates one of the links hides, whatever the others make of them."""
        return frozenset().union(*map(_hidden, self.links))

    def remembering(self, memory: TransformState) -> "Chain":
        """The chain of a client that has been here before: its links with memory read it from there and leave it there."""
        return Chain(
            tuple(
                link.bound(memory, f"{i}.") if isinstance(link, StatefulTransform) else link
                for i, link in enumerate(self.links)
            )
        )

    def check(self) -> None:
        """Refuse an order of links that makes no sense.

        Raises:
            ValueError: in a sentence that says which link belongs where.
        """
        local = self.links.index(self.local)
        for i, link in enumerate(self.links):
            if not is_per_example(link):
                continue
            if isinstance(link, per_example) and is_per_example(link.inner):
                raise ValueError(f"{_named(link, i)} takes examples one by one already: leave each = true out")
            if i > local:
                raise ValueError(f"{_named(link, i)} takes examples one by one, so it belongs before local_sgd")
            for j, nearer in enumerate(self.links[:i]):
                if isinstance(nearer, UpdateTransform | BatchTransform) and not is_identity(nearer):
                    raise ValueError(
                        f"{_named(link, i)} takes examples one by one, {_named(nearer, j)}, nearer the gradient, all of them "
                        "together: put it behind, or let it take them one by one, too (each = true)"
                    )

    @property
    def local(self) -> "local_sgd":
        """The chain's one `local_sgd`; ValueError when there is none or more than one."""
        found = [link for link in self.links if isinstance(link, local_sgd)]
        if len(found) != 1:
            raise ValueError(
                f"a chain needs exactly one local_sgd, which turns gradients into an update; this one has {len(found)}"
            )
        return found[0]


def _drops(link: Transform) -> bool:
    known = link.update_distribution(UpdateDistribution()) if isinstance(link, Link) else None
    return known == UpdateDistribution(sparse=True)


def _hidden(link: Transform) -> frozenset[str]:
    if isinstance(link, per_example):
        return _hidden(link.inner)
    if isinstance(link, Chain):
        return link.hidden
    known = link.update_distribution(UpdateDistribution()) if isinstance(link, Link) else None
    return frozenset() if known is None else known.hidden


def is_per_example(link: Transform) -> bool:
    """Whether a link takes a step's examples one by one."""
    return isinstance(link, per_example) or (isinstance(link, Link) and link.each)


def trained_on(chain: Chain, compute: UpdateFn, params: Params, batch: Batch, rng: Generator | None) -> Batch | None:
    """A batch as a client's chain makes it before it trains; None where it leaves the examples as they are.

    Where they are made anew in each local step: as the first steps saw them, until each example was seen once.

    Args:
        compute: the gradient at the chain's inner end; rng: the client's.
    """
    first = next((i for i, link in enumerate(chain.links) if isinstance(link, BatchTransform)), None)
    if first is None:
        return None
    batches: list[Batch] = []

    def watched(compute: UpdateFn) -> UpdateFn:
        def noted(params: Params, batch: Batch, rng: Generator | None) -> Update:
            batches.append(batch)
            return compute(params, batch, rng)

        return noted

    # not at the gradient: there the examples may come one by one, inside vmap
    Chain((*chain.links[:first], watched, *chain.links[first:]))(compute)(params, batch, rng)
    count = len(batch.x) // len(batches[0].x)
    assert len(batches[0].x) * count == len(batch.x)
    return concatenate(batches[:count])


def is_identity(link: Transform) -> bool:
    """Whether a link does nothing: it hands back the very function it was given."""
    return link(_probe) is _probe


def _named(link: Transform, place: int) -> str:
    return f"#{place + 1} ({type(link.inner if isinstance(link, per_example) else link).__name__})"


def _probe(params: Params, batch: Batch, rng: Generator | None) -> Update:
    raise AssertionError("it only shows which links do anything at all")


def chain(*links: Transform) -> Chain:
    """Compose transforms: `chain(clip(1.0), local_sgd(0.1))(gradient(model))` is a whole client."""
    return Chain(links)


class StochasticLayer(nn.Module):
    """A layer that draws in its forward pass and may add to the loss: what a defense of the model is made of.

    Attributes:
        rng: where its draws come from; None: it passes their mean on.
        noise: standard normal draws to use instead, e.g. an attacker's variable; None: its own.
        penalty: what its latest pass adds to the loss, a scalar; None: nothing.
        drawn: numbers that it draws for an example: noise is (B, drawn); 0: not said.
    """

    rng: Generator | None = None
    noise: Tensor | None = None
    penalty: Tensor | None = None
    drawn: int = 0

    def __getstate__(self) -> dict[str, object]:
        """What belongs to a pass is not copied with the layer: its graph could not be."""
        return {k: v for k, v in self.__dict__.items() if k not in ("rng", "noise", "penalty")}


@contextmanager
def drawing(model: nn.Module, rng: Generator | None) -> Iterator[Sequence[StochasticLayer]]:
    """Hand a generator to the layers that draw; what they keep of a pass is dropped afterwards."""
    layers = [m for m in model.modules() if isinstance(m, StochasticLayer)]
    for layer in layers:
        layer.rng = rng
    try:
        yield layers
    finally:
        for layer in layers:
            layer.rng = layer.penalty = None


def gradient(
    model: nn.Module,
    loss: Loss = F.cross_entropy,
    normalise: Callable[[Tensor], Tensor] | None = None,
    track: bool = False,
) -> UpdateFn:
    """The bare client: the loss's gradient by every parameter, summed or averaged over the batch as the loss does.

    What the model's own `StochasticLayer` layers add to the loss counts.

    Args:
        model: its named parameters give the update its names; its buffers are used as they stand.
        loss: (logits (B, classes), y) -> scalar.
        normalise: applied to x before the model, so that a batch stays in [0, 1] pixels.
        track: whether BatchNorm in train mode moves its running statistics, as at a client; an attacker's does not.
    """

    def compute(params: Params, batch: Batch, rng: Generator | None) -> Update:
        x = batch.x if normalise is None else normalise(batch.x)

        with without_running_stats(model) as tracking, drawing(model, rng) as layers:

            def objective(at: Params) -> Tensor:
                value = loss(functional_call(model, at, (x,)), batch.y)
                for layer in layers:
                    value = value if layer.penalty is None else value + layer.penalty
                return value

            update = dict(grad(objective)(params))
        if track and tracking:
            with torch.no_grad():
                functional_call(model, params, (x,))
        return update

    return compute


@contextmanager
def without_running_stats(model: nn.Module) -> Iterator[Sequence[nn.Module]]:
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
        return per_example(noise_free(self.inner))

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        defended = self.inner(compute)

        def average(params: Params, batch: Batch, rng: Generator | None) -> Update:
            def one(x: Tensor, y: Tensor) -> Update:
                return defended(params, Batch(x[None], y[None]), rng)

            updates = vmap(one, randomness="different")(batch.x, batch.y)
            return {k: u.mean(0) for k, u in updates.items()}

        return average


class UpdateTransform(Link):
    """A transform of a finished update (or, before `local_sgd`, of a gradient): a defense writes only `apply`."""

    @abstractmethod
    def apply(self, update: Update, rng: Generator | None) -> Update:
        """The defended update, as new tensors; all randomness comes from rng."""

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        def defended(params: Params, batch: Batch, rng: Generator | None) -> Update:
            return self.apply(compute(params, batch, rng), rng)

        return defended


class BatchTransform(Link):
    """A transform of the examples: before `local_sgd` of each step's, after it once of the round's.

    What is trained on has two truths then: the original and what came out here.
    """

    @abstractmethod
    def transform(self, batch: Batch, rng: Generator | None) -> Batch:
        """As many examples, as new tensors; all randomness comes from rng (None: an attacker's, who has none)."""

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        def defended(params: Params, batch: Batch, rng: Generator | None) -> Update:
            return compute(params, self.transform(batch, rng), rng)

        return defended


class StatefulTransform(Link):
    """A transform of a finished update with a memory that lasts from round to round, e.g. error feedback.

    By itself it is a client in its first round; `Chain.remembering` binds it to a client's memory.
    """

    @abstractmethod
    def initial(self, update: Update) -> Update:
        """The memory before the first round, for updates of this form."""

    @abstractmethod
    def advance(self, update: Update, memory: Update, rng: Generator | None) -> tuple[Update, Update]:
        """The defended update and the memory afterwards, as new tensors."""

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        def first(params: Params, batch: Batch, rng: Generator | None) -> Update:
            return self.bound({}, "")(compute)(params, batch, rng)  # each call is a first round

        return first

    def bound(self, memory: TransformState, prefix: str) -> Transform:
        """The transform that reads and writes a client's memory, under names that begin with prefix."""

        def wrap(compute: UpdateFn) -> UpdateFn:
            def defended(params: Params, batch: Batch, rng: Generator | None) -> Update:
                update = compute(params, batch, rng)
                before = {k: memory[prefix + k] for k in update if prefix + k in memory} or self.initial(update)
                sent, after = self.advance(update, before, rng)
                memory.update({prefix + k: t.detach() for k, t in after.items()})
                return sent

            return defended

        return wrap


@dataclass(frozen=True)
class GroupMean(Link):
    """Several clients as one, at the end of their chain: the mean of what each makes of its part of the examples.

    Args:
        members: clients, with equally many examples each, one's after the other's.
        together: their noise-free mean is what one client would make of all the examples, so that it need not be taken apart.
    """

    members: int
    together: bool = False

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        if self.together:
            return compute

        def mean(params: Params, batch: Batch, rng: Generator | None) -> Update:
            size = len(batch.x) // self.members
            parts = zip(batch.x.split(size), batch.y.split(size), strict=True)
            return average([compute(params, Batch(x, y), rng) for x, y in parts], [1] * self.members)

        return mean

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """Independent noise averages out, and is nearly normal; sums of signs or of masked entries have no closed form."""
        if before.sparse or before.signed or before.shrink != 1:
            return None
        return replace(before, sigma=math.sqrt((before.sigma**2 + 2 * before.scale**2) / self.members), scale=0.0)


def average(updates: Sequence[Update], weights: Sequence[float]) -> Update:
    """The weighted mean of several updates (or other tensors) of the same names, in their dtypes."""
    parts = [weight / sum(weights) for weight in weights]
    return {
        k: torch.stack([update[k] * part for update, part in zip(updates, parts, strict=True)]).sum(0).to(t.dtype)
        for k, t in updates[0].items()
    }


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Several batches as one, in their order."""
    return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def norm(update: Update) -> Tensor:
    """Euclidean norm over all entries of an update, a scalar; safe to differentiate at zero."""
    squares = torch.stack([t.square().sum() for t in update.values()]).sum()
    return torch.where(squares > 0, torch.where(squares > 0, squares, 1.0).sqrt(), 0.0)


def relative_error(guess: Update, seen: Update) -> float:
    """|guess - seen| / |seen|, in float64."""
    off = norm({name: guess[name].double() - t.double() for name, t in seen.items()})
    return float(off / norm({name: t.double() for name, t in seen.items()}))
