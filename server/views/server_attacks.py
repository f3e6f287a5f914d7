"""Effects of a malicious server: messages, recovered examples, and alarms."""

from collections.abc import Sequence

import numpy as np

from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.formatting import in_unit, many
from fedgauge.server.views.participation import Row, first_alarm
from fedgauge.server.views.snapshot import RunSnapshot

Key = tuple[int, int]  # round, client


def server_attack_effects(reading: RunSnapshot) -> dict[str, str]:
    """Return a sentence by heading; empty for an honest server."""
    if not reading.tables.get("server_attack") or (scenario := reading.built) is None:
        return {}
    seen = [o for o in reading.observations if o["status"] == "accepted" or o["alarm"]]
    members = {(o["round"], o["client"]): _altered_clients(scenario, o["round"], o["client"]) for o in seen}
    altered = {key for key, clients in members.items() if clients}
    rounds = sorted({r for r, _ in altered})
    sent = f"{many(sum(map(len, members.values())), 'message')} answered in {many(len(rounds), 'round')}"
    attacks = f"{'; '.join(map(str, scenario.server_attack))}: {sent}"
    return {
        "sent": "; ".join(filter(None, (attacks, reading.meta.get("server_attack")))),
        "recovered": _recovered(reading, altered),
        "noticed": _noticed(scenario, seen, altered),
    }


def _altered_clients(scenario: Scenario, round: int, client: int) -> list[int]:
    """Return the clients of one reply (several under a secure sum) with altered weights."""
    members = scenario.protocol.group(client)
    return [c for c in members if any(aimed.applies_to(round, c) for aimed in scenario.server_attack)]


def _recovered(reading: RunSnapshot, altered: set[Key]) -> str:
    """Count the examples recovered completely, with altered and with other weights."""
    by, rows = reading.scores.measure, reading.scores.of_metric(reading.scores.measure.metric)
    rows = rows.where(rows.by_attacks & ~np.isnan(rows.value)).leakiest(by.metric)
    found: dict[bool, list[float]] = {True: [], False: []}
    for round, client, value in zip(rows.round.tolist(), rows.client.tolist(), rows.value.tolist(), strict=True):
        found[(round, client) in altered].append(value)
    words = []
    for theirs, which in ((True, "with altered weights"), (False, "of all others")):
        values = found[theirs]
        reached = f"{sum(map(by.came_back_whole, values))} of {len(values)} at {by.complete:g} {by.unit}"
        words.append(f"{by.private}s {which}: {reached}, the best {in_unit(by.leakiest(values, float), by)}")
    return "; ".join(words)


def _noticed(scenario: Scenario, seen: Sequence[Row], altered: set[Key]) -> str:
    """Count the alarms at altered and at honest messages; a secure sum has the alarms of its members."""
    alarms = {(o["round"], o["client"]) for o in seen if o["alarm"]}
    honest = {(o["round"], o["client"]) for o in seen} - altered
    if scenario.protocol.guard.inspect == "off" and all(o["alarm"] is None for o in seen):
        return "no guard reported anything, as [guard] inspect is off"
    answer = "message" if scenario.protocol.secure_sum is None else "sum"
    counts = f"{len(alarms & altered)} of {many(len(altered), f'altered {answer}')}"
    words = f"guards alarmed at {counts} and {len(alarms & honest)} of {len(honest)} honest ones"
    return "; ".join(filter(None, (words, first_alarm(seen))))
