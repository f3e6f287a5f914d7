"""Freezing: some layers are not trained, so their updates are zero and leak nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, nn

from fedgauge.client.transforms import UpdateDistribution, UpdateTransform
from fedgauge.client.update import Update


@dataclass(frozen=True)
class freeze(UpdateTransform):
    """Zero the updates of some layers: before `local_sgd` they do not train; after it they train, but are not sent.

    Args:
        model: the federation offers it.
        layers: names of layers or parameters; a layer includes everything within it: "conv" freezes "conv.0.weight".
    """

    model: nn.Module = field(repr=False)
    layers: Sequence[str]

    def __post_init__(self) -> None:
        parameters = dict(self.model.named_parameters())
        unknown = [layer for layer in self.layers if not any(_within(name, layer) for name in parameters)]
        if unknown:
            named = [name for name, module in self.model.named_modules() if name and list(module.parameters())]
            raise ValueError(f"the model has no layer {unknown[0]!r} with parameters (it has: {', '.join(named)})")
        if not self.layers:
            raise ValueError("layers is empty: name at least one layer to freeze")
        if all(map(self.frozen, parameters)):
            raise ValueError("layers names all of the model's parameters: nothing would be trained")

    def frozen(self, name: str) -> bool:
        """Whether a parameter of this name is not trained."""
        return any(_within(name, layer) for layer in self.layers)

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: torch.zeros_like(t) if self.frozen(k) else t.clone() for k, t in update.items()}

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """Unchanged: the noise-free form has the same zeros, so they say nothing about the other entries."""
        return before


def _within(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")
