"""Results of the membership tests of a run, in one sentence for each question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedgauge.attacks.base import LIMITS
from fedgauge.attacks.membership.limit import mu_of, power
from fedgauge.attacks.modality.membership import HELD, MEMBER, QUESTIONS, RATES
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.formatting import percent
from fedgauge.server.views.intervals import LUCK, Rate
from fedgauge.server.views.leakage import counted_of_all
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.strength import PairedDifference, paired, rivals_of, values_of

Word = Literal["leaks", "not shown to leak", "undetermined"]
ONE_PERCENT, ONE = "_at_1_percent", 0.01
CHANCE = 0.5  # of two examples, which is the member
RATES_SHOWN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of false positives


@dataclass(frozen=True)
class MembershipResult:
    """Result of one test of one question.

    Args:
        metric: MEMBER or HELD, the question.
        attack, baseline: names; the baseline is the hardest to beat, or chance.
        area: under the ROC curve, the mean over members.
        floor: area of the baseline.
        excess_low: lower end of the interval of area - floor, corrected for several tests; None below two clients.
        clients: number of clients that trained on the members.
        hits: members detected at 1 % false positives, of those with enough non-members; None without any.
        hits_by_luck: probability of as many detections by luck.
        limit: the area that the noise of one update allows; None: unknown.
        tests: number of comparisons, for Bonferroni's correction.
        doubt: the reason why a negative result is inconclusive; empty: conclusive, if there is an interval.
    """

    metric: str
    attack: str
    baseline: str
    area: float
    floor: float
    excess_low: float | None
    members: int
    clients: int
    hits: Rate | None
    hits_by_luck: float
    limit: float | None
    tests: int
    doubt: str = ""

    @property
    def word(self) -> Word:
        """The verdict; a negative result counts only with an interval and without doubt."""
        if (self.excess_low or 0) > 0 or self.hits_by_luck <= LUCK / self.tests:
            return "leaks"
        return "undetermined" if self.doubt or self.too_few else "not shown to leak"

    @property
    def too_few(self) -> bool:
        """True if there are too few clients to distinguish a lead over the baseline from luck."""
        return self.excess_low is None or (self.clients < 3 and self.area > self.floor)

    @property
    def leaks(self) -> bool:
        return self.word == "leaks"

    def __str__(self) -> str:
        words = f"the test {self.attack!r} ranks a member above a non-member in {percent(self.area, 1)} of pairs"
        words += f" (baseline {self.baseline}: {percent(self.floor)})"
        if self.hits is not None:
            left_out = self.members - self.hits.n
            why = f" ({left_out} others have fewer than 99 non-members with their batch's labels)" if left_out else ""
            words += f"; at 1 % false positives it detects {self.hits} members{why}"
        return words + (f"; the noise of one update allows {percent(self.limit)}" if self.limit is not None else "")

    @property
    def sentence(self) -> str:
        asked = QUESTIONS[self.metric].asked
        if self.leaks:
            return f"{asked} leaks: {self}."
        if self.word == "undetermined":
            return f"{asked} is not known ({self.doubt}): {self}."
        return f"{asked} is {self.word}: {self}; a stronger test or more clients may still show a leak."


def membership_results(scores: Scores) -> list[MembershipResult]:
    asked = {metric: _graded(scores, metric) for metric in (MEMBER, HELD)}
    tests = {metric: [name for name in _names(rows) if rows.role(name) == "attack"] for metric, rows in asked.items()}
    comparisons, strongest = 2 * sum(map(len, tests.values())), []
    for metric, rows in asked.items():
        at_rate = _graded(scores, metric + ONE_PERCENT)
        results = [_result(metric, rows, at_rate, name, comparisons) for name in tests[metric]]
        if best := MEASURED[metric].leakiest([r for r in results if r.leaks] or results, lambda r: r.area):
            strongest.append(best)
    return strongest


def _names(rows: Scores) -> list[str]:
    return [rows.attacks[i] for i in np.unique(rows.attack)]


def _result(metric: str, rows: Scores, at_rate: Scores, attack: str, tests: int) -> MembershipResult:
    own = rows.of_attack(attack)
    chance = PairedDifference("chance", own.value, np.full(len(own), CHANCE), own.client)
    gain = min(filter(None, (paired(rows, attack), chance)), key=lambda g: float(g.differences.mean()))
    difference = gain.interval(tests)
    hits = at_rate.of_attack(attack)
    guesses = [values_of(at_rate.of_attack(rival), hits.example_keys()) == 1 for rival in rivals_of(rows, attack)]
    alone = replace(hits, value=np.where(np.any(guesses, axis=0), 0.0, hits.value))
    limits = [float(rows.of_attack(name).value.mean()) for name in _names(rows) if rows.role(name) == "limit"]
    return MembershipResult(
        metric=metric,
        attack=attack,
        baseline=gain.baseline,
        area=float(own.value.mean()),
        floor=float(gain.floor.mean()),
        excess_low=difference[0] if difference else None,
        members=len(own),
        clients=len(np.unique(own.client)),
        hits=Rate(round(float(hits.value.sum())), len(hits)) if len(hits) else None,
        hits_by_luck=_luck(alone),
        limit=min(limits, default=None),
        tests=tests,
    )


def _luck(hits: Scores) -> float:
    """Bound the probability of as many detections by luck, for any dependence within a batch.

    One non-member in a hundred is flagged. So half of a batch is flagged with probability 2 % at most (Markov), and any of
    its n with n % at most. The bound is twice the smaller one.
    """
    if not len(hits):
        return 1.0
    from scipy.special import bdtrc  # takes long to load

    _, batch, sizes = np.unique(hits.batch_keys(), return_inverse=True, return_counts=True)
    flagged = np.bincount(batch, hits.value)
    events = ((flagged >= sizes / 2, 0.02), (flagged >= 1, min(1.0, 0.01 * float(sizes.mean()))))
    chances = [float(bdtrc(n - 1, len(sizes), p)) if (n := int(those.sum())) else 1.0 for those, p in events]
    return min(1.0, 2 * min(chances))


def roc_curves(scores: Scores) -> dict[str, list[float | None]]:
    """Return the share of members detected at each rate of RATES_SHOWN, by test, baseline and limit.

    None at rates for which the non-members are too few.
    """
    rows = _graded(scores, MEMBER)
    exact = {rate: _graded(scores, MEMBER + ending) for ending, rate in RATES.items()}
    least = min((rate for rate, at in exact.items() if len(at)), default=RATES_SHOWN[-1])
    curves: dict[str, list[float | None]] = {}
    for name in _names(rows):
        areas = rows.of_attack(name).value
        if rows.role(name) in LIMITS:
            mus = [mu_of(share, ONE) for share in exact[ONE].of_attack(name).value.tolist()]
            if mus:
                curves[name] = [float(np.mean([power(rate, mu) for mu in mus])) for rate in RATES_SHOWN]
            continue
        at = {rate: hits.of_attack(name).value for rate, hits in exact.items()}
        shares = [
            float(at[rate].mean() if len(at.get(rate, ())) else (areas >= 1 - rate).mean()) for rate in RATES_SHOWN
        ]
        curves[name] = [share if rate >= least else None for rate, share in zip(RATES_SHOWN, shares, strict=True)]
    return curves


def _graded(scores: Scores, metric: str) -> Scores:
    rows = counted_of_all(scores, metric)
    return rows.where(~np.isnan(rows.value))


def members_sentences(results: Sequence[MembershipResult], ledger: Ledger) -> list[str]:
    """Return a sentence for each tested question, and the reason if batch membership was not tested."""
    sentences = [result.sentence for result in results]
    if not any(result.metric == MEMBER for result in results):
        sentences.append(f"{QUESTIONS[MEMBER].asked} was not tested: {why_not_tested(ledger, MEMBER)}.")
    return sentences


def why_not_tested(ledger: Ledger, question: str) -> str:
    """Return the reason why a question was not tested, or the command that tests it."""
    if not ledger.attacks():
        return "no attack was planned"
    own = [row["name"] for row in ledger.attacks() if row["metric"] == question and row["role"] == "attack"]
    if not own:
        use = "membership_over_rounds" if question == HELD else "membership"
        return f"test it with: fedgauge audit RUN --attack {use}{' --truth FOLDER' if ledger.deployed else ''}"
    reasons = [row["reason"] for row in ledger.reasons("done") if row["attack"] in own]
    return reasons[0] if reasons else "no test has been done yet"
