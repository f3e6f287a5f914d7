"""Who was in a batch, and whom a client's data holds: what the tests of a run found, in one sentence for each question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.special import bdtrc

from fedgauge.attacks.membership.limit import mu_of, power
from fedgauge.attacks.modality.membership import HELD, MEMBER, QUESTIONS, RATES
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.attacks.plan import MEMBERSHIP_LIMIT
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.formatting import percent
from fedgauge.server.views.intervals import LUCK, Rate, clustered_interval
from fedgauge.server.views.leakage import counted_of_all
from fedgauge.server.views.roles import is_attack, is_limit
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.strength import PairedDifference, paired, rivals_of, values_of

Word = Literal["leaks", "not shown to leak", "undetermined"]
ONE_PERCENT, ONE = "_at_1_percent", 0.01
CHANCE = 0.5  # of two examples, which is the member
RATES_SHOWN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of false positives


@dataclass(frozen=True)
class ToldMembers:
    """What one test of one question found.

    Args:
        metric: MEMBER or HELD, the question.
        attack, baseline: names; the baseline is the one that is hardest to beat, or chance.
        area: under the ROC curve, the mean over members; interval: of it, clustered by client; None below two clients.
        floor: the baseline's area.
        more_than_guessed: lower end of the interval of the difference between these two, clustered by client and wider if several
            tests are compared; None below two clients.
        hits: members told at 1 % false positives; None where strangers are too few for that rate.
        hits_by_luck: how probable it is that members are told so, and by no baseline, in as many batches by luck.
        limit: the area that the noise of one update allows; None where it is not known.
        tests: how many chances there are to find something by luck: tests, questions, and two criteria of each.
        doubt: why it would prove nothing that the test finds nothing; empty if nothing is amiss.
    """

    metric: str
    attack: str
    baseline: str
    area: float
    interval: tuple[float, float] | None
    floor: float
    more_than_guessed: float | None
    hits: Rate | None
    hits_by_luck: float
    limit: float | None
    tests: int
    doubt: str = ""

    @property
    def word(self) -> Word:
        """What can be said; in doubt, or without an interval, a test that finds nothing says nothing."""
        surely = self.more_than_guessed is not None and self.more_than_guessed > 0
        if surely or self.hits_by_luck <= LUCK / self.tests:
            return "leaks"
        return "undetermined" if self.doubt or self.more_than_guessed is None else "not shown to leak"

    @property
    def leaks(self) -> bool:
        """Whether members are told from strangers better than by a guess."""
        return self.word == "leaks"

    def __str__(self) -> str:
        ends = [percent(min(1.0, max(0.0, end))) for end in self.interval or ()]
        within = f" ({' to '.join(ends)})" if ends else ""
        words = f"by {self.attack}, a member scores above a stranger in {percent(self.area)} of all pairs{within}"
        words += f", by {self.baseline} in {percent(self.floor)}"
        words += f"; at 1 % false positives {self.hits} members are told" if self.hits is not None else ""
        return words + (f"; the noise of one update allows {percent(self.limit)}" if self.limit is not None else "")

    @property
    def sentence(self) -> str:
        """What was found, and that another test may find more."""
        asked = QUESTIONS[self.metric].asked
        if self.leaks:
            return f"{asked} leaks: {self}."
        if self.word == "undetermined":
            return f"{asked} is not known ({self.doubt or 'one client gives no interval'}): {self}."
        return f"{asked} is {self.word}: {self}; a stronger test may still tell."


def told_members(scores: Scores) -> list[ToldMembers]:
    """Of each question that was tested the strongest test, that of the largest area: of those that tell members, if any does."""
    asked = {
        metric: _graded(scores, metric) for metric in (MEMBER, HELD)
    }  # of anybody's batch no interval by client holds
    tests = {metric: list(filter(is_attack, _names(rows))) for metric, rows in asked.items()}
    chances, found = 2 * sum(map(len, tests.values())), []
    for metric, rows in asked.items():
        told = [_told(metric, rows, _graded(scores, metric + ONE_PERCENT), name, chances) for name in tests[metric]]
        # a leak that one test shows stays shown where another, with a larger area, shows none
        if best := MEASURED[metric].leakiest([t for t in told if t.leaks] or told, lambda t: t.area):
            found.append(best)
    return found


def _names(rows: Scores) -> list[str]:
    return [rows.attacks[i] for i in np.unique(rows.attack)]


def _told(metric: str, rows: Scores, at_rate: Scores, attack: str, tests: int) -> ToldMembers:
    own = rows.of_attack(attack)
    chance = PairedDifference("chance", own.value, np.full(len(own), CHANCE), own.client)
    gain = min(filter(None, (paired(rows, attack), chance)), key=lambda g: float(g.differences.mean()))
    difference = gain.interval(tests)
    hits = at_rate.of_attack(attack)
    guesses = [values_of(at_rate.of_attack(rival), hits.example_keys()) == 1 for rival in rivals_of(attack)]
    alone = replace(hits, value=np.where(np.any(guesses, axis=0), 0.0, hits.value))
    limits = rows.of_attack(MEMBERSHIP_LIMIT)
    return ToldMembers(
        metric=metric,
        attack=attack,
        baseline=gain.baseline,
        area=float(own.value.mean()),
        interval=clustered_interval(own.value, own.client, whole=1.0),
        floor=float(gain.floor.mean()),
        more_than_guessed=difference[0] if difference else None,
        hits=Rate(round(float(hits.value.sum())), len(hits)) if len(hits) else None,
        hits_by_luck=_luck(alone),
        limit=float(limits.value.mean()) if len(limits) else None,
        tests=tests,
    )


def _luck(hits: Scores) -> float:
    """How probable it is by luck that members are told in as many batches, however those of a batch depend on each other.

    One stranger in a hundred is told. So half of a batch is with a probability of at most 2 % (Markov), and any of its n with at
    most n %; the rarer of the two counts, twice.
    """
    if not len(hits):
        return 1.0
    _, batch, sizes = np.unique(hits.batch_keys(), return_inverse=True, return_counts=True)
    told = np.bincount(batch, hits.value)
    ways = ((told >= sizes / 2, 0.02), (told >= 1, min(1.0, 0.01 * float(sizes.mean()))))
    return min(
        1.0, 2 * min(float(bdtrc(n - 1, len(sizes), p)) if (n := int(those.sum())) else 1.0 for those, p in ways)
    )


def roc_curves(scores: Scores) -> dict[str, list[float | None]]:
    """By test, baseline and limit of who was in a batch: the share of members told at each rate of RATES_SHOWN.

    None at rates below which a single stranger in a batch's labels lies.
    """
    rows = _graded(scores, MEMBER)
    exact = {rate: _graded(scores, MEMBER + ending) for ending, rate in RATES.items()}
    least = min((rate for rate, at in exact.items() if len(at)), default=RATES_SHOWN[-1])
    curves: dict[str, list[float | None]] = {}
    for name in _names(rows):
        told = rows.of_attack(name).value
        if is_limit(name):
            mus = [mu_of(told, ONE) for told in exact[ONE].of_attack(name).value.tolist()]
            if mus:
                curves[name] = [float(np.mean([power(rate, mu) for mu in mus])) for rate in RATES_SHOWN]
            continue
        at = {rate: hits.of_attack(name).value for rate, hits in exact.items()}
        shares = [
            float(at[rate].mean() if len(at.get(rate, ())) else (told >= 1 - rate).mean()) for rate in RATES_SHOWN
        ]
        curves[name] = [share if rate >= least else None for rate, share in zip(RATES_SHOWN, shares, strict=True)]
    return curves


def _graded(scores: Scores, metric: str) -> Scores:
    """The rows that a metric's mean over all rounds counts."""
    rows = counted_of_all(scores, metric)
    return rows.where(~np.isnan(rows.value))


def members_sentences(told: Sequence[ToldMembers], ledger: Ledger) -> list[str]:
    """What is known of membership: a sentence for each question that was tested, and why nobody tested who was in a batch."""
    sentences = [t.sentence for t in told]
    if not any(t.metric == MEMBER for t in told):
        sentences.append(f"{QUESTIONS[MEMBER].asked} was not tested: {why_not_tested(ledger, MEMBER)}.")
    return sentences


def tests_of(ledger: Ledger, question: str) -> list[str]:
    """A question's planned tests."""
    return [name for name, planned in ledger.planned().items() if planned.metric == question and is_attack(name)]


def why_not_tested(ledger: Ledger, question: str) -> str:
    """Why a run's tests say nothing of a question, or how to test it."""
    if not ledger.attacks():
        return "no attack was planned"
    if not (own := tests_of(ledger, question)):
        use = "membership_over_rounds" if question == HELD else "membership"
        return f"test it with: fedgauge audit RUN --attack {use}{' --truth FOLDER' if ledger.deployed else ''}"
    reasons = [row["reason"] for row in ledger.reasons("done") if row["attack"] in own]
    return reasons[0] if reasons else "no test has been done yet"
