"""A separate network for each example of the batch (Geiping et al., 2020, appendix A): a batch leaks like single examples.

Example i goes through sub-network i. That part of the update equals the update of a client with only this example, at a rate
divided by the batch size. Examples are separated by their place in the batch. Where a chain takes them one by one (per-example
clipping, DP-SGD), each is first in its batch, and nothing is separated.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from fedgauge.attacks.base import Attack, Budget, Knowledge, Observation, Reconstruction, Streams, Wave, not_applicable
from fedgauge.attacks.delegating import DelegatingAttack
from fedgauge.attacks.malicious.server_attack import ServerAttack, fill_with_mean
from fedgauge.client.chain import Chain
from fedgauge.client.components import Count, Table
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.transforms import is_per_example
from fedgauge.client.update import Params


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
    """Copies of the model, each for its own examples of a batch; count: the batch size."""
    return SeparateNetworks(model, count)


@dataclass(frozen=True)
class separate_models(ServerAttack):
    """Gives each example its own network, by the architecture only; count: the batch size."""

    count: Count = 8

    @property
    def architecture(self) -> Table:
        return {"use": "separate", "count": self.count}

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        _separable(known)
        return dict(sent)


def _separable(known: Knowledge) -> SeparateNetworks:
    """The network; ValueError where examples share sub-networks."""
    each, size = any(map(is_per_example, known.chain.links)), known.batch_size
    if each or not known.chain.local.plain or known.chain.slice_of(size) < size:
        raise ValueError("examples are separable only by plain steps on the whole batch, and the clients take others")
    count = len(known.model.models) if isinstance(known.model, SeparateNetworks) else 1
    if not isinstance(known.model, SeparateNetworks) or count < size:
        raise ValueError(f"{size} examples share {count} networks: use separate_models with count = {size}")
    return known.model


@dataclass(frozen=True)
class separated(DelegatingAttack):
    """Runs another attack on the part of each sub-network separately, at B = 1.

    Links of the chain that depend on all entries of an update (clipping, sparsification) are inverted as if they had
    acted only on the part.

    Args:
        attack: the component table of that attack, which gets the whole budget's iterations for each part.
    """

    attack: str | Mapping[str, Any] | Attack = field(default_factory=lambda: {"use": "analytic"})
    decodes: ClassVar[tuple[str, ...]] = ("separate_models",)

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        try:
            networks = _separable(known).models
        except ValueError as error:
            return not_applicable(wave, str(error))
        share = None if budget.seconds is None else budget.seconds / known.batch_size
        inner, parts = self.inner, []
        for i in range(known.batch_size):
            part, knowledge = _part(wave, known, networks, i)
            own = [partial(stream, "part", i) for stream in streams]
            parts.append(inner.reconstruct(part, knowledge, replace(budget, seconds=share), own))
        return [_merged([part[k] for part in parts], known) for k in range(len(wave))]


def _part(wave: Wave, known: Knowledge, networks: nn.ModuleList, i: int) -> tuple[Wave, Knowledge]:
    """The wave and threat model of sub-network i, as if it were a client of its own."""
    prefix = f"models.{i}."
    inner = {k.removeprefix(prefix) for k in wave.params if k.startswith(prefix)}
    params, update = ({k: tensors[prefix + k] for k in sorted(inner)} for tensors in (wave.params, wave.update))
    buffers = {k.removeprefix(prefix): t for k, t in wave.buffers.items() if k.startswith(prefix)}
    local = known.chain.local
    slower = replace(local, rate=local.rate / known.batch_size, batch_size=None)
    chain = Chain(tuple(slower if link is local else link for link in known.chain.links))
    # labels belong to places only if the attacker has them in the client's order, which is not guaranteed
    labels = None if known.labels is None or is_cross_entropy(known.loss) else known.labels[:, i : i + 1]
    part = replace(wave, params=params, update=update, buffers=buffers)
    return part, replace(known, model=networks[i], chain=chain, batch_size=1, labels=labels)


def _merged(results: Sequence[Reconstruction], known: Knowledge) -> Reconstruction:
    failed = next((r for r in results if r.status != "converged"), None)
    nothing = torch.empty(0, *known.shape)
    x = [fill_with_mean(nothing if r.x is None else r.x, 1, known) for r in results]
    y = [r.y for r in results if r.y is not None]
    return Reconstruction(
        x=None if all(r.x is None for r in results) else torch.cat(x),
        y=torch.cat(y) if len(y) == len(results) else None,
        objective=sum(r.objective for r in results) / len(results),
        iterations=sum(r.iterations for r in results),
        seconds=0.0,
        status="converged" if failed is None or any(r.status == "converged" for r in results) else failed.status,
        reason="" if failed is None else failed.reason,
    )
