"""Rounds of an honest federation without messages: every client trains, and the mean of the updates is added."""

from collections.abc import Iterator
from typing import NamedTuple

from fedgauge.client.federation import Federation
from fedgauge.client.update import Params, Update


class HonestRound(NamedTuple):
    """The weights sent in a round, and the mean of the clients' updates."""

    round: int
    params: Params
    mean: Update


def honest_rounds(fed: Federation, count: int) -> Iterator[HonestRound]:
    """The first rounds of a federation."""
    params, buffers = fed.initial()
    for round in range(1, count + 1):
        mean = fed.mean_update(params, buffers, range(fed.protocol.clients), round)
        yield HonestRound(round, params, mean)
        params = {k: t + mean[k] for k, t in params.items()}
