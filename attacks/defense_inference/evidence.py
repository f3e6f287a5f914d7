"""The evidence in the updates: zeros, magnitudes and norms, and the zeros that occur without a defense."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from fedgauge.client.chain import Chain
from fedgauge.client.models.vision import last_linear, layer_parameters
from fedgauge.client.training import local_sgd
from fedgauge.client.transforms import UpdateDistribution, UpdateTransform
from fedgauge.client.update import Update, UpdateFn, norm

Kind = Literal["none", "sign", "prune", "mask", "clip", "noise"]
SAME_SIZE = 1e-5  # and two magnitudes
FEW = 20  # entries below which a share is too uncertain
TINY = 1e-3  # part of a matrix's largest entry


@dataclass(frozen=True)
class InferredLink(UpdateTransform):
    """The attacker's form of a defense that it inferred.

    Args:
        value: max_norm of a clip, scale of a sign, keep of pruning or of an unknown mask, sigma of noise.
        places: of a public mask, the entries that it shows.
    """

    kind: Kind
    value: float
    places: Mapping[str, Tensor] | None = field(default=None, compare=False)

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        return compute if self.kind == "noise" else super().__call__(compute)

    def apply(self, update: Update, rng: Generator | None) -> Update:
        if self.kind == "clip":
            factor = (self.value / norm(update).clamp_min(1e-12)).clamp(max=1.0)
            return {k: t * factor for k, t in update.items()}
        if self.kind == "sign":  # which has no useful derivative
            return {k: self.value * t / (t.abs() + t.abs().mean() + 1e-12) for k, t in update.items()}
        if self.kind == "prune":
            return {k: self._largest(t) for k, t in update.items()}
        if self.places is not None:
            return {k: t.where(self.places[k], 0.0) for k, t in update.items()}
        return {k: self.value * t for k, t in update.items()}  # the average over all masks

    def _largest(self, t: Tensor) -> Tensor:
        kept = min(t.numel(), max(1, round(self.value * t.numel())))
        return t.where(t.abs() >= t.detach().abs().flatten().topk(kept).values[-1], 0.0)

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        if self.kind == "noise":
            return replace(before, sigma=self.value)
        if self.kind == "sign":
            return replace(before, signed=True)
        if self.kind == "clip" or self.places is not None:
            return before
        return replace(before, sparse=True, shrink=before.shrink * (self.value if self.kind == "mask" else 1))


@dataclass(frozen=True, eq=False)
class Inferred:
    """The clients' chain as inferred from their updates.

    Args:
        kind: the defense that explains them best, or none. Other defenses (a quantiser, the largest entries of the whole
            update) are reported as the nearest of these. Noise is reported only if a layer's rank shows it.
        parameters: of the defense, in the units of its position in the chain; a mask's keep is the share left after all
            local steps.
        chain: local training with that defense, built from the attacker's own links.
        evidence: the reason, in words.
        updates: how many were read.
    """

    kind: Kind
    parameters: Mapping[str, float]
    chain: Chain
    evidence: str
    updates: int

    def __str__(self) -> str:
        arguments = ", ".join(f"{k}~{v:.3g}" for k, v in self.parameters.items())
        what = f"{self.kind}({arguments})" if arguments else self.kind
        return f"{what} from {self.updates} update{'' if self.updates == 1 else 's'}"


@dataclass(frozen=True, eq=False)
class UpdateEvidence:
    """Updates, and the zeros that would occur in them without a defense."""

    updates: Sequence[Update]
    model: nn.Module
    local: local_sgd
    batch_size: int
    members: int

    @property
    def rows(self) -> int:
        """The highest rank of a fully connected layer's update: one row for each example of each step."""
        return self.members * self.local.steps * min(self.local.batch_size or self.batch_size, self.batch_size)

    @cached_property
    def layers(self) -> "NaturalZeros":
        return NaturalZeros.of(self.model)

    @cached_property
    def tallies(self) -> list[list["TensorEvidence"]]:
        """The evidence of each tensor, by update."""
        return [
            [TensorEvidence.of(u[name], live) for name, live in self.layers.live(u, self.rows).items()]
            for u in self.updates
        ]

    @property
    def every(self) -> list["TensorEvidence"]:
        return [tally for tallies in self.tallies for tally in tallies]

    @property
    def certain(self) -> list["TensorEvidence"]:
        """Tensors with entries that are never zero without a defense."""
        return [tally for tally in self.every if tally.live]

    @property
    def holes(self) -> int:
        """Number of zero entries that are never zero without a defense."""
        return sum(tally.live - tally.shown for tally in self.certain)

    def verdict(
        self, kind: Kind, parameters: Mapping[str, float], evidence: str, places: Mapping[str, Tensor] | None = None
    ) -> Inferred:
        """The result with a link on the finished update."""
        links = [InferredLink(kind, value, places) for value in parameters.values()]
        return Inferred(kind, parameters, Chain((self.local, *links)), evidence, len(self.updates))


@dataclass(frozen=True)
class NaturalZeros:
    """Names of weights and biases, and which of them have zeros together without a defense."""

    classifier: str | None
    linear: tuple[str, ...]
    biased: tuple[tuple[str, str], ...]  # a bias is zero only if its row of the weight is
    norms: tuple[tuple[str, str], ...]  # a weight is zero exactly where its bias is

    @classmethod
    def of(cls, model: nn.Module) -> "NaturalZeros":
        modules = dict(model.named_modules())
        linear = tuple(layer_parameters(name)[0] for name, m in modules.items() if isinstance(m, nn.Linear))
        norms = tuple(
            layer_parameters(name)
            for name, m in modules.items()
            if isinstance(m, nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm)
        )
        # a normalisation after a convolution makes its bias's gradient zero up to rounding
        kinds = nn.Linear if norms else (nn.Linear, nn.Conv2d)
        biased = tuple(layer_parameters(name) for name, m in modules.items() if isinstance(m, kinds))
        return cls(layer_parameters(last_linear(model))[0] if linear else None, linear, biased, norms)

    def live(self, update: Update, rows: int) -> dict[str, Tensor]:
        """Entries that are never zero without a defense, judged by their neighbours and not by the entries themselves."""
        live = {name: torch.zeros_like(t, dtype=torch.bool) for name, t in update.items()}
        # the update by one example is one row times one column: zero in whole rows and columns only
        for name in self.linear if rows == 1 else (self.classifier,):
            if name in update:
                live[name] = live_by_neighbours(update[name])
        for weight, bias in self.biased:
            if weight in update and bias in update:
                live[bias] = update[weight].flatten(1).any(1)
        for weight, bias in self.norms:
            if weight in update and bias in update:
                live[weight], live[bias] = update[bias] != 0, update[weight] != 0
        return live


def live_by_neighbours(matrix: Tensor) -> Tensor:
    """Entries of a matrix with another nonzero entry in their row, and one in their column that is not tiny.

    A tiny one may come from an example of almost no loss: the signal p - 1 of its label was rounded to zero.
    """
    seen, large = matrix != 0, matrix.abs() > TINY * matrix.abs().max()
    return (large.sum(0, keepdim=True) > large.long()) & (seen.sum(1, keepdim=True) > seen.long())


@dataclass(frozen=True, eq=False)
class TensorEvidence:
    """The evidence in one tensor of one update.

    Args:
        size, seen: entries, and nonzero ones.
        tied: nonzero entries of the smallest magnitude.
        live, shown: entries that are never zero without a defense, and those of them that are not zero here.
        sizes: distinct nonzero magnitudes.
    """

    size: int
    seen: int
    tied: int
    live: int
    shown: int
    sizes: Tensor = field(repr=False)

    @classmethod
    def of(cls, t: Tensor, live: Tensor) -> "TensorEvidence":
        sizes, counts = t[t != 0].abs().unique(return_counts=True)
        tied = int(counts[sizes <= sizes[0] * (1 + SAME_SIZE)].sum()) if len(sizes) else 0
        return cls(t.numel(), int(counts.sum()), tied, int(live.sum()), int((live & (t != 0)).sum()), sizes)

    @property
    def share(self) -> float:
        return self.seen / self.size

    def fits(self, keep: float) -> bool:
        """True if pruning with this keep leaves the observed count."""
        return self.seen - self.tied < max(1, round(keep * self.size)) <= self.seen

    @property
    def pierced(self) -> bool:
        """True if an entry is zero that is never zero without a defense."""
        return self.shown < self.live
