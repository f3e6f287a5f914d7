"""Accounted epsilons, and the epsilons that canaries measure in one run."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedgauge.attacks.membership.canary_epsilon import CANARY, gaussian_epsilon
from fedgauge.attacks.membership.one_run import EVIDENCE, GuessBound, guess_bound
from fedgauge.client.components import SpecError
from fedgauge.defenses.accounting import Accountant, NoGuarantee, PrivacyStatement, privacy_statement
from fedgauge.server.store.ledger_types import repeated
from fedgauge.server.views.formatting import many
from fedgauge.server.views.intervals import NORMAL_95
from fedgauge.server.views.participation import may_have_sent, rounds_seen
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.snapshot import RunSnapshot, viewed

MOST = 1e6  # a canary's score is clipped to


@viewed
def spent_in(reading: RunSnapshot) -> PrivacyStatement:
    """Return the largest epsilons that any client has spent, also one without a recorded reply; None, with the reason, if none."""
    try:
        scenario = reading.scenario
    except SpecError as error:
        return PrivacyStatement(None, None, math.nan, f"No epsilon on this machine: {error}.")
    ledger, meta = reading.ledger, reading.meta
    answered = [(o["round"], o["client"]) for o in reading.observations if may_have_sent(o, ledger.deployed)]
    seen = rounds_seen(scenario.protocol, answered)
    # a deployment's clients may have answered twice, and in a round that is not recorded
    under_way = ledger.deployed and ledger.last_round() < int(meta.get("rounds") or scenario.protocol.rounds)
    rounds = {client: len(seen.get(client, ())) + repeated(meta) + under_way for client in (0, *seen)}
    statement = privacy_statement(scenario.federation, rounds, scenario.privacy.delta, not ledger.deployed)
    assumed = ", as the clients are assumed to defend" if ledger.deployed else ""
    return replace(statement, words=f"Differential privacy{assumed}: {statement.words}.")


@dataclass(frozen=True)
class CanaryEstimate:
    """Epsilon for all of a client's data, estimated from the canaries' updates.

    The statistic of a canary is its cosine with each of its updates in standard deviations of chance, summed over rounds and
    divided by the root of their number. It is N(mean, 1), and N(-mean, 1) for the opposite direction.

    Args:
        releases: largest number of updates of a canary.
        low, high: 95 % interval.
    """

    canaries: int
    releases: int
    epsilon: float
    low: float
    high: float


def canary_estimate(scores: Scores, delta: float) -> CanaryEstimate | None:
    """Estimate an epsilon from all rounds; None below two canaries."""
    rows = _measured(scores, CANARY)
    _, count = np.unique(rows.example, return_counts=True)
    if len(count) < 2:
        return None
    releases = int(count.max())
    mean, error = float(rows.value.mean() * math.sqrt(releases)), math.sqrt(releases / len(rows))
    # the epsilon between N(mean, 1) and N(-mean, 1), with the interval that the mean's error gives
    ends = (mean, mean - NORMAL_95 * error, mean + NORMAL_95 * error)
    return CanaryEstimate(len(count), releases, *(gaussian_epsilon(2 * max(0.0, end), delta) for end in ends))


def _measured(scores: Scores, metric: str) -> Scores:
    rows = scores.where(scores.named(metric) & np.isfinite(scores.value))
    return replace(rows, value=np.clip(rows.value, -MOST, MOST))


@dataclass(frozen=True)
class CanaryBound:
    """Lower bound on the epsilon of one record from guesses about canary examples.

    Args:
        releases: largest number of updates of a client with canaries.
        bound: the lower bounds, each with 95 % confidence.
        most: the bound without an assumption if all guesses were right.
    """

    canaries: int
    releases: int
    bound: GuessBound
    most: float


def canary_bound(scores: Scores, included: Tensor, delta: float) -> CanaryBound | None:
    """Bound the epsilon from all rounds; None without canaries.

    Args:
        included: (M,) bool, True for canaries in the data.
    """
    rows = _measured(scores, EVIDENCE)
    rows = rows.where((rows.example >= 0) & (rows.example < len(included)))
    numbers, own, count = np.unique(rows.example, return_inverse=True, return_counts=True)
    if not len(numbers):
        return None
    evidence, truth = torch.from_numpy(np.bincount(own, rows.value)), included[torch.from_numpy(numbers)]
    bound, releases = guess_bound(evidence, truth, delta, len(included)), int(count.max())
    most = guess_bound(truth.double() - 0.5, truth, delta, len(included)).epsilon
    return CanaryBound(len(numbers), releases, bound, most)


@viewed
def canaries(reading: RunSnapshot) -> str:
    """Describe the result of a run's canaries over all rounds; empty without canaries."""
    if (scenario := reading.built) is None:
        return ""
    delta = scenario.privacy.delta
    if bound := bound_of(reading):
        return bound_words(bound, delta, _accounted(reading, bound.releases))
    if estimate := canary_estimate(reading.scores, delta):
        return canary_words(estimate, delta, _accounted(reading, estimate.releases))
    return ""


def bound_of(reading: RunSnapshot) -> CanaryBound | None:
    """Bound the epsilon of one record by a run's canary examples; None without any."""
    if (scenario := reading.built) is None or not scenario.protocol.canary_examples:
        return None
    return canary_bound(reading.scores, scenario.protocol.coins, scenario.privacy.delta)


def _accounted(reading: RunSnapshot, releases: int) -> float | None:
    """Return the accounted epsilon of a client; of a record for canary examples."""
    federation = reading.scenario.federation
    try:
        accountant = Accountant.of(federation, reading.scenario.privacy.delta, not reading.ledger.deployed)
    except NoGuarantee:
        return None
    if not federation.protocol.canary_examples:
        return accountant.spent_of_client(releases)
    # a client with few examples draws each most often
    fewest = min(len(federation.shards.indices[client]) for client in federation.protocol.canary_clients)
    return accountant.spent(releases, fewest).record


def canary_words(last: CanaryEstimate, delta: float, accounted: float | None) -> str:
    return (
        f"{last.canaries} canaries sent a fixed random direction in place of an update, at most {many(last.releases, 'time')} "
        f"each. Their cosines show an epsilon of {last.epsilon:.3g} ({last.low:.3g} to {last.high:.3g}) for all of a client's "
        f"data at delta {delta:g}. {_beside(accounted, last.low)}"
    )


def bound_words(last: CanaryBound, delta: float, accounted: float | None) -> str:
    return (
        f"A fair coin put each of {last.canaries} canary examples into a client's data or not. After at most "
        f"{many(last.releases, 'update')} of each client, {last.bound.right} of the {last.bound.guesses} surest guesses are "
        f"right. The epsilon of one record is at least {last.bound.epsilon:.3g} at delta {delta:g} (confidence 95 %); so many "
        f"canaries can show at most {last.most:.3g}. It is at least {last.bound.gaussian:.3g} if the mechanism's trade-off curve "
        f"is Gaussian, and {last.bound.normal:.3g} if the evidence of canaries is normal. "
        f"{_beside(accounted, last.bound.epsilon)}"
    )


def _beside(accounted: float | None, shown: float) -> str:
    """Compare the accounted epsilon with what canaries show at least."""
    if accounted is None:
        return "No epsilon is accounted for this chain."
    less = ", which is less: the noise protects less than the accounting says" if accounted < shown < math.inf else ""
    return f"The accounted epsilon is {accounted:.3g}{less}."
