"""Participation of clients in rounds."""

from collections.abc import Callable
from typing import Any

import pytest

from fedgauge.client.protocol import Protocol
from fedgauge.server.views.participation import other_sizes, rounds_seen


def test_every_member_of_a_secure_sum_participates(tables: Callable[..., dict[str, Any]]) -> None:
    """The ledger knows a group by its first client; its sum holds the updates of all."""
    replies = [(1, 0), (1, 2), (2, 0)]
    alone = Protocol.from_tables(tables(clients=4))
    assert rounds_seen(alone, replies) == {0: {1, 2}, 2: {1}}
    summed = Protocol.from_tables(tables(clients=4, secure_sum={"group": 2}))
    assert rounds_seen(summed, replies) == {0: {1, 2}, 1: {1, 2}, 2: {1}, 3: {1}}


class App:
    """The part of a ledger that lists an app's clients."""

    foreign = True

    def meta(self) -> dict[str, str]:
        return {}

    def observations(self) -> list[dict[str, Any]]:
        return [{"client": 0, "status": "accepted", "examples": 3}]


@pytest.mark.parametrize(("step", "doubtful"), [(32, False), (16, True), (91, True)])
def test_clients_may_report_their_batches(step: int, doubtful: bool) -> None:
    app: Any = App()
    chain = [{"use": "freeze"}, {"use": "local_training", "batch_size": step}]
    assert bool(other_sizes(app, {"data": {"batch_size": 91}, "chain": chain})) is doubtful


def test_where_examples_were_observed_no_report_casts_doubt_on_their_number() -> None:
    """Augmented examples differ in each epoch, so that a round of 2 epochs over 48 holds 96."""

    class Proved(App):
        def meta(self) -> dict[str, str]:
            return {"examples": "observed"}

    app: Any = Proved()
    assert not other_sizes(app, {"data": {"batch_size": 96}})
