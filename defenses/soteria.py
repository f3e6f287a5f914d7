"""Soteria: prune the representation where the data changes it least for its size (Sun et al., CVPR 2021).

A fully connected layer's weight gradient is the sum of signal x representation, so pruning a feature of the representation r
zeroes a column of that gradient; all other gradients stay as they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, vjp, vmap

from fedgauge.client.components import Fraction
from fedgauge.client.gradient import without_running_stats
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.transforms import Link, UpdateDistribution
from fedgauge.client.update import Batch, Params, Update, UpdateFn
from fedgauge.defenses.noise import identity

OFFSET = 0.1  # from the published code: a feature of zero has a finite score
CHUNK = 64  # backward passes of one example in one chunk


@dataclass(frozen=True, eq=False)
class soteria(Link):
    """Zero the columns of one layer's weight update that belong to the features of the lowest score.

    Feature j scores |dr_j/dx| / (r_j + 0.1), summed over the examples of the batch. Before `local_sgd` it uses the weights and
    examples of each local step, after it those of the round.

    Args:
        layer: name of a fully connected layer; its input is r; default: the one with the most weights.
        rate: the part of the features that is pruned, 0 <= rate < 1.

    Raises:
        ValueError: rate is out of its range, or the model has no such layer.
    """

    model: nn.Module = field(repr=False)
    normalise: Callable[[Tensor], Tensor] = field(repr=False)
    layer: str | None = None
    rate: Fraction = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, LanguageModel):
            raise ValueError("soteria scores features by how pixels change them, and text has no pixels: remove it")
        linears = {name: m for name, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        if self.layer is None and linears:
            object.__setattr__(self, "layer", max(linears, key=lambda name: linears[name].weight.numel()))
        if self.layer not in linears:
            raise ValueError(f"the model has no fully connected layer {self.layer!r} (it has: {', '.join(linears)})")

    @property
    def weight(self) -> str:
        return f"{self.layer}.weight"

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        def defended(params: Params, batch: Batch, rng: Generator | None) -> Update:
            update = compute(params, batch, rng)
            kept = self.kept(self.scores(params, batch.x))
            return {k: torch.where(kept, t, torch.zeros_like(t)) if k == self.weight else t for k, t in update.items()}

        return defended

    @property
    def mean(self) -> Link:
        """Nothing: the choice of features has no derivative, and depends on the data that the attacker does not know."""
        return identity()

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution:
        return replace(before, hidden=before.hidden | {self.weight})

    def kept(self, scores: Tensor) -> Tensor:
        """Mark the features (k,) to keep: those at or above NumPy's percentile, including ties."""
        pruned = math.ceil(self.rate * (len(scores) - 1) - 1e-9)
        return scores.abs() >= scores.abs().sort().values[pruned]

    def scores(self, params: Params, x: Tensor) -> Tensor:
        """sum over examples of |dr_j/dx| / (r_j + 0.1), (k,), detached."""
        with without_running_stats(self.model):
            inputs = self.normalise(x).detach()
            r, back = vjp(lambda x: self._representation(params, x), inputs)[:2]
            eye = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)

            def norms(feature: Tensor) -> Tensor:
                (slope,) = back(feature.expand_as(r))
                size: Tensor = slope.flatten(1).norm(dim=1)
                return size

            jacobian = vmap(norms, out_dims=1, chunk_size=max(1, CHUNK // len(x)))(eye)  # (B, k)
        found: Tensor = (jacobian / (r + OFFSET)).sum(0).detach()
        return found

    def _representation(self, params: Params, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        layer = self.model.get_submodule(str(self.layer))
        with layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])):
            functional_call(self.model, params, (x,))
        if len(seen) != 1 or seen[0].dim() != 2:
            raise ValueError(f"soteria needs one vector for each example at layer {self.layer!r}")
        return seen[0]
