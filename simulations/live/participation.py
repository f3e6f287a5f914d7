"""Sentences on which of a round's clients gave no update, and on what clients' guards reported."""

from collections.abc import Sequence

from fedgauge.server.views.participation import MOST_CLIENTS, ObservationRow
from fedgauge.server.views.server_attacks import first_alarm, shortened


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


def guarded(observations: Sequence[ObservationRow]) -> str:
    """How often clients' guards raised an alarm or withheld an update in a simulation, and the first time; empty if never."""
    alarms = [o for o in observations if o["alarm"]]
    if not alarms:
        return ""
    rounds = len({o["round"] for o in alarms})
    return f"clients' guards alarmed {len(alarms)} times in {rounds} rounds; {first_alarm(alarms)}"
