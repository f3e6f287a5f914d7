"""Who took part in which round, as the server saw it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedgauge.client.protocol import Protocol
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.formatting import listed, many, shortened

MOST_CLIENTS = 5  # named in a sentence
MOST_SIZES = 3  # of one client, in a sentence
Row = Any  # a row of the ledger, read by column name


@dataclass(frozen=True)
class AppClient:
    """A client of a user's own app.

    Args:
        client: its number, in the order in which its node's first reply was asked for: not the app's partition.
        node: Flower's id of it, empty if it is not known.
        examples: how many it reported in its rounds, each number once.
    """

    client: int
    node: str
    examples: tuple[int, ...]

    @property
    def size(self) -> str:
        """How many examples it reported, as text."""
        return listed(list(map(str, self.examples)), MOST_SIZES, " or ") or "?"

    def __str__(self) -> str:
        return f"client {self.client} = node {self.node or '?'}, {self.size} example{'s' if self.size != '1' else ''}"


def app_clients(ledger: Ledger) -> list[AppClient]:
    """The clients of a user's own app that gave updates; empty for other runs."""
    if not ledger.foreign:
        return []
    nodes, sizes = ledger.nodes(), dict[int, set[int]]()
    for o in ledger.observations():
        if o["status"] == "accepted":
            sizes.setdefault(o["client"], set()).update([o["examples"]] if o["examples"] else [])
    return [AppClient(client, nodes.get(client, ""), tuple(sorted(own))) for client, own in sorted(sizes.items())]


def numbering(clients: Sequence[AppClient]) -> str:
    """Which node each client's number stands for, in one sentence; empty if there are none."""
    named = listed(list(map(str, clients)), MOST_CLIENTS)
    return f"clients are numbered as Flower's nodes came, not by partition: {named}" if named else ""


def other_sizes(clients: Sequence[AppClient], assumed: int) -> str:
    """Which clients report another number of examples than the audit takes each for; empty if none does."""
    others = [f"client {c.client} reports {c.size}" for c in clients if set(c.examples) - {assumed}]
    if not others:
        return ""
    taken = f"the audit takes each client to train on {many(assumed, 'example')} a round (batch_size under [data])"
    return f"{taken}, but {listed(others, MOST_CLIENTS)}: unless these count batches, the results are invalid"


def may_have_sent(observed: Row, deployed: bool) -> bool:
    """Whether a client may have computed an update: one came, its guard withheld it, or it came too late."""
    return bool(observed["status"] != "missing" or observed["alarm"] or (deployed and observed["silent"]))


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


def participation(observations: Sequence[Row]) -> str:
    """How many of all expected updates came in, and why the others did not, most frequent reason first; empty if all did."""
    reasons = Counter((o["client"], o["status"], o["reason"]) for o in observations if o["status"] != "accepted")
    if not reasons:
        return ""
    named = [
        f"client {client} {status} in {many(times, 'round')}: {shortened(reason)}"
        for (client, status, reason), times in reasons.most_common()
    ]
    came = f"{len(observations) - reasons.total()} of {len(observations)} updates came in"
    return f"{came}; {listed(named, MOST_CLIENTS)}"


def first_alarm(seen: Sequence[Row]) -> str:
    """The first alarm: its round, the client of the update or sum, and the message; empty if no guard raised one."""
    first = next((o for o in seen if o["alarm"]), None)
    if first is None:
        return ""
    return f"first in round {first['round']}, on client {first['client']}'s update: {shortened(first['reason'])}"


def guarded(observations: Sequence[Row]) -> str:
    """How often clients' guards raised an alarm or withheld an update in a simulation, and the first time; empty if never."""
    alarms = [o for o in observations if o["alarm"]]
    if not alarms:
        return ""
    rounds = len({o["round"] for o in alarms})
    return f"clients' guards alarmed {len(alarms)} times in {rounds} rounds; {first_alarm(alarms)}"
