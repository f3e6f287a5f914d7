"""Success over thresholds: the share of examples at each PSNR or better, and its certified limit."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
from torch import nn

from fedgauge.attacks.base import LIMITS
from fedgauge.attacks.limits import reconstruction_robustness
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.client.chain import Chain
from fedgauge.defenses.accounting import Mechanism, NoGuarantee, mechanism
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.snapshot import RunSnapshot, viewed

THRESHOLDS = tuple(range(10, 61))  # dB


@viewed
def success_curve(reading: RunSnapshot) -> dict[str, list[Rate]]:
    """Count the examples at each PSNR of THRESHOLDS or better, by attack and baseline, for images only.

    Failures count as failed. Reconstructions without a grade are left out.
    """
    scores = reading.scores
    if scores.measure != ImageModality.main:
        return {}
    psnr = scores.of_metric(scores.measure.metric)
    if _unknown(psnr):
        return {}
    curve = {}
    for attack in [a for a in reading.order if scores.role(a) not in LIMITS]:
        rows = psnr.of_attack(attack)
        if not len(rows) or _unknown(rows) or (scores.role(attack) == "baseline" and np.isnan(rows.value).all()):
            continue
        rows = rows.where(~rows.ungraded)
        n = int(rows.counts(scores.measure.metric).sum())
        curve[attack] = [Rate(int((rows.value >= t).sum()), n) for t in THRESHOLDS]
    return curve


def _unknown(rows: Scores) -> bool:
    return bool(rows.ungraded.any() and np.isnan(rows.value).all())


def certified_success(reading: RunSnapshot, curve: Mapping[str, Sequence[Rate]]) -> list[float] | None:
    """Return the success rates at THRESHOLDS that no attack on one round exceeds; None without a certificate."""
    if (scenario := reading.built) is None:
        return None
    federation, shards = scenario.federation, scenario.federation.shards
    gaussian = gaussian_mechanism(federation.chain, shards.batch_size, federation.model, shards.dataset.fitted)
    floors = [rates for attack, rates in curve.items() if reading.scores.role(attack) == "baseline"]
    return None if gaussian is None else certified(floors, gaussian)


def gaussian_mechanism(
    chain: Chain, batch_size: int, model: nn.Module | None = None, fitted: Sequence[str] = ()
) -> Mechanism | None:
    """Return a chain's clipping and normal noise as a Gaussian mechanism; None for other chains.

    Args:
        fitted: what the dataset fitted to the examples: then one example changes all others, and no clip bounds it.
    """
    with suppress(NoGuarantee):
        found = None if fitted else mechanism(chain, batch_size, model)
        return found if found is not None and found.noise == "normal" else None
    return None


def certified(floors: Sequence[Sequence[Rate]], mechanism: Mechanism) -> list[float] | None:
    """Return the success rates at THRESHOLDS that no attack exceeds (ReRo); None without a baseline.

    The prior's success is the upper end of the best baseline's interval.

    Args:
        floors: success rates of each baseline.
    """
    if not floors:
        return None
    priors = [max(rate.interval[1] for rate in at) for at in zip(*floors, strict=True)]
    return [reconstruction_robustness(prior, mechanism.record, mechanism.uses) for prior in priors]
