"""Who took part in which round."""

from collections.abc import Callable
from typing import Any

from fedgauge.client.protocol import Protocol
from fedgauge.server.views.participation import AppClient, numbering, other_sizes, rounds_seen


def test_under_a_secure_sum_every_member_has_taken_part(tables: Callable[..., dict[str, Any]]) -> None:
    """The ledger knows a group by its first client; its sum holds the updates of all."""
    replies = [(1, 0), (1, 2), (2, 0)]
    alone = Protocol.from_tables(tables(clients=4))
    assert rounds_seen(alone, replies) == {0: {1, 2}, 2: {1}}
    summed = Protocol.from_tables(tables(clients=4, secure_sum={"group": 2}))
    assert rounds_seen(summed, replies) == {0: {1, 2}, 1: {1, 2}, 2: {1}, 3: {1}}


def test_a_client_that_says_another_number_of_examples_in_every_round_makes_no_long_sentence() -> None:
    client = AppClient(0, "1", tuple(range(10**8, 10**8 + 3000)))
    assert client.size.endswith("2997 more") and len(client.size) < 50
    assert len(numbering([client])) < 200 and len(other_sizes([client], 5)) < 300
    assert AppClient(0, "1", (4, 5, 6)).size == "4 or 5 or 6"
