"""Certified success rates: what no attack exceeds, by a chain's clipping and noise (differential privacy)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fedgauge.attacks.limits import reconstruction_robustness
from fedgauge.client.chain import Chain
from fedgauge.defenses import accounting
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_baseline


@dataclass(frozen=True)
class GaussianMechanism:
    """The Gaussian mechanism that protects one example of an update.

    Args:
        multiplier: standard deviation of the noise over the sensitivity to the example.
        releases: how often a round releases the example under fresh noise.
    """

    multiplier: float
    releases: int


def mechanism_of(reading: Reading) -> GaussianMechanism | None:
    """That of a run's chain; None if there is none, or its data is not on this machine."""
    if (scenario := reading.built) is None:
        return None
    shards, federation = scenario.federation.shards, scenario.federation
    return gaussian_mechanism(federation.chain, shards.batch_size, federation.model, shards.dataset.fitted)


def gaussian_mechanism(
    chain: Chain, batch_size: int, model: nn.Module | None = None, fitted: Sequence[str] = ()
) -> GaussianMechanism | None:
    """A chain's clipping and normal noise as a Gaussian mechanism; None for other chains (see `fedgauge.defenses.accounting`).

    Args:
        fitted: of the dataset: where anything was, one example changes all others, and no clip bounds what it moves.
    """
    if fitted:
        return None
    try:
        found = accounting.mechanism(chain, batch_size, model)
    except accounting.NoGuarantee:
        return None
    return GaussianMechanism(found.record, found.uses) if found.noise == "normal" else None


def certified(curve: Mapping[str, Sequence[Rate]], mechanism: GaussianMechanism, rounds: int = 1) -> list[float] | None:
    """The success rates at THRESHOLDS that no attack exceeds (ReRo), from a success curve's baselines; None without any.

    The prior's success is the best baseline's, at the upper end of its interval: an event that was never seen may happen.

    Args:
        rounds: that use the same example.
    """
    floors = [rates for attack, rates in curve.items() if is_baseline(attack)]
    if not floors:
        return None
    priors = [max(rate.interval[1] for rate in at) for at in zip(*floors, strict=True)]
    releases = rounds * mechanism.releases
    return [reconstruction_robustness(prior, mechanism.multiplier, releases) for prior in priors]
