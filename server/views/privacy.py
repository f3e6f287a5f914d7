"""What noise protects: the epsilons that were accounted, and beside them what canaries show of it in one run."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgauge.attacks.membership.canary_epsilon import CANARY, gaussian_epsilon
from fedgauge.attacks.membership.one_run import EVIDENCE, guess_bound
from fedgauge.client.components import SpecError
from fedgauge.defenses.accounting import Accountant, NoGuarantee, PrivacyStatement, privacy_statement, records_of
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import repeated
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.formatting import many
from fedgauge.server.views.intervals import NORMAL_95, evenly
from fedgauge.server.views.participation import rounds_seen
from fedgauge.server.views.reading import Reading, kept, viewed
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.tables import Cell, Column, Table

MOST = 1e6  # a canary's score; more would say nothing else
ESTIMATES = 200  # of as many rounds: a curve needs no more points
BOUNDS = 40  # the same, where each needs the accounted epsilon of a record, which takes long to compute


@viewed
def spent_in(reading: Reading) -> PrivacyStatement:
    """The largest epsilons that any client has spent so far; None, with the reason, if none holds or is known here."""
    try:
        spending = Spending(reading.scenario, reading.ledger, reading.answered)
    except SpecError as error:
        return PrivacyStatement(None, None, math.nan, f"No epsilon on this machine: {error}.")
    statement = spending.of_all()
    assumed = ", as the clients are assumed to defend" if reading.ledger.deployed else ""
    return replace(statement, words=f"Differential privacy{assumed}: {statement.words}.")


class Spending:
    """What the clients of a run have spent of their privacy: the one count, for a page and for an export.

    Args:
        answered: round and client of every update that was sent, or may have been.
    """

    def __init__(self, scenario: Scenario, ledger: Ledger, answered: Iterable[tuple[int, int]]) -> None:
        meta = ledger.meta()
        self._federation, self.delta, self._secret = scenario.federation, scenario.privacy.delta, not ledger.deployed
        self._seen = {c: sorted(rounds) for c, rounds in rounds_seen(scenario.protocol, answered).items()}
        self._again, self._last = repeated(meta), ledger.last_round()
        # a deployment's clients may have answered in a round that is not recorded yet, or never will be: its server died
        self._under_way = int(ledger.deployed and self._last < int(meta.get("rounds") or scenario.protocol.rounds))
        self._known: dict[tuple[int, int], float | None] = {}

    def _rounds(self, client: int, until: float = math.inf) -> int:
        """In how many rounds a client may have answered by the end of one."""
        under_way = self._under_way if until >= self._last else 0
        return bisect_right(self._seen.get(client, ()), until) + self._again + under_way

    def of_all(self) -> PrivacyStatement:
        """The most that any client has spent so far, of which nothing was recorded among them."""
        return self._statement({client: self._rounds(client) for client in (0, *self._seen)})

    def record(self, client: int, until: int) -> float | None:
        """The epsilon of one record by the end of a round, of the newest with what is under way; None if none holds."""
        rounds = self._rounds(client, until)
        key = rounds, records_of(self._federation, client)
        if key not in self._known:
            self._known[key] = self._statement({client: rounds}).record
        return self._known[key]

    def _statement(self, rounds: Mapping[int, int]) -> PrivacyStatement:
        return privacy_statement(self._federation, rounds, self.delta, self._secret)


class Estimate(NamedTuple):
    """An epsilon with its 95 % interval."""

    epsilon: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.epsilon:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class CanaryEstimate:
    """What the canaries' updates of the rounds so far show: an epsilon for all of a client's data, replaced by any other.

    A canary's statistic is its cosine with each update that it was in, in standard deviations of chance, summed over its rounds and
    divided by the root of their number: N(mean, deviation^2), and with the opposite direction in its place N(-mean, deviation^2).

    Args:
        round: the last of them.
        canaries: how many.
        releases: updates of each canary, the most.
        seen: with the deviation taken as known, 1; measured: with that measured among the canaries.
        accounted: the accounted epsilon of as many releases; None: none holds.
    """

    round: int
    canaries: int
    releases: int
    seen: Estimate
    measured: Estimate
    accounted: float | None

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Those of its own kind in a table."""
        each = [(of.epsilon, (of.low, of.high)) for of in (self.seen, self.measured)]
        return None, None, None, *each[0], *each[1]


def canary_estimates(scores: Scores, delta: float, accounted: Callable[[int], float | None]) -> list[CanaryEstimate]:
    """One for each round with canaries, from all rounds up to it; those with fewer than two canaries give none.

    Of more than ESTIMATES such rounds as many, evenly spread, the first and the last among them.

    Args:
        accounted: the epsilon of so many releases.
    """
    rows, found = _measured(scores, CANARY), []
    for round in evenly(np.unique(rows.round), ESTIMATES):
        so_far = rows.where(rows.round <= round)
        _, own, count = np.unique(so_far.example, return_inverse=True, return_counts=True)
        if len(count) < 2:
            continue
        root, releases = np.sqrt(count), int(count.max())
        mean = float(so_far.value.mean() * math.sqrt(releases))
        deviation = float(np.std(np.bincount(own, so_far.value) / root - so_far.value.mean() * root, ddof=1))
        known = _interval(mean, math.sqrt(releases / len(so_far)), delta)
        ratio = mean / deviation if deviation > 0 else 0.0
        spread = math.sqrt(releases / len(so_far) + ratio**2 / (2 * (len(count) - 1)))
        measured = _interval(ratio, spread, delta)
        found.append(CanaryEstimate(int(round), len(count), releases, known, measured, accounted(releases)))
    return found


def _measured(scores: Scores, metric: str) -> Scores:
    """The finite rows of a metric, clipped, as a ledger from elsewhere may hold any number."""
    rows = scores.where(scores.named(metric) & np.isfinite(scores.value))
    return replace(rows, value=np.clip(rows.value, -MOST, MOST))


def _interval(mean: float, error: float, delta: float) -> Estimate:
    """The epsilon between N(mean, 1) and N(-mean, 1), and of the ends of the mean's 95 % interval."""
    ends = (mean, mean - NORMAL_95 * error, mean + NORMAL_95 * error)
    return Estimate(*(gaussian_epsilon(2 * max(0.0, end), delta) for end in ends))


@dataclass(frozen=True)
class CanaryBound:
    """What guesses of which canary examples are among the data show, from all rounds so far: the least epsilon of one record.

    Args:
        round: the last of them.
        canaries: how many have been scored.
        releases: updates of each canary's client, the most.
        guesses, right: of the surest guesses, those that gave the bound.
        epsilon: the lower bound, with a confidence of 95 %.
        most: what the bound would be if all guesses were right.
        accounted: the accounted epsilon of a record after as many releases; None: none holds.
    """

    round: int
    canaries: int
    releases: int
    guesses: int
    right: int
    epsilon: float
    most: float
    accounted: float | None

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Those of its own kind in a table."""
        return (self.right, self.guesses), self.epsilon, self.most, None, None, None, None


def canary_bounds(
    scores: Scores, included: Tensor, delta: float, accounted: Callable[[int], float | None]
) -> list[CanaryBound]:
    """One for each round with canaries, from all rounds up to it; of more than BOUNDS such rounds as many, evenly spread.

    Args:
        included: (M,) bool, by the canary's number: whether it is among the data.
        accounted: a record's epsilon of so many releases.
    """
    rows, found = _measured(scores, EVIDENCE), []
    rows = rows.where((rows.example >= 0) & (rows.example < len(included)))
    for round in evenly(np.unique(rows.round), BOUNDS):
        so_far = rows.where(rows.round <= round)
        numbers, own, count = np.unique(so_far.example, return_inverse=True, return_counts=True)
        evidence, truth = torch.from_numpy(np.bincount(own, so_far.value)), included[torch.from_numpy(numbers)]
        bound, releases = guess_bound(evidence, truth, delta, len(included)), int(count.max())
        most = guess_bound(truth.double() - 0.5, truth, delta, len(included)).epsilon
        shown = (bound.guesses, bound.right, bound.epsilon, most)
        found.append(CanaryBound(int(round), len(numbers), releases, *shown, accounted(releases)))
    return found


@dataclass(frozen=True)
class Canaries:
    """What canaries show, round by round, and the newest round in words; no rows without canaries."""

    words: str = ""
    rows: Sequence[CanaryEstimate | CanaryBound] = ()

    @property
    def table(self) -> Table:
        """A row for each round: of examples lower bounds, of directions estimates."""
        columns = [
            Column("round", "round", "count"),
            Column("canaries", "canaries", "count"),
            Column("right", "surest guesses right", "rate"),
            Column("epsilon", "epsilon at least", "number"),
            Column("most", "at least, if all were right", "number"),
            Column("seen", "epsilon seen", "number"),
            Column("seen_interval", "95 % interval", "interval"),
            Column("measured", "with the spread measured", "number"),
            Column("measured_interval", "its 95 % interval", "interval"),
            Column("accounted", "accounted", "number"),
        ]
        return Table.of("Canaries", columns, [(r.round, r.canaries, *r.cells, r.accounted) for r in self.rows])


@viewed
def canaries(reading: Reading) -> Canaries:
    """What the canaries of a run show."""
    if (scenario := reading.built) is None:
        return Canaries()
    delta = scenario.privacy.delta
    if scenario.protocol.canary_examples:
        bounds = canary_bounds(reading.scores, scenario.protocol.coins, delta, partial(_accounted, reading))
        return Canaries(bound_words(bounds[-1], delta) if bounds else "", bounds)
    estimates = canary_estimates(reading.scores, delta, partial(_accounted, reading))
    return Canaries(canary_words(estimates[-1], delta) if estimates else "", estimates)


@kept
def _accounted(reading: Reading, releases: int) -> float | None:
    """The accounted epsilon of a client; of canary examples that of a record."""
    federation = reading.scenario.federation
    try:
        accountant = Accountant.of(federation, reading.scenario.privacy.delta, not reading.ledger.deployed)
    except NoGuarantee:
        return None
    if not federation.protocol.canary_examples:
        return accountant.spent_of_client(releases)
    # of the client with canaries that has the fewest examples, whose draws hide each the least
    fewest = min(len(federation.shards.indices[client]) for client in federation.protocol.canary_clients)
    return accountant.spent(releases, fewest).record


def canary_words(last: CanaryEstimate, delta: float) -> str:
    """What the newest estimate says."""
    words = (
        f"{last.canaries} canaries sent a fixed random direction in place of an update, at most {many(last.releases, 'time')} "
        f"each. What an observer of cosines sees of them is an epsilon of {last.seen} for all of a client's data at delta "
        f"{delta:g}; with the spread measured, {last.measured}. "
    )
    above = last.accounted is not None and math.isfinite(last.seen.low) and last.seen.low > last.accounted
    return words + _beside(last.accounted, above)


def bound_words(last: CanaryBound, delta: float) -> str:
    """What the newest bound says."""
    words = (
        f"{last.canaries} canary examples were each among a client's data or not, as a fair coin said. After at most "
        f"{many(last.releases, 'update')} of each client, {last.right} of the {last.guesses} surest guesses are right: the "
        f"epsilon of one record is at least {last.epsilon:.3g} at delta {delta:g} (confidence 95 %), where so many canaries can "
        f"show {last.most:.3g} at most. "
    )
    return words + _beside(last.accounted, last.accounted is not None and last.epsilon > last.accounted)


def _beside(accounted: float | None, above: bool) -> str:
    """The accounted epsilon beside what was seen."""
    if accounted is None:
        return "No epsilon is accounted for this chain."
    less = ", which is less: the noise protects less than the accounting says" if above else ""
    return f"The accounted epsilon is {accounted:.3g}{less}."
