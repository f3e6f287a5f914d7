"""Certified success rates: what no attack exceeds, by a chain's clipping and noise (differential privacy)."""

from collections.abc import Mapping, Sequence

from torch import nn

from fedgauge.attacks.limits import reconstruction_robustness
from fedgauge.client.chain import Chain
from fedgauge.defenses import accounting
from fedgauge.defenses.accounting import Mechanism
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_baseline


def mechanism_of(reading: Reading) -> Mechanism | None:
    """The Gaussian mechanism of a run's chain; None if there is none, or its data is not on this machine."""
    if (scenario := reading.built) is None:
        return None
    shards, federation = scenario.federation.shards, scenario.federation
    return gaussian_mechanism(federation.chain, shards.batch_size, federation.model, shards.dataset.fitted)


def gaussian_mechanism(
    chain: Chain, batch_size: int, model: nn.Module | None = None, fitted: Sequence[str] = ()
) -> Mechanism | None:
    """A chain's clipping and normal noise as a Gaussian mechanism; None for other chains (see `fedgauge.defenses.accounting`).

    Args:
        fitted: of the dataset: where anything was, one example changes all others, and no clip bounds what it moves.
    """
    try:
        found = None if fitted else accounting.mechanism(chain, batch_size, model)
    except accounting.NoGuarantee:
        return None
    return found if found is not None and found.noise == "normal" else None


def certified(curve: Mapping[str, Sequence[Rate]], mechanism: Mechanism, rounds: int = 1) -> list[float] | None:
    """The success rates at THRESHOLDS that no attack exceeds (ReRo), from a success curve's baselines; None without any.

    The prior's success is the best baseline's, at the upper end of its interval: an event that was never seen may happen.

    Args:
        rounds: that use the same example.
    """
    floors = [rates for attack, rates in curve.items() if is_baseline(attack)]
    if not floors:
        return None
    priors = [max(rate.interval[1] for rate in at) for at in zip(*floors, strict=True)]
    return [reconstruction_robustness(prior, mechanism.record, rounds * mechanism.uses) for prior in priors]
