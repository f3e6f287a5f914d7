"""The effects of a malicious server: what it sent, what that recovered, who noticed, and what it cost the federation."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np

from fedgauge.attacks.modality.base import MainMetric
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.formatting import in_unit, many, percent, shortened
from fedgauge.server.views.scores import Scores

Key = tuple[int, int]  # round, client
Row = Any  # a row of the ledger, read by column name


def server_attack_effects(scenario: Scenario, scores: Scores, ledger: Ledger) -> dict[str, str]:
    """One sentence by heading; empty if the server is honest."""
    if not scenario.server_attack:
        return {}
    seen = [o for o in ledger.observations() if o["status"] == "accepted" or o["alarm"]]
    members = {(o["round"], o["client"]): _altered_clients(scenario, o["round"], o["client"]) for o in seen}
    altered = {key for key, clients in members.items() if clients}
    rounds = sorted({r for r, _ in altered})
    sent = f"{many(sum(map(len, members.values())), 'message')} answered in {many(len(rounds), 'round')}"
    trouble = ledger.meta().get("server_attack")
    return {
        "sent": "; ".join([f"{'; '.join(map(str, scenario.server_attack))}: {sent}", *([trouble] if trouble else [])]),
        "recovered": _recovered(_best(scores), altered, rounds, scores.measure),
        "noticed": _noticed(scenario, seen, altered),
        "cost": _cost(scenario, ledger, seen, altered, rounds),
    }


def _altered_clients(scenario: Scenario, round: int, client: int) -> list[int]:
    """The clients behind one reply (several under a secure sum) that were sent altered weights."""
    members = scenario.protocol.members(client, round)
    return [c for c in members if any(aimed.targeting.applies_to(round, c) for aimed in scenario.server_attack)]


def _best(scores: Scores) -> dict[tuple[int, int, int], float]:
    """The best uncapped value of any attack, by round, client and example."""
    rows = scores.of_metric(scores.measure.metric)
    rows = rows.where(rows.by_attacks & ~np.isnan(rows.value)).leakiest(scores.measure.metric)
    keys = zip(rows.round.tolist(), rows.client.tolist(), rows.example.tolist(), strict=True)
    return dict(zip(keys, rows.value.tolist(), strict=True))


def _recovered(
    best: Mapping[tuple[int, int, int], float], altered: set[Key], rounds: Sequence[int], by: MainMetric
) -> str:
    if not best:
        return f"no {by.private} has been graded"
    theirs = {k: v for k, v in best.items() if k[:2] in altered}
    others = [v for k, v in best.items() if k not in theirs]
    words = f"of the {by.private}s behind altered weights {_exact(list(theirs.values()), by)}"
    if first := min((r for (r, _, _), v in theirs.items() if by.came_back_whole(v)), default=None):
        words += f", the first after {many(rounds.index(first) + 1, 'such round')} (round {first})"
    return f"{words}; of all others {_exact(others, by)}"


def _exact(found: Sequence[float], by: MainMetric) -> str:
    if not found:
        return "none was graded"
    exact = sum(map(by.came_back_whole, found))
    nearest = f" ({percent(exact / len(found))})" if exact else f", the best {in_unit(by.leakiest(found, float), by)}"
    return f"{exact} of {len(found)} at {by.complete:g} {by.unit}{'' if by.cap is None else ' or more'}{nearest}"


def _noticed(scenario: Scenario, seen: Sequence[Row], altered: set[Key]) -> str:
    """Alarms among the replies to altered messages and among the others, and the suspicions that clients reported.

    A secure sum counts as alarmed if one of its members raised an alarm.
    """
    alarms = {(o["round"], o["client"]) for o in seen if o["alarm"]}
    honest = {(o["round"], o["client"]) for o in seen} - altered
    if scenario.protocol.guard.inspect == "off" and all(o["alarm"] is None for o in seen):
        return "no client's guard reported anything (clients inspect what they are sent only if [guard] inspect is not off)"
    answer = "message" if scenario.protocol.secure_sum is None else "sum"
    words = (
        f"guards alarmed at {len(alarms & altered)} of {many(len(altered), f'altered {answer}')} and {len(alarms & honest)} of "
        f"{len(honest)} honest ones"
    )
    suspicions = [o["suspicion"] for o in seen if o["suspicion"] is not None and (o["round"], o["client"]) in altered]
    spread = " to ".join(dict.fromkeys(f"{s:.3g}" for s in (min(suspicions), max(suspicions)))) if suspicions else ""
    words += f"; suspicion {spread} at the altered ones (alarm above 1)" if suspicions else ""
    return "; ".join(filter(None, (words, first_alarm(seen))))


def first_alarm(seen: Sequence[Row]) -> str:
    """The first alarm: its round, the client of the update or sum, and the message; empty if no guard raised one."""
    return next(
        (
            f"first in round {o['round']}, on client {o['client']}'s update: {shortened(o['reason'])}"
            for o in seen
            if o["alarm"]
        ),
        "",
    )


def _cost(scenario: Scenario, ledger: Ledger, seen: Sequence[Row], altered: set[Key], rounds: Sequence[int]) -> str:
    """What happened to the updates, and how accuracy changed in rounds with and without altered weights."""
    accuracy = {r["round"]: r["accuracy"] for r in ledger.rounds() if r["accuracy"] is not None}
    steps = {r: 100 * (accuracy[r] - accuracy[r - 1]) for r in accuracy if r - 1 in accuracy}
    kept = [aimed.targeting.aggregate for aimed in scenario.server_attack]
    fate = "averaged as all are" if all(kept) else "averaged in part" if any(kept) else "left out of the average"
    words = f"answers to altered weights ({many(len(altered), 'update')} of {len(seen)}) were {fate}"
    both = (("in those rounds", True), ("in the others", False))
    moved = [(which, [step for r, step in steps.items() if (r in rounds) is own]) for which, own in both]
    parts = [f"{mean(part):+.1f} points a round {which}" for which, part in moved if part]
    return f"{words}; test accuracy moved by {', '.join(parts)} (early rounds move it most)" if parts else words
