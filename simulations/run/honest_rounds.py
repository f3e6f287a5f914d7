"""Rounds of an honest federation without messages: every client trains, and the mean of the updates is added."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedgauge.client.federation import Federation
from fedgauge.client.update import Params, Update


@dataclass(frozen=True, eq=False)
class HonestRound:
    """What the clients are sent in a round, and what they make of it."""

    federation: Federation
    round: int
    params: Params
    buffers: Mapping[str, Tensor]

    @cached_property
    def mean(self) -> Update:
        """The mean of the updates."""
        fed = self.federation
        return fed.mean_update(self.params, self.buffers, range(fed.protocol.clients), self.round)

    @property
    def after(self) -> Params:
        """The weights that it ends with."""
        return {k: t + self.mean[k] for k, t in self.params.items()}


def honest_rounds(fed: Federation, count: int) -> Iterator[HonestRound]:
    """The first rounds of a federation."""
    params, buffers = fed.initial()
    for round in range(1, count + 1):
        yield (now := HonestRound(fed, round, params, buffers))
        params = now.after
