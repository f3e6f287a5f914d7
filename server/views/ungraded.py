"""Reconstructions that nobody has graded: how many there are, and what their attacks minimised."""

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

import numpy as np

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.formatting import status_words
from fedgauge.server.views.roles import is_attack, planned_attacks
from fedgauge.server.views.scores import Scores


@dataclass(frozen=True)
class UngradedAttack:
    """One attack in one round, without a truth.

    Args:
        accuracy: of the model after the round; None if the app names none.
        reconstructions: updates of which something came back.
        objective, lowest: median and smallest final objective; None if the attack has none. Comparable within an attack only.
        statuses: how its attempts ended, as text.
    """

    round: int
    accuracy: float | None
    attack: str
    reconstructions: int
    objective: float | None
    lowest: float | None
    statuses: str


def ungraded_table(scores: Scores, ledger: Ledger) -> list[UngradedAttack]:
    """What came back and nobody graded, by round and attack in the plan's order; empty if nothing came back ungraded.

    If nothing at all is graded, attacks of which nothing came back are listed, too: no other table shows them.
    """
    accuracy = {row["round"]: row["accuracy"] for row in ledger.rounds()}
    valued = scores.where(~np.isnan(scores.value))
    pairs = np.unique(np.stack([valued.round, valued.attack]), axis=1).T.tolist()
    graded = {(round, scores.attacks[attack]) for round, attack in pairs}
    found: dict[tuple[int, str], list[tuple[float | None, str]]] = defaultdict(list)
    for row in ledger.objectives():
        if is_attack(row["attack"]) and (row["round"], row["attack"]) not in graded:
            found[row["round"], row["attack"]].append((row["value"], row["status"]))
    plan = list(planned_attacks(ledger))
    lines = []
    for (round, attack), ended in sorted(found.items(), key=lambda item: (item[0][0], plan.index(item[0][1]))):
        values = [value for value, _ in ended if value is not None]
        counts = {status: sum(s == status for _, s in ended) for status in sorted({s for _, s in ended})}
        lines.append(
            UngradedAttack(
                round=round,
                accuracy=accuracy.get(round),
                attack=attack,
                reconstructions=sum(n for status, n in counts.items() if status not in ("not_applicable", "diverged")),
                objective=median(values) if values else None,
                lowest=min(values, default=None),
                statuses=", ".join(f"{n} {status_words(status)}" for status, n in counts.items()),
            )
        )
    came_back = [line for line in lines if line.reconstructions]
    return lines if came_back and not any(is_attack(attack) for _, attack in graded) else came_back
