"""Who took part in which round, as the server saw it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from typing import Protocol as Structure

from fedgauge.client.protocol import Protocol
from fedgauge.server.views.server_attacks import shortened

MOST_CLIENTS = 5  # named in a sentence


class ObservationRow(Structure):
    """A row of the ledger's observations."""

    def __getitem__(self, column: str, /) -> Any:
        """A column's value."""


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


def participation(observations: Sequence[ObservationRow]) -> str:
    """How many of all expected updates came in, and why the others did not, most frequent reason first; empty if all did."""
    reasons = Counter((o["client"], o["status"], o["reason"]) for o in observations if o["status"] != "accepted")
    if not reasons:
        return ""
    named = [
        f"client {client} {status} in {times} round{'s' if times > 1 else ''}: {shortened(reason)}"
        for (client, status, reason), times in reasons.most_common(MOST_CLIENTS)
    ]
    more = [f"and {len(reasons) - MOST_CLIENTS} more reasons"] if len(reasons) > MOST_CLIENTS else []
    return "; ".join([f"{len(observations) - reasons.total()} of {len(observations)} updates came in", *named, *more])
