"""Sentences on which clients gave an update, which did not, and what their guards reported."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from fedgauge.client.inspection.policy import is_alarm
from fedgauge.server.views.server_attacks import first_alarm, shortened

MOST_CLIENTS = 5  # named in a sentence


class ObservationRow(Protocol):
    """A row of the ledger's observations."""

    def __getitem__(self, column: str, /) -> Any:
        """A column's value."""


def absences(round: int, observations: Sequence[ObservationRow]) -> str:
    """How many of a round's clients gave an update, and why each of the others did not; empty if all did."""
    absent = [o for o in observations if o["status"] != "accepted"]
    if not absent:
        return ""
    named = [f"client {o['client']}: {shortened(o['reason'])}" for o in absent[:MOST_CLIENTS]]
    more = [f"and {len(absent) - MOST_CLIENTS} more"] if len(absent) > MOST_CLIENTS else []
    return "; ".join(
        [f"round {round}: {len(observations) - len(absent)} of {len(observations)} clients", *named, *more]
    )


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


def guarded(observations: Sequence[ObservationRow]) -> str:
    """How often clients' guards raised an alarm or withheld an update in a simulation, and the first time; empty if never."""
    alarms = [o for o in observations if is_alarm(o["reason"])]
    if not alarms:
        return ""
    rounds = len({o["round"] for o in alarms})
    return f"clients' guards alarmed {len(alarms)} times in {rounds} rounds; {first_alarm(alarms, named=True)}"
