"""What differential privacy certifies: the success rates that no attack exceeds, from a chain's clipping and noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fedgauge.attacks.limits import reconstruction_robustness
from fedgauge.client.chain import Chain
from fedgauge.defenses import accounting
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.roles import is_baseline


@dataclass(frozen=True)
class GaussianMechanism:
    """What normal noise does for one example of an update.

    Args:
        multiplier: noise over the most that the example can move what it is added to.
        releases: of the example under fresh noise, in one round.
    """

    multiplier: float
    releases: int


def gaussian_mechanism(chain: Chain, batch_size: int, model: nn.Module | None = None) -> GaussianMechanism | None:
    """Clipping, then normal noise, as a Gaussian mechanism; None of another chain (`fedgauge.defenses.accounting` reads it)."""
    try:
        found = accounting.mechanism(chain, batch_size, model)
    except accounting.NoGuarantee:
        return None
    return GaussianMechanism(found.record, found.uses) if found.noise == "normal" else None


def certified(curve: Mapping[str, Sequence[Rate]], mechanism: GaussianMechanism, rounds: int = 1) -> list[float] | None:
    """The success rates of THRESHOLDS that no attack exceeds (ReRo), from a success curve's baselines; None without any.

    The prior's success is the best baseline's, at the upper end of its interval: what was never seen may yet happen.

    Args:
        rounds: in which the same example is used.
    """
    floors = [rates for attack, rates in curve.items() if is_baseline(attack)]
    if not floors:
        return None
    priors = [max(rate.interval[1] for rate in at) for at in zip(*floors, strict=True)]
    releases = rounds * mechanism.releases
    return [reconstruction_robustness(prior, mechanism.multiplier, releases) for prior in priors]
