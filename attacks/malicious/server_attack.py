"""A dishonest server's vocabulary: what it sends chosen clients in the place of the federation's weights, and how that is named."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from fedgauge.attacks.base import Attack, Budget, Knowledge, Observation, Reconstruction, Stream, Wave
from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import ComponentKind, Table, build
from fedgauge.client.models.vision import last_linear
from fedgauge.client.rng import generator
from fedgauge.client.transforms import UpdateTransform
from fedgauge.client.update import Batch, Params, Update


class ServerAttack(ABC):
    """A frozen dataclass whose fields say how the protocol is bent; its decoder is an Attack beside it, in the same file."""

    @property
    def architecture(self) -> Table | None:
        """The component that changes the network of the whole federation before it begins; None: the agreed one stays."""
        return None

    @property
    def is_stateful(self) -> bool:
        """Whether it asks what a client answered to it before."""
        return False

    @abstractmethod
    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        """What one client gets instead of `sent`, by the same names and shapes; `sent` itself is left as it is.

        Args:
            known: the network (with the dishonest architecture), shapes, public images: what any server knows.
            seen: what this client answered to this malice in its earlier rounds, oldest first, where it remembers: of weights
                and updates the classifier's alone.

        Raises:
            ValueError: the network lacks what is needed; the message says what.
        """


SERVER_ATTACK = ComponentKind("a server attack", ("fedgauge.server_attacks",), ServerAttack)


def fill_with_mean(x: Tensor, size: int, known: Knowledge) -> Tensor:
    """A batch (size, ...) of which only some examples x (n, ...) were found: the rest is the mean public image, or grey."""
    if len(x) >= size:
        return x[:size]
    public = None if known.auxiliary is None else known.auxiliary.x
    blank = torch.full(known.shape, 0.5) if public is None else public.mean(0)
    return torch.cat([x, blank.to(x).expand(size - len(x), *known.shape)])


def classifier_only(seen: Observation, model: nn.Module) -> Observation:
    """The classifier's part of an observation: a run's whole answers would fill the server's memory."""
    name = last_linear(model)
    params, update = (
        {k: t for k, t in part.items() if k.startswith(f"{name}.")} for part in (seen.params, seen.update)
    )
    return Observation(seen.round, seen.client, params, update)


def why_not_one_gradient(known: Knowledge) -> str:
    """Why an update is not one gradient of the whole batch; empty where it is."""
    if known.chain.local.steps > 1:
        return f"it reads one gradient of the batch, and the clients take {known.chain.local.steps} local steps"
    if known.chain.slice_of(known.batch_size) < known.batch_size:
        return "it reads one gradient of the batch, and the batch is trained on in parts"
    return ""


def with_zero_classifier(made: Params, known: Knowledge, zero: bool = True) -> Params:
    """With a classifier of zeros, if it is to be: what it reads of a batch can then be told apart (reading.py)."""
    layer = last_linear(known.model)
    ours = {k: torch.zeros_like(t) for k, t in made.items() if k in (f"{layer}.weight", f"{layer}.bias")}
    return {**made, **ours} if zero else made


@dataclass(frozen=True)
class OmittedParameters(UpdateTransform):
    """A link of the attacker's own: parameters in whose updates others have mixed, which it leaves out of the comparison."""

    names: tuple[str, ...]

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: torch.zeros_like(t) if k in self.names else t for k, t in update.items()}


@dataclass(frozen=True)
class DelegatingAttack(Attack):
    """A decoder that hands what it has isolated on to another attack.

    Args:
        attack: the component table of that attack.
    """

    attack: Mapping[str, Any] = field(default_factory=lambda: {"use": "inverting_gradients"})
    decodes: ClassVar[tuple[str, ...]] = ()  # the malices, by name, of which one must be in the plan; none: any

    def __post_init__(self) -> None:
        _ = self.inner  # an attack that does not exist is told at once

    @property
    def inner(self) -> Attack:
        """The other attack."""
        found: Attack = build(self.attack, "attack", ATTACK)
        return found

    def delegated(
        self,
        wave: Wave,
        alone: Knowledge,
        known: Knowledge,
        budget: Budget,
        streams: Sequence[Stream],
        words: Sequence[str],
    ) -> list[Reconstruction]:
        """What the other attack makes of each observation, among the places of a batch of whose other examples nothing was seen.

        Args:
            alone: the threat model of what was isolated; known: of the batch that it is in.
            words: what is to be said of each.
        """
        started = time.perf_counter()
        found = self.inner.reconstruct(wave, alone, budget, streams)
        seconds = (time.perf_counter() - started) / len(wave)
        return [_among_all(r, known, said, seconds) for r, said in zip(found, words, strict=True)]


def _among_all(found: Reconstruction, known: Knowledge, words: str, seconds: float) -> Reconstruction:
    if found.x is None:
        return replace(found, seconds=seconds)
    x, reason = fill_with_mean(found.x, known.batch_size, known), "; ".join(filter(None, (words, found.reason)))
    return replace(found, x=x, y=None, seconds=seconds, reason=reason)


def probe_batch(known: Knowledge, size: int) -> Batch:
    """Examples to try a malice on: public ones, or noise where there are none."""
    public = known.auxiliary
    if public is None or not len(public.y):
        rng = generator("a malice is tried on noise")
        return Batch(torch.rand(size, *known.shape, generator=rng), torch.arange(size) % known.classes)
    return Batch(public.x[:size], public.y[:size])
