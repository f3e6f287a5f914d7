"""A network of its own for each example of the batch (Geiping et al., 2020, appendix A): a batch leaks as single examples do.

Example i goes through sub-network i, whose part of the update is then that of a client who holds this example alone, at a
rate divided by the batch size. Examples are told apart by their place in the batch: where a chain takes them one by one
(per-example clipping, DP-SGD) all of them come first, and nothing is separated.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.malicious.server_attack import DelegatingAttack, ServerAttack, fill_with_mean
from fedgauge.client.chain import Chain
from fedgauge.client.components import Table
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.rng import generator
from fedgauge.client.transforms import is_per_example
from fedgauge.client.update import Batch, Params, relative_error

MOVED = 1e-3  # root mean square in pixels, 60 dB: by how much an image is moved to see what its update makes of it
FARTHER = 10  # times as far as what is unexplained of its part of the update, where an image is proven


class SeparateNetworks(nn.Module):
    """Copies of a network: example i of a batch goes through copy i, modulo their number."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.models = nn.ModuleList(copy.deepcopy(model) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        places = [torch.arange(i, len(x), len(self.models)) for i in range(min(len(x), len(self.models)))]
        parts = [model(x[place]) for model, place in zip(self.models, places, strict=False)]
        return torch.cat(parts)[torch.cat(places).argsort()]


def separate(model: nn.Module, count: int = 8) -> SeparateNetworks:
    """So many copies of the model, each for its own examples of a batch; count: as many as a batch has."""
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    return SeparateNetworks(model, count)


@dataclass(frozen=True)
class separate_models(ServerAttack):
    """A network of its own for each example: the architecture is all there is to it; count: the batch size."""

    count: int = 8

    @property
    def architecture(self) -> Table:
        return {"use": "separate", "count": self.count}

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        if reason := _obstacle(known):
            raise ValueError(reason)
        return dict(sent)


def _obstacle(known: Knowledge) -> str:
    """Why examples do not come apart; empty where they do."""
    if not isinstance(known.model, SeparateNetworks):
        return "the network is one for all examples (architecture separate)"
    if any(map(is_per_example, known.chain.links)):
        return "the chain takes examples one by one: each comes first in its batch, so that one sub-network sees all of them"
    if known.chain.slice_of(known.batch_size) < known.batch_size:
        return "a batch is trained on in parts, whose examples meet the same sub-networks"
    return ""


# ------------------------------------------------------------------------------------------------------------- decoder


@dataclass(frozen=True)
class separated(DelegatingAttack):
    """Any attack, on the part of each sub-network by itself, at B = 1.

    Links of the chain that weigh the entries of an update by all of them (clipping, sparsification) are inverted as if they
    had acted on the part alone. Proven are images that give their part of the update as none at 60 dB from them does.

    Args:
        attack: the component table of that attack, which has the whole budget's iterations on each part.
    """

    attack: Mapping[str, Any] = field(default_factory=lambda: {"use": "analytic"})
    decodes: ClassVar[tuple[str, ...]] = ("separate_models",)

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if reason := _obstacle(known):
            return not_applicable(wave, reason)
        assert isinstance(known.model, SeparateNetworks)
        count = min(known.batch_size, len(known.model.models))
        share = None if budget.seconds is None else budget.seconds / count
        inner, parts = self.inner, []
        for i in range(count):
            part, knowledge = _part(wave, known, i)
            own = [_own(stream, i) for stream in streams]
            found = inner.reconstruct(part, knowledge, replace(budget, seconds=share), own)
            proven = [_proven(f, part.params, part.alone(k), knowledge) for k, f in enumerate(found)]
            parts.append(list(zip(found, proven, strict=True)))
        return [_together([part[k] for part in parts], known) for k in range(len(wave))]


def _own(stream: Stream, part: int) -> Stream:
    def draw(*purpose: object) -> Generator:
        return stream("part", part, *purpose)

    return draw


def _part(wave: Wave, known: Knowledge, i: int) -> tuple[Wave, Knowledge]:
    """What is seen of sub-network i, and what is known of the client that it would be by itself."""
    assert isinstance(known.model, SeparateNetworks)
    network, count, prefix = known.model.models[i], len(known.model.models), f"models.{i}."
    size = len(range(i, known.batch_size, count))
    inner = {k.removeprefix(prefix) for k in wave.params if k.startswith(prefix)}
    params, update = ({k: tensors[prefix + k] for k in sorted(inner)} for tensors in (wave.params, wave.update))
    buffers = {k.removeprefix(prefix): t for k, t in wave.buffers.items() if k.startswith(prefix)}
    local = known.chain.local
    slower = replace(local, rate=local.rate * size / known.batch_size, batch_size=None)
    chain = Chain(tuple(slower if link is local else link for link in known.chain.links))
    # labels are told by place only where the attacker has them in the client's order, which nobody promises
    labels = None if known.labels is None or is_cross_entropy(known.loss) else known.labels[:, i::count]
    part = replace(wave, params=params, update=update, buffers=buffers)
    return part, replace(known, model=network, chain=chain, batch_size=size, labels=labels)


def _proven(found: Reconstruction, params: Params, update: Params, known: Knowledge) -> bool:
    """Whether an image gives its part of the update, and others do not: behind dead neurons any image does."""
    if found.x is None or found.y is None:
        return False
    other = found.x + MOVED * torch.randn(found.x.shape, generator=generator("proof")).to(found.x)
    given, moved = (known.forward(params, Batch(x, found.y), None) for x in (found.x, other))
    return FARTHER * relative_error(given, update) < relative_error(moved, update)


def _together(parts: Sequence[tuple[Reconstruction, bool]], known: Knowledge) -> Reconstruction:
    """One answer of those to the parts of one observation, in the order of the batch."""
    found = [f for f, _ in parts]
    places = [range(i, known.batch_size, len(parts)) for i in range(len(parts))]
    proven = sum(len(place) for (_, exact), place in zip(parts, places, strict=True) if exact)
    words = f"{proven} of {known.batch_size} images proven exact (no others give their part of the update)"
    failed = next((f for f in found if f.status != "converged"), None)
    order = torch.tensor([i for place in places for i in place]).argsort()
    nothing = torch.empty(0, *known.shape)
    x = [
        fill_with_mean(nothing if f.x is None else f.x, len(place), known)
        for f, place in zip(found, places, strict=True)
    ]
    y = [f.y for f in found if f.y is not None]
    return Reconstruction(
        x=None if all(f.x is None for f in found) else torch.cat(x)[order],
        y=torch.cat(y)[order] if len(y) == len(found) else None,
        objective=sum(f.objective for f in found) / len(found),
        iterations=sum(f.iterations for f in found),
        seconds=sum(f.seconds for f in found),
        status="converged" if failed is None or any(f.status == "converged" for f in found) else failed.status,
        reason=words if failed is None else f"{words}; {failed.reason}",
    )
