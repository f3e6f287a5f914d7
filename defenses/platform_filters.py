"""Filters of a client's update that federated platforms offer, with their defaults.

NVFlare: percentile_privacy and svt_privacy; Flower: the noise of LocalDpMod. Each belongs after local training.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Generator, Tensor

from fedgauge.client.components import Count, NotNegative, Part, Positive, Range, Share
from fedgauge.client.transforms import Link, UpdateDistribution, UpdateTransform
from fedgauge.client.update import Update
from fedgauge.defenses.noise import gaussian

Percentage = Annotated[float, Range("in 0..100", lambda v: 0 <= v <= 100)]
PASSES = 64  # over the entries that were not accepted before; NVFlare has no end


@dataclass(frozen=True)
class percentile_privacy(UpdateTransform):
    """Send the entries that change most in a local step, above a percentile, each at most gamma (NVFlare 2).

    NVFlare's PercentilePrivacy with its defaults (Shokri & Shmatikov, 2015).

    Args:
        percentile: 0 to 100, of the absolute values of all entries; smaller ones become zero.
        gamma: above 0, the largest change of an entry in a step.
        steps: local steps in a round, at least 1.

    Raises:
        ValueError: percentile is outside 0 to 100.

    Example:
        >>> percentile_privacy(50.0, gamma=3.0).apply({"w": torch.tensor([1.0, -4.0, 2.0])}, None)
        {'w': tensor([ 0., -3.,  2.])}
    """

    percentile: Percentage = 10.0
    gamma: Positive = 0.01
    steps: Count = 1

    def apply(self, update: Update, rng: Generator | None) -> Update:
        magnitudes = _flat(update).detach().abs() / self.steps
        # numpy's percentile: between two neighbours by their distance; torch's quantile takes 16 M entries at most
        ordered, place = magnitudes.sort().values, (len(magnitudes) - 1) * self.percentile / 100
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        cutoff = low + (high - low) * (place - math.floor(place))
        most = _within(self.gamma * self.steps, update)
        return {
            k: torch.where(t.abs() < cutoff * self.steps, torch.zeros_like(t), t).clamp(-most, most)
            for k, t in update.items()
        }

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """An entry at the bound reveals only its sign."""
        return None


@dataclass(frozen=True)
class svt_privacy(UpdateTransform):
    """Send a part of the entries, which a noisy threshold chooses, with Laplace noise (sparse vector of NVFlare 2.8 or 2.7).

    NVFlare's SVTPrivacy with its defaults. Version 2.8 divides epsilon between threshold and queries as 1 : (2 c)^(2/3), where
    c entries are sent, and bounds values before it adds noise; version 2.7 and earlier had less noise at the same epsilon,
    and bound values after it too. No epsilon is stated for it, as one example may change all entries.

    Args:
        fraction: of the entries that are sent, above 0 and at most 1.
        epsilon: above 0; of the threshold's noise and of the queries'.
        noise_var: above 0; the noise on what is sent has scale 2 gamma / noise_var.
        gamma: above 0, the largest change of an entry in a step.
        tau: the threshold before noise.
        steps: local steps in a round, at least 1.
        version: "2.8" (and later) or "2.7" (and earlier) of NVFlare.
        replace: draw accepted entries with replacement, which sends fewer.
        epsilon_threshold, epsilon_query: their sum is epsilon; one or both may be left out. Version 2.8.
        epsilon_release: of the noise on all that is sent, in place of c noise_var. Version 2.8.

    Raises:
        ValueError: an unknown version, or epsilons that do not add up.

    Example:
        >>> import torch
        >>> update = {"weight": torch.tensor([0.0, 2.0, 0.0, -3.0])}
        >>> svt_privacy(0.25, epsilon=1e9, noise_var=1e9, gamma=5.0, tau=2.5).apply(update, None)["weight"].round()
        tensor([ 0.,  0.,  0., -3.])
    """

    fraction: Share = 0.1
    epsilon: Positive = 0.1
    noise_var: Positive = 0.1
    gamma: Positive = 1e-5
    tau: float = 1e-6
    steps: Count = 1
    version: Literal["2.7", "2.8"] = "2.8"
    replace: bool = True
    epsilon_threshold: Positive | None = None
    epsilon_query: Positive | None = None
    epsilon_release: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        own = ("epsilon_threshold", "epsilon_query", "epsilon_release")
        if self.version == "2.7" and (given := [name for name in own if getattr(self, name) is not None]):
            raise ValueError(f"{given[0]} needs version 2.8")
        threshold, query = self._split(1)
        if not (threshold > 0 and query > 0 and math.isclose(threshold + query, self.epsilon)):
            raise ValueError(f"epsilon_threshold + epsilon_query must be epsilon = {self.epsilon:g}, each above 0")

    def _split(self, wanted: int) -> tuple[float, float]:
        """Divide epsilon between the threshold and the queries."""
        threshold, query = self.epsilon_threshold, self.epsilon_query
        if threshold is None:
            threshold = self.epsilon / (1 + (2 * wanted) ** (2 / 3)) if query is None else self.epsilon - query
        return threshold, self.epsilon - threshold if query is None else query

    def scales(self, wanted: int) -> tuple[float, float, float]:
        """Return the Laplace scales of the threshold, of a query and of what is sent, in units of gamma."""
        if self.version == "2.7":
            return 2 / self.epsilon, 4 * wanted / (self.epsilon * (2 * wanted) ** (2 / 3)), 2 / self.noise_var
        threshold, query = self._split(wanted)
        return 1 / threshold, 2 * wanted / query, 2 * wanted / (self.epsilon_release or wanted * self.noise_var)

    @property
    def mean(self) -> Link:
        return percentile_privacy(0.0, self.gamma, self.steps)

    def apply(self, update: Update, rng: Generator | None) -> Update:
        flat, gamma = _flat(update) / self.steps, _within(self.gamma, update)
        wanted = math.ceil(self.fraction * len(flat))
        of_threshold, of_query, of_value = (gamma * scale for scale in self.scales(wanted))
        threshold = self.tau + _laplace(1, of_threshold, rng)
        passes = _first_accepted(threshold - flat.abs().clamp(max=gamma), of_query, rng)
        order = passes.argsort()
        accepted = int((passes <= passes[order[wanted - 1]].clamp(max=PASSES)).sum())
        if self.replace:
            place = (torch.rand(wanted, generator=rng, dtype=torch.float64) * max(1, accepted)).long()
        else:
            place = torch.randperm(max(1, accepted), generator=rng)[:wanted]
        drawn = order[place]
        noise = _laplace(len(drawn), of_value, rng)
        if self.version == "2.7":
            noisy, most = (flat[drawn] + noise).clamp(-gamma, gamma), gamma * self.steps
        else:
            noisy, most = flat[drawn].clamp(-gamma, gamma) + noise, math.inf
        most = _within(most, update)
        noisy = (noisy * self.steps).clamp(-most, most)
        sent = torch.zeros_like(flat).index_put((drawn,), noisy.to(flat))
        parts = iter(sent.split([t.numel() for t in update.values()]))
        return {k: next(parts).view(t.shape) for k, t in update.items()}

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """A clipped sum with noise, of entries that depend on the values."""
        return None


def local_dp(epsilon: Positive, sensitivity: NotNegative = 1.0, delta: Part = 1e-5) -> gaussian:
    """The normal noise of LocalDpMod (Flower 1.41); put `clip` before it for the mod's clipping.

    Args:
        epsilon: above 0, which the mod is asked for; fedgauge's accountant states what the noise really gives.
        sensitivity: at least 0, of the clipped update.
        delta: above 0 and below 1.

    Example:
        >>> round(local_dp(epsilon=1.0).sigma, 2)
        4.84
    """
    return gaussian(sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon)


def _within(bound: float, update: Update) -> float:
    return min(bound, *(torch.finfo(t.dtype).max for t in update.values()))


def _flat(update: Update) -> Tensor:
    return torch.cat([t.flatten() for t in update.values()])


def _first_accepted(missing: Tensor, scale: float, rng: Generator | None) -> Tensor:
    """(n,) numbers of the pass, from 1, in which Laplace noise of this scale first exceeds what an entry (n,) is missing.

    Passes draw anew, so the number is geometric: one uniform draw gives it.
    """
    far = -missing.double().abs() / scale
    # the logarithm of the chance that a pass does not accept it
    stays = torch.where(missing > 0, torch.log1p(-0.5 * far.exp()), math.log(0.5) + far)
    chance = torch.rand(len(missing), generator=rng, dtype=torch.float64).clamp_min(1e-300)
    return (chance.log() / stays).ceil().clamp_min(1)


def _laplace(n: int, scale: float, rng: Generator | None) -> Tensor:
    """(n,) draws: the difference of two exponential ones."""
    first, second = torch.rand(2, n, generator=rng, dtype=torch.float64).clamp_min(1e-300).log().neg()
    found: Tensor = scale * (first - second)
    return found
