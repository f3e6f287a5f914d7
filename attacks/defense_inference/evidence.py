"""The evidence in the updates: zeros, magnitudes and norms, and which zeros occur without a defense."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from fedgauge.client.chain import Chain, chain
from fedgauge.client.models.vision import last_linear, layer_parameters
from fedgauge.client.training import local_sgd
from fedgauge.client.transforms import Link, per_example
from fedgauge.client.update import Transform, Update

Kind = Literal["none", "sign", "prune", "mask", "clip", "noise"]
SAME_SIZE = 1e-5  # and two magnitudes
FEW = 20  # entries below which a share tells little
TINY = 1e-3  # part of a matrix's largest entry


@dataclass(frozen=True, eq=False)
class Inferred:
    """The clients' chain as inferred from their updates.

    Args:
        kind: the defense that explains them best, or none. Another defense (a quantiser, the largest entries of the whole
            update) is reported as the nearest of these, and a small margin need not show it. Noise and none are told apart
            only if the evidence says so.
        parameters: of the defense, in the units of its position in the chain; a mask's keep is the share left after all
            local steps.
        chain: local training with that defense, built from the attacker's own links.
        evidence: the reason, in words.
        margin: nats by which the evidence favours this over the nearest other defense; inf if that one is impossible.
        updates: how many were read.
    """

    kind: Kind
    parameters: Mapping[str, float]
    chain: Chain
    evidence: str
    margin: float
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
    def examples(self) -> int:
        """Examples of a local step."""
        return min(self.local.batch_size or self.batch_size, self.batch_size)

    @property
    def rows(self) -> int:
        """The highest rank of a fully connected layer's update: one row for each example of each step."""
        return self.members * self.local.steps * self.examples

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
        """How many entries are zero that never are without a defense."""
        return sum(tally.live - tally.shown for tally in self.certain)

    def verdict(
        self, kind: Kind, parameters: Mapping[str, float], link: Transform | None, evidence: str, margin: float
    ) -> Inferred:
        """The result with a link on the finished update."""
        found = Chain((self.local,) if link is None else (self.local, link))
        return Inferred(kind, parameters, found, evidence, margin, len(self.updates))

    def summed(
        self, kind: Kind, parameters: dict[str, float], link: Callable[..., Link], evidence: str, margin: float
    ) -> Inferred:
        """The result with a link on what was summed: clients' updates, else gradients of steps, else of examples."""
        if self.members > 1:
            return self.verdict(kind, parameters, link(**parameters), evidence, margin)
        if "scale" in parameters:  # in the units of a gradient
            parameters = {"scale": parameters["scale"] / self.local.scale}
        inner = link(**parameters)
        found = chain(inner if self.local.steps > 1 else per_example(inner), self.local)
        return Inferred(kind, parameters, found, evidence, margin, len(self.updates))


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

    A tiny one may come from an example of almost no loss, whose own label's signal p - 1 was rounded to zero.
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
        """Whether pruning leaves this count, in a tensor from which it removed something."""
        return self.seen - self.tied < max(1, round(keep * self.size)) <= self.seen

    @property
    def pierced(self) -> bool:
        """Whether an entry is zero that never is without a defense."""
        return self.shown < self.live
