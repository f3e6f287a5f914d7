"""Transforms: what a defense derives from, and what it says of the update's distribution."""

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.func import vmap

from fedgauge.client.components import Checked
from fedgauge.client.update import Batch, Params, Transform, Update, UpdateFn, average


@dataclass(frozen=True)
class UpdateDistribution:
    """Distribution of a seen update around its noise-free form, in units of the update: p(seen | x) as far as known.

    Args:
        sigma: standard deviation of normal noise in every entry.
        scale: of Laplace noise in every entry.
        sparse: entries that are exactly zero were dropped and carry no information.
        shrink: the noise-free form is this part of a visible entry's expectation (an unknown mask shows keep of them).
        signed: only the signs of the noisy values are seen.
        hidden: parameters that a defense has changed in an unknown way: gradient matching leaves them out.
    """

    sigma: float = 0.0
    scale: float = 0.0
    sparse: bool = False
    shrink: float = 1.0
    signed: bool = False
    hidden: frozenset[str] = frozenset()

    @property
    def noisy(self) -> bool:
        """Check for added noise of a known density."""
        return self.sigma > 0 or self.scale > 0

    @property
    def variance(self) -> float:
        """The variance of both noises together in an entry."""
        return self.sigma**2 + 2 * self.scale**2


TransformState = dict[str, Tensor]  # what a client keeps from one round to the next; it never travels


class Link(Checked, ABC):
    """A transform that a scenario can name: a frozen dataclass with its arguments as fields.

    Attributes:
        each: whether it takes a step's examples one by one, as `per_example` does.
        bounds: whether the norm of its result is bounded, and finite, whatever it gets.
        one_at_a_time: whether it takes one update at a time, outside of torch.func's transforms.
    """

    each: ClassVar[bool] = False
    bounds: ClassVar[bool] = False
    one_at_a_time: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, compute: UpdateFn) -> UpdateFn:
        """Wrap a client."""

    @property
    def mean(self) -> Transform:
        """The differentiable, noise-free form; a link that draws noise or has no useful derivative overrides it."""
        return self

    @property
    def deployed(self) -> Transform:
        """The form that a client of a deployment runs; noise that is safe there, and slower, overrides it."""
        return self

    @property
    def remembers(self) -> bool:
        """Check for state that a client keeps between rounds; its later updates cannot be recomputed without it."""
        return False

    def bound(self, memory: TransformState, prefix: str) -> Transform:
        """The transform that reads and writes a client's memory, under names that begin with prefix."""
        return self

    def stays(self, name: str) -> bool:
        """Check whether the client never sends the parameter or buffer of this name."""
        return False

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """The distribution behind the link, from the one before it; None: not known in closed form."""
        return before if replace(before, hidden=frozenset()) == UpdateDistribution() else None


def noise_free(transform: Transform) -> Transform:
    """The differentiable, noise-free form of any transform: its `mean`, else the transform itself."""
    if isinstance(transform, Link | per_example):
        return transform.mean  # not by getattr, which hides an AttributeError in a user's own
    mean: Transform = getattr(transform, "mean", transform)
    return mean


def is_per_example(link: Transform) -> bool:
    """Check that a link takes a step's examples one by one."""
    return isinstance(link, per_example) or (isinstance(link, Link) and link.each)


def is_identity(link: Transform) -> bool:
    """Check that a link does nothing: it returns the same function that it was given."""

    def probe(params: Params, batch: Batch, rng: Generator | None) -> Update:
        return params

    return link(probe) is probe


def transformed() -> bool:
    """Check for a call inside a transform of torch.func, such as vmap: tensors there may have no values."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # torch has no public name for it


@lru_cache  # of bounded size, as the words may hold what a server sent
def _say_once(words: str) -> None:
    logging.getLogger("fedgauge").warning(words)


@dataclass(frozen=True)
class per_example:
    """Apply a transform to each example's update by itself, then average: what clipping in DP-SGD needs."""

    inner: Transform

    @property
    def mean(self) -> "per_example":
        return per_example(noise_free(self.inner))

    @property
    def deployed(self) -> "per_example":
        return per_example(getattr(self.inner, "deployed", self.inner))

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        defended = self.inner(compute)

        def average(params: Params, batch: Batch, rng: Generator | None) -> Update:
            def one(x: Tensor, y: Tensor) -> Update:
                return defended(params, Batch(x[None], y[None]), rng)

            try:
                updates: Update = vmap(one, randomness="different")(batch.x, batch.y)
            except Exception as error:  # of a network under vmap; one by one, an example fails for itself alone
                if transformed() or isinstance(error, torch.OutOfMemoryError):
                    raise
                _say_once(f"examples are taken one by one, as torch.func.vmap fails: {type(error).__name__}: {error}")
                each = [one(x, y) for x, y in zip(*batch, strict=True)]
                updates = {k: torch.stack([update[k] for update in each]) for k in each[0]}
            return {k: u.mean(0) for k, u in updates.items()}

        return average


class UpdateTransform(Link):
    """A transform of a finished update (or, before `local_sgd`, of a gradient): a defense writes only `apply`."""

    @abstractmethod
    def apply(self, update: Update, rng: Generator | None) -> Update:
        """The defended update, as new tensors; all randomness comes from rng."""

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        return lambda params, batch, rng: self.apply(compute(params, batch, rng), rng)


class BatchTransform(Link):
    """A transform of the examples: before `local_sgd` of each step's, after it once of the round's.

    The attacker's target is then ambiguous: the original examples, or the transformed ones that the client trained on.
    """

    @abstractmethod
    def transform(self, batch: Batch, rng: Generator | None) -> Batch:
        """As many examples, as new tensors; all randomness comes from rng (None: an attacker, who has no generator)."""

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        return lambda params, batch, rng: compute(params, self.transform(batch, rng), rng)


class StatefulTransform(Link):
    """A transform of a finished update with a state that lasts from round to round, e.g. error feedback.

    By itself it acts as in a client's first round; `Chain.with_state` binds it to a client's state.
    """

    @property
    def remembers(self) -> bool:
        return bool(self.initial({"": torch.zeros(())}))

    @abstractmethod
    def initial(self, update: Update) -> Update:
        """The memory before the first round, for updates of this form."""

    @abstractmethod
    def advance(self, update: Update, memory: Update, rng: Generator | None) -> tuple[Update, Update]:
        """The defended update and the memory afterwards, as new tensors."""

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        return lambda params, batch, rng: self._next({}, "", compute(params, batch, rng), rng)  # each is a first round

    def bound(self, memory: TransformState, prefix: str) -> Transform:
        return lambda compute: lambda params, batch, rng: self._next(memory, prefix, compute(params, batch, rng), rng)

    def _next(self, memory: TransformState, prefix: str, update: Update, rng: Generator | None) -> Update:
        before = {k: memory[prefix + k] for k in update if prefix + k in memory} or self.initial(update)
        sent, after = self.advance(update, before, rng)
        memory.update({prefix + k: t.detach() for k, t in after.items()})
        return sent


@dataclass(frozen=True)
class GroupMean(Link):
    """The mean of several clients' updates, each computed from its part of the examples; last in the chain."""

    members: int  # clients, with equally many examples each, one client's after the other's
    together: bool = False  # their noise-free mean equals one client's update on all the examples: no split is needed

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        if self.together:
            return compute

        def mean(params: Params, batch: Batch, rng: Generator | None) -> Update:
            size = len(batch.x) // self.members
            parts = zip(batch.x.split(size), batch.y.split(size), strict=True)
            return average([compute(params, Batch(x, y), rng) for x, y in parts], [1] * self.members)

        return mean

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """The mean of independent noise is smaller and nearly normal; sums of signs or of masked entries have no closed form."""
        if before.sparse or before.signed or before.shrink != 1:
            return None
        return replace(before, sigma=math.sqrt(before.variance / self.members), scale=0.0)
