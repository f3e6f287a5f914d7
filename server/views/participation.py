"""Who took part in which round, as the server saw it."""

from collections.abc import Iterable

from fedgauge.client.protocol import Protocol


def rounds_seen(protocol: Protocol, replies: Iterable[tuple[int, int]]) -> dict[int, set[int]]:
    """For each client, the rounds in which the server saw a reply of it.

    Args:
        replies: (round, client) of every reply that came, rejected ones too; under a secure sum of a group's first client.
    """
    seen: dict[int, set[int]] = {}
    for round, client in replies:
        for member in {client, *protocol.members(client, round)}:
            seen.setdefault(member, set()).add(round)
    return seen
