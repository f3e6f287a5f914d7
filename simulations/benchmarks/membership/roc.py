"""How well scores tell members from others, as published tables say it: all clients' scores pooled, with bootstrap intervals.

A run compares a member with the strangers of its own update alone (fedgauge.attacks.grading.membership), as scores of several
updates need not have one scale. Of one client the two areas are equal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor

from fedgauge.attacks.grading.membership import wins

DRAWS = 2000  # of the bootstrap
CHUNK = 64  # draws that are evaluated together
OUTSIDE = 0.025  # on either side of an interval


@dataclass(frozen=True)
class Estimate:
    """A rate with its 95 % interval; low and high are None where one client alone says nothing of how clients differ."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, eq=False)
class ScoredCandidates:
    """Scores of members and of others, by the client whose update they were scored against.

    Args:
        members: (P,) float64 scores; member_clients: (P,) int64.
        others: (N,) float64; other_clients: (N,) int64.

    Raises:
        ValueError: one of the two is missing, or a score is not a number.
    """

    members: Tensor
    member_clients: Tensor
    others: Tensor
    other_clients: Tensor

    def __post_init__(self) -> None:
        for name, scores in (("members", self.members), ("candidates that are no members", self.others)):
            if not len(scores):
                raise ValueError(
                    f"all candidates have one label: there are no {name}, so there is nothing to tell apart"
                )
            if bool(scores.isnan().any()):
                raise ValueError(f"{int(scores.isnan().sum())} scores of {name} are not numbers")

    def auc(self, rng: Generator) -> Estimate:
        """The probability that a member scores above another candidate, ties counting half."""
        return self._estimate(self._wins, rng)

    def true_positives(self, rate: float, rng: Generator) -> Estimate:
        """The share of members above the threshold that this rate of the others exceeds.

        Raises:
            ValueError: the others are too few for the rate.
        """
        if not 0 < rate < 1:
            raise ValueError(f"a false-positive rate is above 0 and below 1, got {rate}")
        needed = math.ceil(1 / rate - 1e-9)
        if len(self.others) < needed:
            raise ValueError(
                f"a false-positive rate of {rate:.3g} needs at least {needed:,} candidates that are no members, "
                f"got {len(self.others):,}: score more, or ask for a rate of {1 / len(self.others):.2g} or more"
            )

        def measured(weights: Tensor) -> Tensor:
            return self._hits(weights, rate)

        return self._estimate(measured, rng)

    def curve(self) -> tuple[Tensor, Tensor]:
        """False-positive and true-positive rates (T,) float64 at every threshold, from (0, 0) to (1, 1)."""
        values = torch.cat([self.members, self.others]).unique().flip(0)
        rates = [
            torch.searchsorted(-scores.sort(descending=True).values, -values, right=True).double() / len(scores)
            for scores in (self.others, self.members)
        ]
        zero = torch.zeros(1, dtype=torch.float64)
        return torch.cat([zero, rates[0]]), torch.cat([zero, rates[1]])

    # ---------------------------------------------------------------------------------------------------- bootstrap

    @cached_property
    def _clusters(self) -> tuple[Tensor, Tensor, int]:
        """The members' and the others' clients, counted from 0, and how many clients there are."""
        clients, numbers = torch.cat([self.member_clients, self.other_clients]).unique(return_inverse=True)
        return numbers[: len(self.members)], numbers[len(self.members) :], len(clients)

    @cached_property
    def _ordered(self) -> tuple[Tensor, Tensor]:
        """The others' scores from high to low, and their clients."""
        order = self.others.argsort(descending=True, stable=True)
        return self.others[order], self._clusters[1][order]

    @cached_property
    def _won(self) -> Tensor:
        """(C, C): wins of the members of one client against the others of another."""
        mine, theirs, count = self._clusters
        found = torch.zeros(count, count, dtype=torch.float64)
        for c in range(count):
            won = wins(self.members, self.others[theirs == c])
            found[:, c] = torch.zeros(count, dtype=torch.float64).index_add_(0, mine, won)
        return found

    def _wins(self, weights: Tensor) -> Tensor:
        mine, theirs, count = self._clusters
        members, others = (weights @ torch.bincount(t, minlength=count).double() for t in (mine, theirs))
        return ((weights @ self._won) * weights).sum(1) / (members * others)

    def _hits(self, weights: Tensor, rate: float) -> Tensor:
        mine, _, _ = self._clusters
        values, theirs = self._ordered
        found = []
        for part in weights.split(CHUNK):
            upto = part[:, theirs].cumsum(1)
            # the threshold is the first score with which the rate would be exceeded; a member must lie above it
            first = (upto <= rate * upto[:, -1:] * (1 + 1e-12)).sum(1).clamp_max(len(values) - 1)
            above = (self.members > values[first][:, None]).double()
            found.append((above * part[:, mine]).sum(1) / part[:, mine].sum(1))
        return torch.cat(found)

    def _estimate(self, measure: Callable[[Tensor], Tensor], rng: Generator) -> Estimate:
        count = self._clusters[2]
        value = float(measure(torch.ones(1, count, dtype=torch.float64)))
        if count < 2:
            return Estimate(value, None, None)
        drawn = torch.randint(count, (DRAWS, count), generator=rng)
        weights = torch.zeros(DRAWS, count, dtype=torch.float64).scatter_add_(
            1, drawn, torch.ones(DRAWS, count).double()
        )
        values = measure(weights)
        values = values[values.isfinite()]  # a draw may have no member, or nobody else
        low, high = torch.quantile(values, torch.tensor([OUTSIDE, 1 - OUTSIDE]).double()).tolist()
        return Estimate(value, low, high)
