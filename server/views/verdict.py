"""The verdict on a run: attacks against baselines, restored labels, and membership."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedgauge.attacks.effort import ONCE, budget_words
from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE
from fedgauge.attacks.modality.membership import MEMBER
from fedgauge.attacks.modality.registry import MEASURED, further_leaks
from fedgauge.attacks.score_rows import WHOLE_BATCH, wrong_client
from fedgauge.client.label_kinds import LabelKind
from fedgauge.server.views.formatting import counted_words, decibel, in_unit, many, number, percent
from fedgauge.server.views.intervals import LUCK, Floats, Ints, Rate, guessed_labels, luck_bound, luck_of_hits
from fedgauge.server.views.membership import MembershipResult, Word, members_sentences, membership_results
from fedgauge.server.views.outcomes import failure
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.snapshot import RunSnapshot, State, viewed
from fedgauge.server.views.strength import PairedDifference, best_of, limit_in_db, paired, rivals_of, values_of
from fedgauge.server.views.tables import Column

Kind = Literal["examples", "members", "epsilon"]
CLOSED_FORM = "closed_form"  # key of what an attack without a search reads, where no attack of the plan shows a leak
MOST_CELLS = 256  # of a row, below which they are counted
WHOLE = 1e-3  # rounding of a number of cells
SHORT = 50  # iterations of a search that `fedgauge app` shortened, below which its failure says nothing
BY_LABELS = 0.25  # share that the labels alone may identify, where the other client has other labels
UNFINISHED: Mapping[State, str] = {  # of a run none of whose attacks waits or has failed
    "training": "the run is still training",
    "attacking": "the audit is still at work",
    "interrupted": "the training was interrupted",
    "failed": "the training failed",
}


@dataclass(frozen=True)
class ExcessLeakage:
    """Difference between an attack and its hardest baseline, example by example.

    Args:
        mean, low, high: of the differences in the main metric. The interval is clustered by client and corrected for
            several attacks; None below two clients.
        reached, floor: mean of attack and baseline in the main metric, over the examples that both have.
        identified: rate of identification; None if not graded.
        by_chance: rate at which the attack's reconstructions identify another client's examples; None below two clients.
        identified_by_luck: probability of so many identified examples if a baseline, or a guess from the labels, identifies as
            often; 1 if unknown.
        exact: number of examples that are reconstructed whole: images at the cap of PSNR.
        exposed: number of examples too near for any guess: a tenth of the squared error of every baseline or less; of text
            and rows, half of the scale above them, or whole.
        attacks: number of compared attacks, for Bonferroni's correction.
    """

    attack: str
    baseline: str
    mean: float
    low: float | None
    high: float | None
    reached: float
    floor: float
    identified: Rate | None
    by_chance: Rate | None
    identified_by_luck: float
    exact: int
    exposed: int
    n: int
    clusters: int
    attacks: int

    @property
    def leaks(self) -> bool:
        """True if the attack beats a guess on average, more often, or in some cases beyond luck."""
        return self.closer or self.identified_by_luck <= LUCK / self.attacks

    @property
    def closer(self) -> bool:
        """True if reconstructions are closer than a guess, on average or in some cases."""
        return (self.low is not None and self.low > 0) or self.exposed > 0


@dataclass(frozen=True)
class RestoredLabels:
    """Result of the best label-restoration attack.

    Args:
        score: of its labels, in the metric of their kind; the mean over batches.
        guess: mean score of the best guess without the update.
        leaks: if more is restored than by luck.
    """

    kind: type[LabelKind]
    attack: str
    score: float
    guess: float
    leaks: bool

    def __str__(self) -> str:
        written = percent if MEASURED[self.kind.metric].fraction else number
        restored = self.kind.restored.format(written(self.score), self.attack)
        return f"{restored} (a guess without the update: {written(self.guess)})"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run, with one sentence for each kind of leak.

    Args:
        word: "not shown to leak" only if reconstruction and batch membership were tested.
        strongest: the strongest attack that beats a guess, or of all attacks if none does.
        members: the strongest membership test of each question.
        reconstruction: the word on reconstruction only.
    """

    word: Word
    sentences: tuple[str, ...]
    strongest: ExcessLeakage | None = None
    members: tuple[MembershipResult, ...] = ()
    reconstruction: Word = "undetermined"

    @property
    def sentence(self) -> str:
        return " ".join(self.sentences)


def excesses(scores: Scores) -> list[ExcessLeakage]:
    """Compare each attack with the baselines on the examples that both have."""
    main, identified = (scores.of_metric(m) for m in (scores.measure.metric, "identified"))
    main, identified = (rows.where(~np.isnan(rows.value)) for rows in (main, identified))
    main = main.comparable(scores.measure.metric)
    gains = {a: gain for a in main.attacks if main.role(a) == "attack" and (gain := paired(main, a)) is not None}
    return [_excess(main, identified, a, gain, len(gains)) for a, gain in gains.items()]


def _excess(main: Scores, identified: Scores, attack: str, gain: PairedDifference, attacks: int) -> ExcessLeakage:
    own, hits = main.of_attack(attack), identified.of_attack(attack)
    keys, sign = own.example_keys(), main.measure.sign
    rivals = rivals_of(main, attack)
    highest = np.fmax.reduce([sign * values_of(main.of_attack(b), keys) for b in rivals])  # NaN: none graded
    hit, value = values_of(hits, keys), sign * own.value
    whole = np.array([main.measure.came_back_whole(one) for one in own.value.tolist()])
    ahead = value >= highest + main.measure.margin
    exposed = np.where(np.isnan(hit), ahead | (whole & (value > highest)), ahead & (hit == 1))
    if main.measure.by_cell:
        most = main.measure.complete
        needed = np.where(highest < most, np.fmin(highest + main.measure.margin, most), np.nan)
        if _luck_of_cells(main.value, needed, float(gain.floor.mean()), int(exposed.sum())) > LUCK / attacks:
            exposed = np.zeros_like(exposed)
    luck, rate, by_chance = 1.0, _rate_of(hits), _rate_of(identified.of_attack(wrong_client(attack)))
    guesses = [guess for b in rivals if (guess := _rate_of(identified.of_attack(b)))]
    if rate and by_chance:
        luck = max(_luck_of_labels(hits), *(luck_of_hits(rate, guess) for guess in guesses))
    low, high = gain.interval(attacks) or (None, None)
    return ExcessLeakage(
        attack=attack,
        baseline=gain.baseline,
        mean=float(gain.differences.mean()),
        low=low,
        high=high,
        reached=float(gain.own.mean()),
        floor=float(gain.floor.mean()),
        identified=rate,
        by_chance=by_chance,
        identified_by_luck=luck,
        exact=int(whole.sum()),
        exposed=int(exposed.sum()),
        n=len(own),
        clusters=len(np.unique(gain.clients)),
        attacks=attacks,
    )


def _luck_of_cells(values: Floats, needed: Floats, guess: float, count: int) -> float:
    """Return the probability that so many rows have the needed percentage of right cells, each right as often as a guess's."""
    from scipy.special import bdtrc, pdtrc

    different = np.unique(values)
    if not count or len(different) > MOST_CELLS:
        return 0.0
    shares = different[:, None] / 100 * np.arange(1, MOST_CELLS)
    possible = (abs(shares - shares.round()) < WHOLE).all(0)
    if not possible.any():
        return 0.0
    cells = 1 + int(possible.argmax())  # the fewest that give these values
    lucky = bdtrc(np.ceil(cells * needed / 100 - WHOLE) - 1, cells, guess / 100)
    return float(pdtrc(count - 1, np.nansum(lucky)))


def _luck_of_labels(hits: Scores) -> float:
    """Return the probability of so many hits, of all clients or of the most exposed one, if the labels identify a quarter."""
    from scipy.special import bdtrc  # takes long to load

    counts, sizes = np.bincount(hits.client, hits.value), np.bincount(hits.client)
    of_all = bdtrc(counts.sum() - 1, sizes.sum(), BY_LABELS)
    return float(min(of_all, np.count_nonzero(sizes) * bdtrc(counts - 1, sizes, BY_LABELS).min()))


def _rate_of(rows: Scores) -> Rate | None:
    return Rate(int(rows.value.sum()), len(rows)) if len(rows) else None


@viewed
def verdict_of(reading: RunSnapshot) -> Verdict:
    """Return the verdict on both kinds of leak; it never says that a run is private."""
    examples = _of_examples(reading)
    doubt = doubts(reading, "members")
    unit = _unit(reading)
    members = []
    for result in membership_results(reading.scores):
        why = f"the members of {many(result.clients, unit)} are too few to distinguish a leak from luck: attack more {unit}s"
        members.append(replace(result, doubt=doubt or (why if result.too_few else "")))
    words = {examples.word, *(result.word for result in members)}
    word: Word = "undetermined"
    if "leaks" in words:
        word = "leaks"
    elif words == {"not shown to leak"} and any(result.metric == MEMBER for result in members):
        word = "not shown to leak"
    sentences = (*examples.sentences, *members_sentences(members, reading.ledger), *leak_sentences(reading))
    return Verdict(word, sentences, examples.strongest, tuple(members), examples.word)


def leak_sentences(reading: RunSnapshot) -> list[str]:
    """Return a sentence for each leak of a user's own; without a baseline none says whether it is more than luck."""
    sentences = []
    for metric in further_leaks():
        if leak := best_of(reading.pooled(metric).values(), "attack"):
            column = Column.of(MEASURED[metric], "mean", MEASURED[metric].label)
            within = f" (95 % interval {column.written(leak.interval)})" if leak.interval else ""
            sentences.append(f"{column.head}: {column.written(leak.mean)}{within} by {leak.attack}, n = {leak.n}.")
    return sentences


def _of_examples(reading: RunSnapshot) -> Verdict:
    scores, jobs, compared = reading.scores, reading.jobs, excesses(reading.scores)
    by, labels = scores.measure, restored_labels(reading)
    subject = f"So far ({jobs.words}), the clients'" if jobs.left else "The clients'"
    read_off = labels is not None and labels.leaks
    before = f"{subject} labels leak: {labels}. " if read_off else ""
    word: Word = "undetermined"
    if not compared:
        why = "; ".join(filter(None, (_nothing_to_judge(reading), reading.plan_coverage.words)))
        sentence = f"{before}Nothing can be said about reconstruction: {why}."
        return Verdict("leaks" if read_off else word, (sentence,))
    leaking = [e for e in compared if e.closer] or [e for e in compared if e.leaks]
    strongest = by.leakiest(leaking or compared, lambda e: e.reached)
    assert strongest is not None
    numbers = "; ".join(_numbers(reading, strongest)) + (f"; {labels}" if labels and not read_off else "")
    doubt = doubts(reading, "examples")
    if strongest.closer:
        word, words = "leaks", f"{subject} {by.private}s leak: {numbers}."
    elif strongest.leaks:
        how = "reconstructions identify more of them than by chance, but are not shown to be closer than a guess"
        word, words = "leaks", f"{subject} {by.private}s leak in part: {how}: {numbers}."
    elif doubt or strongest.clusters < (3 if strongest.mean > 0 else 2):  # two clients' interval is wide beyond use
        clients = many(strongest.clusters, _unit(reading))
        why = doubt or f"the {by.private}s of {clients} are too few to distinguish a leak from luck"
        words = f"Nothing can be said about reconstruction: {why}: {numbers}."
    else:
        word = "not shown to leak"
        words = f"{subject} {by.private}s are {word} at this budget: {numbers}; a stronger attack may still succeed."
    return Verdict("leaks" if read_off else word, (before + words,), strongest)


def _numbers(reading: RunSnapshot, e: ExcessLeakage) -> Iterator[str]:
    by, limit = reading.scores.measure, limit_in_db(reading.pooled("mse"), "limit")
    clusters = many(e.clusters, _unit(reading))
    apart = f"{clusters} {'is' if e.clusters == 1 else 'are'} too few for an interval"
    if e.low is not None and e.high is not None and e.clusters > 2:
        ends = f"{in_unit(e.low, by)} to {in_unit(e.high, by)}"
        apart = f"95 % interval of the difference {ends} from {clusters}"
    budget, all_of = budget_words(reading.ledger.planned()[e.attack]), f"over {e.n} {by.private}s"
    yield f"{e.attack} ({budget}) reaches {in_unit(e.reached, by)} {by.name} on average {all_of}"
    yield f"its best baseline ({e.baseline}) reaches {in_unit(e.floor, by)} ({apart})"
    if e.exact:
        yield f"{e.exact} of them {'is' if e.exact == 1 else 'are'} reconstructed {by.whole_as}"
    if e.identified is not None:
        beyond = f", {e.exposed} of them {by.beyond}" if e.exposed else ""
        chance = f" (by chance, among another client's: {e.by_chance})" if e.by_chance else ""
        if e.by_chance and e.identified.count * e.by_chance.n <= e.by_chance.count * e.identified.n:
            chance = f", no more than by chance (among another client's: {e.by_chance})"
        yield f"{e.identified} {by.private}s {'is' if e.identified.count == 1 else 'are'} identified{chance}{beyond}"
    elif e.exposed:
        yield f"{e.exposed} of them {'is' if e.exposed == 1 else 'are'} reconstructed {by.beyond}"
    if limit is not None:
        yield f"no attack can reach a lower mean error than at {decibel(limit)} dB"


def _unit(reading: RunSnapshot) -> str:
    return "group" if "secure_sum" in reading.tables else "client"


def doubts(reading: RunSnapshot, kind: Kind) -> str:
    """Reasons why "no leak found" is inconclusive, for verdict and gate; empty if it is conclusive."""
    scores, ledger, meta = reading.scores, reading.ledger, reading.meta
    if kind != "epsilon" and reading.plan_coverage.words:  # no attack measures epsilon
        return reading.plan_coverage.words
    if waiting := reading.progress.waiting:
        return f"{many(waiting, 'attack')} not ended yet"
    if why := failure(ledger):
        return why
    if meta.get("replay") == "mismatch":
        return "the replay check failed, so the attacks inverted a different computation from the clients'"
    if ledger.training_fits is False:
        return "the assumed local training does not explain the update, so the attacks inverted another one"
    if wrong := meta.get("truth_doubts"):
        return f"the grades may be against wrong examples: {wrong}"
    if kind == "examples" and (count := scores.left_ungraded):
        return f"{many(count, 'reconstruction')} not graded{_in_brackets(ungraded_reason(reading))}"
    if kind == "examples" and _none_moved(reading):
        return NO_DERIVATIVE
    ended = scores.where(scores.by_attacks & ~np.isnan(scores.value)).of_metric(scores.measure.metric)
    if kind == "examples" and {scores.statuses[s] for s in np.unique(ended.status)} == {"diverged"}:
        return "every search diverged"
    if kind == "examples" and (read := meta.get(CLOSED_FORM)):
        return f"at the initial weights, {read}"
    if kind == "examples" and meta.get("examples") == "observed" and (few := _iterations(reading)) < SHORT:
        return f"no search had more than {few} iterations, as the network is slow"
    return UNFINISHED.get(reading.state, "")


def _iterations(reading: RunSnapshot) -> int:
    """Return the iterations of the longest search among the compared attacks."""
    planned = (reading.ledger.planned()[excess.attack] for excess in excesses(reading.scores))
    searches = (attack.budget.iterations for attack in planned if attack.table["use"] not in ONCE)
    return max(searches, default=SHORT)


def _in_brackets(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _none_moved(reading: RunSnapshot) -> bool:
    """Check that the chain gave none of the compared attacks a derivative."""
    scores, rebuilding = reading.scores, {row["name"] for row in reading.attacks if not row["metric"]}
    flat = {row["name"] for row in reading.attacks if row["flat"]}
    graded = scores.where(scores.by_attacks & ~np.isnan(scores.value))
    names = (graded.attacks[attack] for attack in np.unique(graded.attack))
    tried = [e.attack for e in excesses(scores)] or [n for n in names if n in rebuilding]
    return bool(tried) and flat.issuperset(tried)


@viewed
def restored_labels(reading: RunSnapshot) -> RestoredLabels | None:
    """Return the labels of the attack that restored most; attacks with given labels do not count."""
    scores, kind = reading.scores, reading.scores.label_kind
    known, sign = scores.where(~np.isnan(scores.value)).of_metric(kind.metric), MEASURED[kind.metric].sign
    attacks = [a for a, role in scores.roles.items() if role == "attack" and len(known.of_attack(a))]
    found = [labels for a in attacks if (labels := _restored_by(a, known, reading, len(attacks)))]
    return max(found, key=lambda labels: (labels.leaks, sign * labels.score), default=None)


def _restored_by(attack: str, known: Scores, reading: RunSnapshot, attacks: int) -> RestoredLabels | None:
    """Compare an attack's labels with a guess's: of classes by their shares, of others with the baselines' labels."""
    rows, kind = known.of_attack(attack), known.label_kind
    if kind is not LabelKind:
        if (gain := paired(known, attack)) is None:
            return None
        low, _ = gain.interval(attacks) or (0.0, 0.0)
        return RestoredLabels(kind, attack, float(gain.own.mean()), float(gain.floor.mean()), low > 0)
    sizes = _batch_sizes(reading.scores.of_attack(attack), rows)
    guesses = {size: guessed_labels(reading.class_shares, size) for size in set(sizes.tolist())}
    guess = np.array([guesses[size] for size in sizes.tolist()])
    rate, expected = (float(np.average(v, weights=sizes)) for v in (rows.value, guess))
    leaks = attacks * luck_bound(rate, expected, float(sizes.sum())) <= LUCK
    return RestoredLabels(kind, attack, float(rows.value.mean()), float(guess.mean()), leaks)


def _batch_sizes(scores: Scores, rows: Scores) -> Ints:
    each = scores.of_metric(scores.measure.metric)
    each = each.where(each.example != WHOLE_BATCH)
    batches, counts = np.unique(each.batch_keys(), return_counts=True)
    sizes = dict(zip(batches.tolist(), counts.tolist(), strict=True))
    return np.array([sizes.get(key, 1) for key in rows.batch_keys().tolist()])


def _nothing_to_judge(reading: RunSnapshot) -> str:
    scores = reading.scores
    if not any(row["role"] == "attack" and not row["metric"] for row in reading.attacks):
        return "no attack that reconstructs was planned"
    if reading.meta.get("replay") == "mismatch":
        return "the replay check failed"
    real = scores.of_metric(scores.measure.metric)
    ended = counted_words(Counter(real.statuses[s] for s in real.where(real.by_attacks).status))
    reason = _in_brackets(ungraded_reason(reading))
    return f"no attack is compared with a baseline{reason}: {ended}" if ended else "no attack has been done yet"


def ungraded_reason(reading: RunSnapshot) -> str:
    """Return the reason for reconstructions without a grade; empty if all are graded."""
    if "grading" not in reading.meta and reading.ledger.foreign:
        return "the app's clients keep their data; its owner grades with: fedgauge audit RUN --truth FOLDER"
    return reading.meta.get("ungraded", "")
