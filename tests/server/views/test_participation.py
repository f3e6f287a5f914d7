"""Who took part in which round."""

from collections.abc import Callable
from typing import Any

from fedgauge.client.protocol import Protocol
from fedgauge.server.views.participation import rounds_seen


def test_under_a_secure_sum_every_member_has_taken_part(tables: Callable[..., dict[str, Any]]) -> None:
    """The ledger knows a group by its first client; its sum holds the updates of all."""
    replies = [(1, 0), (1, 2), (2, 0)]
    alone = Protocol.from_tables(tables(clients=4))
    assert rounds_seen(alone, replies) == {0: {1, 2}, 2: {1}}
    summed = Protocol.from_tables(tables(clients=4, secure_sum={"group": 2}))
    assert rounds_seen(summed, replies) == {0: {1, 2}, 1: {1, 2}, 2: {1}, 3: {1}}
