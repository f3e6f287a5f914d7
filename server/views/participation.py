"""Participation of clients in the rounds, as the server saw it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedgauge.client.protocol import Protocol
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import sanitised
from fedgauge.server.views.formatting import listed, many
from fedgauge.server.views.tables import Column, Table

MOST_CLIENTS = 5  # named in a sentence
MOST_SIZES = 3  # of one client, in a sentence
Row = Any  # a row of the ledger, read by column name


def _reported_sizes(ledger: Ledger) -> dict[int, set[int]]:
    """Map each client of a user's own app to the numbers of examples that it reported; empty for other runs."""
    sizes: dict[int, set[int]] = {}
    for o in ledger.observations() if ledger.foreign else ():
        if o["status"] == "accepted":
            sizes.setdefault(o["client"], set()).update([o["examples"]] if o["examples"] else [])
    return sizes


def _or(sizes: Iterable[int]) -> str:
    return listed(list(map(str, sorted(sizes))), MOST_SIZES, " or ") or "?"


def app_clients_table(ledger: Ledger) -> Table:
    nodes, sizes = ledger.nodes(), _reported_sizes(ledger)
    columns = [
        Column("client", "client", "count"),
        Column("node", "Flower's node"),
        Column("size", "reported examples"),
    ]
    rows = [(client, nodes.get(client, ""), _or(own)) for client, own in sorted(sizes.items())]
    return Table("Clients, numbered in the order of Flower's nodes, not by partition", columns, rows)


def other_sizes(ledger: Ledger, tables: Mapping[str, Any]) -> str:
    """Name the attacked clients of a user's own app that report another number than the scenario's examples, or batches of them.

    Where `fedgauge app` observed the examples, their number is known, which augmentation multiplies by the epochs.
    """
    if ledger.meta().get("examples") == "observed":
        return ""
    assumed = tables.get("data", {}).get("batch_size", 1)
    step = next((link["batch_size"] for link in tables.get("chain", ()) if "batch_size" in link), assumed)
    expected = {assumed, math.ceil(assumed / step) if step < assumed else assumed}
    sizes = _reported_sizes(ledger)
    attacked = tables.get("audit", {}).get("clients", sizes)
    others = [f"client {c} reports {_or(sizes[c])}" for c in sorted(sizes) if c in attacked and sizes[c] - expected]
    if not others:
        return ""
    taken = f"the audit assumes {many(assumed, 'example')} a round for each client (batch_size under [data])"
    return f"{taken}, but {listed(others, MOST_CLIENTS)}: unless these count batches, the results are invalid"


def may_have_sent(observed: Row, deployed: bool) -> bool:
    """Check if a client may have computed an update: it arrived, its guard withheld it, or it was late."""
    return bool(observed["status"] != "missing" or observed["alarm"] or (deployed and observed["silent"]))


def rounds_seen(protocol: Protocol, replies: Iterable[tuple[int, int]]) -> dict[int, set[int]]:
    """Map each client to the rounds in which the server received its reply.

    Args:
        replies: (round, client) of every reply, also rejected ones; under a secure sum of a group's first client.
    """
    seen: dict[int, set[int]] = {}
    for round, client in replies:
        for member in {client, *protocol.group(client)}:
            seen.setdefault(member, set()).add(round)
    return seen


def participation(observations: Sequence[Row]) -> str:
    """Count the missing and rejected updates, the most frequent reason first; empty if none is missing."""
    reasons = Counter((o["client"], o["status"], o["reason"]) for o in observations if o["status"] != "accepted")
    if not reasons:
        return ""
    named = [
        f"client {client} {status} in {many(times, 'round')}: {sanitised(reason)}"
        for (client, status, reason), times in reasons.most_common()
    ]
    arrived = f"{len(observations) - reasons.total()} of {len(observations)} updates arrived"
    return f"{arrived}; {listed(named, MOST_CLIENTS)}"


def first_alarm(seen: Sequence[Row]) -> str:
    """Describe the first alarm of a client's guard; empty without one."""
    first = next((o for o in seen if o["alarm"]), None)
    if first is None:
        return ""
    return f"first in round {first['round']}, on client {first['client']}'s update: {sanitised(first['reason'])}"


def guarded(observations: Sequence[Row]) -> str:
    """Count the alarms of clients' guards in a simulation; empty without one."""
    alarms = [o for o in observations if o["alarm"]]
    if not alarms:
        return ""
    rounds = len({o["round"] for o in alarms})
    return f"clients' guards alarmed {len(alarms)} times in {rounds} rounds; {first_alarm(alarms)}"
