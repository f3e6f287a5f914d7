"""The verdict on a run: whether an attack beats every baseline, reads labels or tells members by more than chance."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE
from fedgauge.attacks.grading.scores import WHOLE_BATCH
from fedgauge.attacks.modality.base import MainMetric
from fedgauge.attacks.modality.membership import MEMBER
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import UNGRADED
from fedgauge.server.views.formatting import in_unit, many, percent, status_words
from fedgauge.server.views.intervals import (
    LUCK,
    Ints,
    Rate,
    guessed_labels,
    luck_bound,
    luck_of_hits,
)
from fedgauge.server.views.leakage import leakage_of_all
from fedgauge.server.views.membership import ToldMembers, Word, members_sentences, told_members
from fedgauge.server.views.outcomes import failure
from fedgauge.server.views.reading import Jobs, Reading, State, jobs_of_run, kept, viewed
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.strength import PairedDifference, best_of, paired, rivals_of, values_of

UNKNOWN = (0.5, 0.5)  # shares of the classes, where they are not known
Kind = Literal["examples", "members"]
UNFINISHED: Mapping[State, str] = {  # of a run none of whose attacks waits or has failed
    "training": "the run is still training",
    "attacking": "the audit is still at work",
    "interrupted": "the training was interrupted",
    "failed": "the training failed",
}


@dataclass(frozen=True)
class ExcessLeakage:
    """By how much an attack beats the baseline that is hardest to beat, example by example.

    Args:
        attack, baseline: names.
        mean, low, high: of the differences in the main metric (PSNR in dB, each capped; of text, ROUGE-1 in percent). The
            interval is clustered by client, wider if several attacks are compared, and None below two clients.
        reached, floor: mean of attack and baseline in the main metric, over the examples that both have.
        identified, floor_identified: how many examples are nearer to the attack's reconstruction, or to the best
            baseline's, than to every auxiliary image; None if that is not graded.
        identified_more_often: lower end of the clustered interval of the difference between these two rates; None below two
            clients, or if that is not graded.
        identified_by_luck: how probable it is that a guess as good as the baselines identifies as many examples that no
            baseline identifies; 1 if that is not graded.
        identified_clients: how many clients the identified examples belong to.
        exposed: how many of `n` examples are identified (where that is graded) at a tenth of the squared error of every
            baseline or less; of text, at half of the scale above them. No guess comes so near by luck.
        clusters: how many clients.
        attacks: how many are compared: the more, the rarer by luck alone a finding has to be (Bonferroni).
    """

    attack: str
    baseline: str
    mean: float
    low: float | None
    high: float | None
    reached: float
    floor: float
    identified: Rate | None
    floor_identified: Rate | None
    identified_more_often: float | None
    identified_by_luck: float
    identified_clients: int
    exposed: int
    n: int
    clusters: int
    attacks: int

    @property
    def leaks(self) -> bool:
        """Whether the examples come back better than a guess: on average, or more often, or in some cases beyond luck."""
        higher = any(low is not None and low > 0 for low in (self.low, self.identified_more_often))
        return higher or self.identified_by_luck <= LUCK / self.attacks or self.exposed > 0

    @property
    def looks_identified(self) -> bool:
        """Whether more examples are identified than by a guess, and nearer on average, where one client gives no interval."""
        if self.clusters > 1 or self.identified is None or self.mean <= 0:
            return False
        return self.identified.count > (self.floor_identified.count if self.floor_identified else 0)


@dataclass(frozen=True)
class RestoredLabels:
    """How well the attack that restores labels best did so.

    Args:
        share: of the labels, the mean over batches.
        guess: the share that the best guess without the update gets on average.
        by_luck: the most probable that such a guess gets as many, in any of the attacks that restore labels.
    """

    attack: str
    share: float
    guess: float
    by_luck: float

    @property
    def leaks(self) -> bool:
        """Whether labels are read off the updates."""
        return self.by_luck <= LUCK

    def __str__(self) -> str:
        return f"{percent(self.share)} of the labels are restored (a guess without the update: {percent(self.guess)})"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run: one sentence for each kind of leak, and the numbers that support it.

    Args:
        word: "not shown to leak" only where both kinds were tested, and membership in the batches behind the updates.
        strongest: of the attacks that beat a guess; if none does, of all that were set against one.
        members: of each question about membership, the strongest test that tells members, or of all if none does.
        reconstruction: the word on what comes back of the examples alone.
    """

    word: Word
    sentences: tuple[str, ...]
    strongest: ExcessLeakage | None = None
    members: tuple[ToldMembers, ...] = ()
    reconstruction: Word = "undetermined"

    @property
    def sentence(self) -> str:
        """All sentences as one text."""
        return " ".join(self.sentences)


def excesses(scores: Scores) -> list[ExcessLeakage]:
    """One for each attack that shares examples with a baseline."""
    main, identified = (scores.of_metric(m) for m in (scores.measure.metric, "identified"))
    main, identified = (rows.where(~np.isnan(rows.value)) for rows in (main, identified))
    main = main.comparable(scores.measure.metric)
    gains = {a: gain for a in main.attacks if is_attack(a) and (gain := paired(main, a)) is not None}
    return [_excess(main, identified, a, gain, len(gains)) for a, gain in gains.items()]


def _excess(main: Scores, identified: Scores, attack: str, gain: PairedDifference, attacks: int) -> ExcessLeakage:
    own, hits, more_often = main.of_attack(attack), identified.of_attack(attack), paired(identified, attack)
    keys, sign = own.example_keys(), main.measure.sign
    highest = np.fmax.reduce([sign * values_of(main.of_attack(b), keys) for b in rivals_of(attack)])  # NaN: none graded
    hit = values_of(hits, keys)
    guesses = np.stack([values_of(identified.of_attack(b), keys) for b in rivals_of(attack)])
    rivals, guessed = (~np.isnan(guesses)).sum(0), (guesses == 1).any(0)
    graded = (rivals > 0) & ~np.isnan(hit)
    alone, missed = (hit == 1) & ~guessed & graded, (hit == 0) & guessed & graded
    low, high = gain.interval(attacks) or (None, None)
    return ExcessLeakage(
        attack=attack,
        baseline=gain.baseline,
        mean=float(gain.differences.mean()),
        low=low,
        high=high,
        reached=float(gain.own.mean()),
        floor=float(gain.floor.mean()),
        identified=_rate_of(hits),
        floor_identified=_rate_of(identified.of_attack(more_often.baseline)) if more_often else None,
        identified_more_often=(more_often and more_often.interval(attacks) or (None,))[0],
        identified_by_luck=luck_of_hits(
            int(alone.sum()), int(missed.sum()), int(rivals[graded].min(initial=len(guesses)))
        ),
        identified_clients=len(np.unique(own.client[hit == 1])),
        exposed=int(((sign * own.value >= highest + main.measure.margin) & (np.isnan(hit) | (hit == 1))).sum()),
        n=len(own),
        clusters=len(np.unique(gain.clients)),
        attacks=attacks,
    )


def _rate_of(rows: Scores) -> Rate | None:
    # clipped, as a ledger from elsewhere may hold any number
    return Rate(int(np.clip(rows.value, 0, 1).sum()), len(rows)) if len(rows) else None


@viewed
def verdict_of(reading: Reading) -> Verdict:
    """The verdict on a run as read so far."""
    shares, jobs = class_shares(reading), jobs_of_run(reading)
    return verdict(reading.scores, reading.ledger, shares, jobs, reading.state, reading.plan_coverage.words)


@kept
def class_shares(reading: Reading) -> tuple[float, ...]:
    """How often each class occurs in a run's data; if that is unknown two equal classes, of which a guess restores most."""
    if (scenario := reading.built) is None:
        return UNKNOWN
    counts = np.bincount(scenario.federation.shards.dataset.labels.numpy())
    return tuple((counts[counts > 0] / counts.sum()).tolist())


def verdict(
    scores: Scores,
    ledger: Ledger,
    shares: Sequence[float],
    jobs: Jobs,
    state: State = "complete",
    never_attacked: str = "",
) -> Verdict:
    """The run's verdict on both kinds of leak. It never says that a run is private.

    Args:
        shares: how often each class occurs in the data, for what a guess restores of labels.
        jobs: what is done and what is still to come.
        state: the run's.
        never_attacked: `PlanCoverage.words`.
    """
    subject = f"So far ({jobs.words}), the clients'" if jobs.left else "The clients'"
    labels = restored_labels(scores, ledger, shares)
    examples = _of_examples(scores, ledger, labels, state, subject, never_attacked)
    doubt = never_attacked or _doubts(scores, ledger, state, "members")
    members = [replace(told, doubt=doubt) for told in told_members(scores)]
    words = {examples.word, *(told.word for told in members)}
    word: Word = "undetermined"
    if "leaks" in words:
        word = "leaks"
    elif words == {"not shown to leak"} and any(told.metric == MEMBER for told in members):
        word = "not shown to leak"
    sentences = (*examples.sentences, *members_sentences(members, ledger))
    return Verdict(word, sentences, examples.strongest, tuple(members), examples.word)


def _of_examples(
    scores: Scores, ledger: Ledger, labels: RestoredLabels | None, state: State, subject: str, never_attacked: str
) -> Verdict:
    """The verdict on what comes back of the examples; labels that are read off are a leak whatever the examples.

    Args:
        subject: whose examples, and of how much that is known.
    """
    leaks = labels is not None and labels.leaks
    labels_words = f"{subject} labels leak: {labels}, by {labels.attack}. " if labels and leaks else ""
    word: Word = "undetermined"
    compared, strongest = excesses(scores), None
    if not compared:
        why = "; ".join(filter(None, (_nothing_to_judge(scores, ledger), never_attacked)))
        words = f"Nothing can be said about reconstruction: {why}."
    else:
        strongest, title = _strongest(scores, compared)
        private, budget = f"{scores.measure.private}s", ledger.planned()[strongest.attack].budget
        reached = f"the {title}, {strongest.attack} ({budget}), reaches {_numbers(strongest, compared, scores.measure)}"
        if labels and not leaks:
            reached += f"; {labels}"
        doubt = never_attacked or _doubts(scores, ledger, state, "examples")
        few = f"{strongest.n} {private} of one client are too few to tell a leak from luck"
        if strongest.leaks:
            word, words = "leaks", f"{subject} {private} leak: {reached}."
        elif doubt or strongest.looks_identified:
            why = f"{doubt}. So it proves nothing that no attack beats a guess" if doubt else few
            words = f"Nothing can be said about reconstruction: {why}: {reached}."
        else:
            word = "not shown to leak"
            words = f"{subject} {private} are {word} at this budget: {reached}; a stronger attack may still succeed."
    return Verdict("leaks" if leaks else word, (labels_words + words,), strongest)


def _strongest(scores: Scores, compared: Sequence[ExcessLeakage]) -> tuple[ExcessLeakage, str]:
    """The attack that decides the verdict, and what it is called: "strongest" alone if no other attack's mean leaks more."""
    beat = [e for e in compared if e.leaks] or [e for e in compared if e.looks_identified]
    names = {e.attack: e for e in beat or compared}
    leaks = leakage_of_all(scores, scores.measure.metric)
    of_all, own = best_of(leaks, "attack"), best_of((leak for leak in leaks if leak.attack in names), "attack")
    assert own is not None  # each is graded
    title = "strongest attack" if own is of_all else "strongest attack that beats a guess"
    return names[own.attack], title if beat or own is of_all else "strongest attack with a baseline"


def _numbers(strongest: ExcessLeakage, compared: Sequence[ExcessLeakage], by: MainMetric) -> str:
    numbers = (
        f"{in_unit(strongest.reached, by)} {by.name} on average, its hardest baseline ({strongest.baseline}) "
        f"{in_unit(strongest.floor, by)}"
    )
    if strongest.identified is not None:
        count = strongest.identified.count
        numbers += f"; {count} of {strongest.identified.n} {by.private}s are identified"
        if count > 1 and strongest.identified_clients == 1 < strongest.clusters:
            numbers += ", all of one client"
        most = max(compared, key=lambda e: e.identified.fraction or 0 if e.identified else 0)
        if most.identified and (most.identified.fraction or 0) > (strongest.identified.fraction or 0):
            numbers += f" ({most.identified.count} of {most.identified.n} by {most.attack})"
    if strongest.exposed:
        numbers += f", {strongest.exposed} of them {by.beyond}"
    return f"{numbers}; one client gives no interval" if strongest.clusters == 1 else numbers


def doubts(reading: Reading, kind: Kind) -> str:
    """Reasons why "no leak found" is inconclusive, for verdict and gate; empty if it is conclusive.

    Updates that were never attacked are another reason: `Reading.plan_coverage`.
    """
    return _doubts(reading.scores, reading.ledger, reading.state, kind)


def _doubts(scores: Scores, ledger: Ledger, state: State, kind: Kind) -> str:
    meta, waiting = ledger.meta(), ledger.progress().waiting
    if waiting:
        return f"{waiting} attack{' has' if waiting == 1 else 's have'} not ended"
    if why := failure(ledger):
        return why
    if meta.get("replay") == "mismatch":
        return "the replay check failed, so the attacks inverted a different computation from the clients'"
    if ledger.training_fits is False:
        return (
            "the local training that the audit assumes does not explain the update, so the attacks inverted another one"
        )
    if wrong := meta.get("truth_doubts"):
        return f"the grades may be against wrong examples: {wrong}"
    if kind == "examples" and (count := scores.left_ungraded):
        return f"{many(count, 'reconstruction')} {'was' if count == 1 else 'were'} not graded{_because(ledger)}"
    if kind == "examples" and _none_moved(scores, ledger):
        return NO_DERIVATIVE
    return UNFINISHED.get(state, "")


def _because(ledger: Ledger) -> str:
    """Why nobody graded, in brackets."""
    reason = ungraded_reason(ledger)
    return f" ({reason})" if reason else ""


def _none_moved(scores: Scores, ledger: Ledger) -> bool:
    """Whether no attack on the examples could move, of those that are compared with a guess."""
    flat = {row["name"] for row in ledger.attacks() if row["flat"]}
    graded, planned = scores.where(scores.by_attacks & ~np.isnan(scores.value)), ledger.planned()
    names = (graded.attacks[attack] for attack in np.unique(graded.attack))
    tried = [e.attack for e in excesses(scores)] or [n for n in names if n in planned and not planned[n].tells_members]
    return bool(tried) and flat.issuperset(tried)


def restored_labels(scores: Scores, ledger: Ledger, shares: Sequence[float]) -> RestoredLabels | None:
    """The labels of the attack that restored most, of those that were not given them; None if none restored any."""
    known, found = scores.where(~np.isnan(scores.value)).of_metric("label_accuracy"), []
    for attack in ledger.planned():
        rows = known.of_attack(attack)
        if not len(rows):
            continue
        sizes = _batch_sizes(scores.of_attack(attack), rows)
        guesses = {size: guessed_labels(shares, size) for size in set(sizes.tolist())}
        guess = np.array([guesses[size] for size in sizes.tolist()])
        rate, expected = (float(np.average(v, weights=sizes)) for v in (rows.value, guess))
        by_luck = luck_bound(rate, expected, float(sizes.sum()))
        found.append(RestoredLabels(attack, float(rows.value.mean()), float(guess.mean()), by_luck))
    found = [replace(labels, by_luck=min(1.0, len(found) * labels.by_luck)) for labels in found]
    return max(found, key=lambda labels: (labels.leaks, labels.share), default=None)


def _batch_sizes(scores: Scores, rows: Scores) -> Ints:
    """How many examples each row's batch has, from the rows of an attack's examples."""
    each = scores.of_metric(scores.measure.metric)
    each = each.where(each.example != WHOLE_BATCH)
    batches, counts = np.unique(each.batch_keys(), return_counts=True)
    sizes = dict(zip(batches.tolist(), counts.tolist(), strict=True))
    return np.array([sizes.get(key, 1) for key in rows.batch_keys().tolist()])


def _nothing_to_judge(scores: Scores, ledger: Ledger) -> str:
    real = scores.of_metric(scores.measure.metric)
    real = real.where(real.by_attacks)
    if not ledger.attacks():
        return "no attack was planned"
    if not any(is_attack(name) and not planned.tells_members for name, planned in ledger.planned().items()):
        return "the plan has no attack that reconstructs"
    if not len(real):
        mismatch = ledger.meta().get("replay") == "mismatch"
        return "the replay check failed, so no attack was run" if mismatch else "no attack has been done yet"
    if not np.isnan(real.value).all():
        return "no baseline has been graded yet"
    counts = Counter(real.statuses[s] for s in real.status)
    hidden = counts.pop(UNGRADED, 0)
    outcomes = ", ".join(f"{n} x {status_words(status)}" for status, n in sorted(counts.items()))
    if not hidden:
        return f"no attack gave {a_or_an(scores.measure.private)} to grade ({outcomes})"
    words = f"{many(hidden, 'reconstruction')} came back, and nobody graded any{_because(ledger)}"
    return f"{words}; nothing else came back: {outcomes}" if outcomes else words


def ungraded_reason(ledger: Ledger) -> str:
    """Why a deployment's clients graded nothing or not everything, in their words; empty if they graded everything."""
    meta = ledger.meta()
    if "grading" not in meta and ledger.foreign:
        return "the app's clients keep their data; who owns it grades with: fedgauge audit RUN --truth FOLDER"
    return meta.get("ungraded", "")


def a_or_an(noun: str) -> str:
    """A noun with its article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
