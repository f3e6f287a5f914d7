"""Freezing: some layers are not trained, or stay with the client, so their updates are zero and leak nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, nn

from fedgauge.client.transforms import TransformState, UpdateDistribution, UpdateTransform
from fedgauge.client.update import Batch, Params, Transform, Update, UpdateFn


@dataclass(frozen=True)
class freeze(UpdateTransform):
    """Zero the updates of some layers: before `local_sgd` they do not train; after it they train, but are not sent.

    Args:
        model: the federation offers it.
        layers: names of layers or parameters; a layer includes everything within it: "conv" freezes "conv.0.weight".

    Raises:
        ValueError: the model has no such layer, or none would be left to train.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> freeze(model, layers=["0"]).frozen("0.weight")
        True
    """

    model: nn.Module = field(repr=False)
    layers: Sequence[str]

    def __post_init__(self) -> None:
        parameters = dict(self.model.named_parameters())
        unknown = [layer for layer in self.layers if not any(_within(name, layer) for name in parameters)]
        if unknown:
            named = [name for name, module in self.model.named_modules() if name and list(module.parameters())]
            raise ValueError(f"the model has no layer {unknown[0]!r} with parameters (it has: {', '.join(named)})")
        if not self.layers or all(map(self.frozen, parameters)):
            raise ValueError("layers must name at least one layer to freeze, and leave one to train")

    def frozen(self, name: str) -> bool:
        return any(_within(name, layer) for layer in self.layers)

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: torch.zeros_like(t) if self.frozen(k) else t.clone() for k, t in update.items()}

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """Unchanged: the noise-free form has the same zeros, so they say nothing about the other entries."""
        return before


def _within(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")


@dataclass(frozen=True)
class private_layers(freeze):
    """Layers that each client trains and keeps, as in FedBN or FedPer.

    The server goes on sending the values that it began with, which are the client's in its first round. An attacker also uses
    them in later rounds. The running statistics of a private BatchNorm are not returned either.
    """

    remembers = True

    def stays(self, name: str) -> bool:
        return self.frozen(name)

    def bound(self, memory: TransformState, prefix: str) -> Transform:
        def wrap(compute: UpdateFn) -> UpdateFn:
            def at_home(params: Params, batch: Batch, rng: Generator | None) -> Update:
                own = {k: memory.get(prefix + k, p) for k, p in params.items()}
                update = compute(own, batch, rng)
                kept = {prefix + k: own[k] + t.detach() for k, t in update.items() if self.stays(k)}
                if all(bool(t.isfinite().all()) for t in kept.values()):  # what is not must not stay for ever
                    memory.update(kept)
                return self.apply(update, rng)

            return at_home

        return wrap
