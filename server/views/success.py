"""How many of the attacked examples come back at each level or better."""

import numpy as np

from fedgauge.attacks.modality.images import ImageModality
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.roles import attack_order, is_baseline, is_limit
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
