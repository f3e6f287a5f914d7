"""Participation of clients in rounds."""

from collections.abc import Callable
from typing import Any

import pytest

from fedgauge.client.protocol import Protocol
from fedgauge.server.views.participation import app_clients_table, other_sizes, rounds_seen


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

    def nodes(self) -> dict[int, str]:
        return {0: "1"}

    def observations(self) -> list[dict[str, Any]]:
        return [{"client": 0, "status": "accepted", "examples": n} for n in range(10**8, 10**8 + 3000)]


def test_a_client_with_many_reported_sizes_makes_no_long_sentence() -> None:
    app: Any = App()
    ((client, node, size),) = app_clients_table(app).rows
    assert (client, node) == (0, "1") and str(size).endswith("2997 more") and len(str(size)) < 50
    assert 0 < len(other_sizes(app, {"data": {"batch_size": 5}})) < 300
    assert not other_sizes(app, {"data": {"batch_size": 5}, "audit": {"clients": [1]}})


@pytest.mark.parametrize(("step", "doubtful"), [(32, False), (16, True), (91, True)])
def test_clients_may_report_their_batches(step: int, doubtful: bool) -> None:
    class Batches(App):
        def observations(self) -> list[dict[str, Any]]:
            return [{"client": 0, "status": "accepted", "examples": 3}]

    app: Any = Batches()
    chain = [{"use": "freeze"}, {"use": "local_training", "batch_size": step}]
    assert bool(other_sizes(app, {"data": {"batch_size": 91}, "chain": chain})) is doubtful


def test_where_examples_were_observed_no_report_casts_doubt_on_their_number() -> None:
    """Augmented examples differ in each epoch, so that a round of 2 epochs over 48 holds 96."""

    class Proved(App):
        def meta(self) -> dict[str, str]:
            return {"examples": "observed"}

    app: Any = Proved()
    assert not other_sizes(app, {"data": {"batch_size": 96}})
