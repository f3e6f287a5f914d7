"""How many of the attacked examples come back at each level or better, and what no attack exceeds."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from fedgauge.attacks.limits import reconstruction_robustness
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.client.chain import Chain
from fedgauge.defenses.accounting import Mechanism, NoGuarantee, mechanism
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.reading import Reading, Snapshot, viewed
from fedgauge.server.views.roles import is_baseline, is_limit
from fedgauge.server.views.scores import Scores

THRESHOLDS = tuple(range(10, 61))  # dB


@viewed
def success_curve(reading: Snapshot) -> dict[str, list[Rate]]:
    """For each attack and baseline, how many of all attacked examples reach each PSNR of THRESHOLDS; failures do not.

    What clients did not grade counts neither way: an attack of which they graded nothing has no curve, and if they graded
    nothing at all there are no curves. There are none for text, whose thresholds would differ.
    """
    scores = reading.scores
    if scores.measure != ImageModality.main:
        return {}
    psnr = scores.of_metric(scores.measure.metric)
    if _unknown(psnr):
        return {}
    curve = {}
    for attack in [a for a in reading.order if not is_limit(a)]:
        rows = psnr.of_attack(attack)
        if not len(rows) or _unknown(rows) or (is_baseline(attack) and np.isnan(rows.value).all()):
            continue
        rows = rows.where(~rows.ungraded)
        n = int(rows.counts(scores.measure.metric).sum())
        curve[attack] = [Rate(int((rows.value >= t).sum()), n) for t in THRESHOLDS]
    return curve


def _unknown(rows: Scores) -> bool:
    """Whether every reconstruction is ungraded: if the rest only failed, no rate can be given."""
    return bool(rows.ungraded.any() and np.isnan(rows.value).all())


def certified_success(reading: Reading, curve: Mapping[str, Sequence[Rate]]) -> list[float] | None:
    """The success rates at THRESHOLDS that no attack on one round exceeds; None where the chain gives none."""
    if (scenario := reading.built) is None:
        return None
    federation = scenario.federation
    shards = federation.shards
    gaussian = gaussian_mechanism(federation.chain, shards.batch_size, federation.model, shards.dataset.fitted)
    return None if gaussian is None else certified(curve, gaussian)


def gaussian_mechanism(
    chain: Chain, batch_size: int, model: nn.Module | None = None, fitted: Sequence[str] = ()
) -> Mechanism | None:
    """A chain's clipping and normal noise as a Gaussian mechanism; None for other chains (see `fedgauge.defenses.accounting`).

    Args:
        fitted: of the dataset: where anything was, one example changes all others, and no clip bounds what it moves.
    """
    try:
        found = None if fitted else mechanism(chain, batch_size, model)
    except NoGuarantee:
        return None
    return found if found is not None and found.noise == "normal" else None


def certified(curve: Mapping[str, Sequence[Rate]], mechanism: Mechanism) -> list[float] | None:
    """The success rates at THRESHOLDS that no attack exceeds (ReRo), from a success curve's baselines; None without any.

    The prior's success is the best baseline's, at the upper end of its interval: an event that was never seen may happen.
    """
    floors = [rates for attack, rates in curve.items() if is_baseline(attack)]
    if not floors:
        return None
    priors = [max(rate.interval[1] for rate in at) for at in zip(*floors, strict=True)]
    return [reconstruction_robustness(prior, mechanism.record, mechanism.uses) for prior in priors]
