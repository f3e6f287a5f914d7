"""How many of the attacked examples come back at each level or better, and what came back that nobody graded."""

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

import numpy as np

from fedgauge.attacks.modality.images import ImageModality
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.formatting import status_words
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.roles import attack_order, is_attack, is_baseline, is_limit, planned_attacks
from fedgauge.server.views.scores import Scores

THRESHOLDS = tuple(range(10, 61))  # dB


def success_curve(scores: Scores, ledger: Ledger) -> dict[str, list[Rate]]:
    """For each attack and baseline, how many of all attacked examples reach each PSNR of THRESHOLDS; failures do not.

    What clients did not grade counts neither way: an attack of which they graded nothing has no curve, and if they graded
    nothing at all there are no curves. There are none for text, whose thresholds would differ.
    """
    if scores.measure != ImageModality.main:
        return {}
    psnr = scores.of_metric(scores.measure.metric)
    if _unknown(psnr):
        return {}
    curve = {}
    for attack in [a for a in attack_order(ledger, psnr.attacks) if not is_limit(a)]:
        rows = psnr.of_attack(attack)
        if not len(rows) or _unknown(rows) or (is_baseline(attack) and np.isnan(rows.value).all()):
            continue
        rows = rows.where(~rows.ungraded)
        n = int(rows.counts(scores.measure.metric).sum())
        curve[attack] = [Rate(int((rows.value >= t).sum()), n) for t in THRESHOLDS]
    return curve


def count_ungraded(scores: Scores) -> int:
    """How many reconstructions by attacks a deployment's clients did not grade."""
    return int((scores.ungraded & scores.by_attacks).sum())


def _unknown(rows: Scores) -> bool:
    """Whether every reconstruction is ungraded: if the rest only failed, no rate can be given."""
    return bool(rows.ungraded.any() and np.isnan(rows.value).all())


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
