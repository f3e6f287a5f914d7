"""A chain: the transforms of a client, in the order a gradient travels.

A transform before `local_sgd` (or `local_training`, its general form) acts on the gradient of a local step (inside
`per_example` on each example's gradient). A transform after it acts on the finished update.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import Generator

from fedgauge.client.local_training import ControlledSGD, local_sgd
from fedgauge.client.transforms import (
    BatchTransform,
    GroupMean,
    Link,
    StatefulTransform,
    TransformState,
    UpdateDistribution,
    UpdateTransform,
    is_identity,
    is_per_example,
    noise_free,
    per_example,
)
from fedgauge.client.update import Batch, Params, Transform, Update, UpdateFn, concatenate

FAR = 2.0**60  # the norm with which a canary's direction meets the bound: beyond any, and its square is a float32


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
    def levels_in_norm(self) -> int:
        """Levels in the norm of each uploaded tensor, to which the last link rounds an otherwise undefended update; else 0."""
        before = Chain(self.links[:-1]).update_distribution if len(self.links) > 1 else None
        levels: int = getattr(self.links[-1], "levels_in_norm", 0)
        return levels if before == UpdateDistribution() else 0

    @property
    def deployed(self) -> "Chain":
        """The chain as a client of a deployment runs it, without chains within it."""
        forms = [getattr(link, "deployed", link) for link in self.links]
        return Chain(tuple(part for form in forms for part in (form.links if isinstance(form, Chain) else (form,))))

    @property
    def remembers(self) -> bool:
        """Check for a link that keeps state between rounds."""
        return any(isinstance(link, Link) and link.remembers for link in self.links)

    def stays(self, name: str) -> bool:
        """Check whether the client never sends the parameter or buffer of this name."""
        return any(isinstance(link, Link) and link.stays(name) for link in self.links)

    @property
    def one_at_a_time(self) -> bool:
        """Check for a link that takes one update at a time, so that clients cannot be computed together."""
        return any(part.one_at_a_time for part in _parts(self.links))

    @property
    def private(self) -> bool:
        """Check for noise after a bound: nothing else that the client sends may then depend on its examples."""
        bounded = False
        for part in _parts(self.links):
            bounded = bounded or part.bounds
            if bounded and (known := _alone(part)) is not None and known.noisy:
                return True
        return False

    @property
    def visible(self) -> "Chain":
        """The chain without the links that only drop entries: for an attacker who compares the entries that are left.

        Which entries the links would drop from a guess says nothing about those that were seen.
        """
        return Chain(tuple(link for link in self.links if _alone(link) != UpdateDistribution(sparse=True)))

    @property
    def parts(self) -> int:
        """Clients in the update, where it matters which client holds which examples; otherwise 1."""
        return next((link.members for link in self.links if isinstance(link, GroupMean) and not link.together), 1)

    def slice_of(self, batch_size: int) -> int:
        """Examples in one local step of one client, where batch_size examples are behind an update."""
        own = batch_size // self.parts
        return min(self.local.batch_size or own, own)

    @property
    def hidden(self) -> frozenset[str]:
        """Parameters that a link hides."""
        known = map(_alone, _parts(self.links))
        return frozenset().union(*(found.hidden for found in known if found is not None))

    def with_state(self, memory: TransformState) -> "Chain":
        """The same chain with its stateful links bound to a client's state, which they read and update."""
        links: list[Transform] = []
        behind: list[Transform] = []
        for i, link in enumerate(self.links):
            links.append(link.bound(memory, f"{i}.") if isinstance(link, Link) else link)
            if isinstance(link, ControlledSGD):
                behind.append(link.noting(memory, f"{i}."))
        return Chain((*links, *behind))

    def planted(self, direction: Update) -> "Chain":
        """The chain of a canary, which sends its direction (of norm 1) as far as the first link that bounds the update allows."""
        place = next(i for i, link in enumerate(self.links) if any(part.bounds for part in _parts([link])))
        far = -FAR if place < self.links.index(self.local) else FAR  # local training goes against a gradient

        def sent(compute: UpdateFn) -> UpdateFn:
            return lambda *_: {k: far * t for k, t in direction.items()}

        return Chain((*self.links[:place], sent, *self.links[place:]))

    def faults(self) -> Iterator[str]:
        """Yield which links belong elsewhere; ValueError where there is not one local training."""
        local = self.links.index(self.local)
        for i, link in enumerate(self.links):
            if i < local and _stateful(link):
                yield f"{_named(link, i)} keeps a state, so it belongs after local_sgd"
            if not is_per_example(link):
                continue
            inner = link.inner if isinstance(link, per_example) else None
            if isinstance(inner, BatchTransform) or _stateful(inner) or getattr(inner, "each", False):
                yield f"{_named(link, i)} cannot act on single gradients: remove each = true"
            if i > local:
                yield f"{_named(link, i)} takes examples one by one, so it belongs before local_sgd"
            for j, nearer in enumerate(self.links[:i]):
                if isinstance(nearer, UpdateTransform | BatchTransform) and not is_identity(nearer):
                    yield f"{_named(nearer, j)} acts on the whole batch before {_named(link, i)}: use each = true"

    @property
    def local(self) -> "local_sgd":
        """The chain's one `local_sgd` or `local_training`.

        Raises:
            ValueError: there is none or more than one.
        """
        found = [link for link in self.links if isinstance(link, local_sgd)]
        if len(found) != 1:
            raise ValueError(f"a chain needs one local_sgd, local_training or scaffold; this one has {len(found)}")
        return found[0]


def flat(links: Iterable[Transform], each: bool = False) -> Iterator[tuple[Transform, bool]]:
    """Yield the links within chains, `dp_sgd` and `per_example`, each with whether it acts per example."""
    for link in links:
        parts = link if isinstance(link, Chain) else getattr(link, "parts", None)
        if isinstance(parts, Chain):
            yield from flat(parts.links, each)
        elif isinstance(link, per_example):
            yield from flat([link.inner], True)
        else:
            yield link, each


def _parts(links: Iterable[Transform]) -> Iterator[Link]:
    return (link for link, _ in flat(links) if isinstance(link, Link))


def may_read_examples(link: Transform) -> bool:
    """Check whether a link may itself use the examples, as soteria does."""
    return not isinstance(link, UpdateTransform | BatchTransform | StatefulTransform | local_sgd)


def _stateful(link: Transform | None) -> bool:
    return isinstance(link, StatefulTransform) or getattr(link, "remembers", False)


def _alone(link: Transform) -> UpdateDistribution | None:
    return link.update_distribution(UpdateDistribution()) if isinstance(link, Link) else None


def trained_on(chain: Chain, compute: UpdateFn, params: Params, batch: Batch, rng: Generator | None) -> Batch | None:
    """The examples that a client trains on, after its chain's batch transforms; None where it has none.

    Where each local step transforms them anew: those of the first steps, until each example was seen once.
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

    # recorded here and not at the gradient, where vmap may pass the examples one by one
    Chain((*chain.links[:first], watched, *chain.links[first:]))(compute)(params, batch, rng)
    seen = accumulate(len(some.x) for some in batches)
    count = next((i for i, total in enumerate(seen, 1) if total >= len(batch.x)), len(batches))
    return concatenate(batches[:count])


def _named(link: Transform, place: int) -> str:
    return f"#{place + 1} ({type(link.inner if isinstance(link, per_example) else link).__name__})"


def chain(*links: Transform) -> Chain:
    """Compose transforms: `chain(clip(1.0), local_sgd(0.1))(gradient(model))` is a whole client.

    Example:
        >>> from fedgauge.defenses.clip import clip
        >>> chain(clip(1.0), local_sgd(0.1)).private
        False
    """
    return Chain(links)
