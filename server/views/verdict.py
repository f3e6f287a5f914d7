"""The verdict on a run: whether the strongest attack beats every baseline by more than chance, in one sentence."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE
from fedgauge.attacks.plan import BASELINES
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import UNGRADED
from fedgauge.server.views.intervals import Floats, Ints, Rate, clustered_interval
from fedgauge.server.views.leakage import best_of, leakage
from fedgauge.server.views.roles import is_attack, planned_attacks
from fedgauge.server.views.scores import Scores, capped


@dataclass(frozen=True)
class ExcessLeakage:
    """By how much an attack beats the baseline that is hardest to beat, example by example.

    Args:
        attack, baseline: names.
        mean, low, high: of the differences in the main metric (PSNR in dB, each capped; of text, ROUGE-1 in percent). The
            interval is clustered by client, and None below two clients.
        psnr, floor: mean of attack and baseline in the main metric, over the examples that both have.
        identified, floor_identified: how many examples are nearer to the attack's reconstruction, or to the best
            baseline's, than to every auxiliary image; None if that is not graded.
        identified_more_often: lower end of the clustered interval of the difference between these two rates; None below two
            clients, or if that is not graded.
        exposed: how many of `n` examples are identified (where that is graded) at a tenth of the squared error of every
            baseline or less; of text, at half of the scale above them. No guess comes so near by luck.
        clusters: how many clients.
    """

    attack: str
    baseline: str
    mean: float
    low: float | None
    high: float | None
    psnr: float
    floor: float
    identified: Rate | None
    floor_identified: Rate | None
    identified_more_often: float | None
    exposed: int
    n: int
    clusters: int

    @property
    def leaks(self) -> bool:
        """Whether the examples come back better than a guess: on average, or more often, or in one case beyond luck."""
        return any(low is not None and low > 0 for low in (self.low, self.identified_more_often)) or self.exposed > 0


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run: one sentence, and the numbers that support it."""

    word: Literal["leaks", "not shown to leak", "undetermined"]
    sentence: str
    strongest: ExcessLeakage | None = None


def excesses(scores: Scores) -> list[ExcessLeakage]:
    """One for each attack that shares examples with a baseline."""
    psnr, identified = (scores.of_metric(m) for m in (scores.measure.metric, "identified"))
    psnr, identified = (rows.where(~np.isnan(rows.value)) for rows in (psnr, identified))
    compared = [_excess(psnr, identified, a) for a in psnr.attacks if is_attack(a)]
    return [e for e in compared if e is not None]


def _excess(psnr: Scores, identified: Scores, attack: str) -> ExcessLeakage | None:
    gain = _gain(psnr, attack)
    if gain is None:
        return None
    own, identified_more_often = psnr.of_attack(attack), _gain(identified, attack)
    keys = own.example_keys()
    highest = np.fmax.reduce([_lookup(psnr.of_attack(b), keys) for b in _rivals(attack)])  # NaN: none is graded
    hit = _lookup(identified.of_attack(attack), keys)
    return ExcessLeakage(
        attack=attack,
        baseline=gain.baseline,
        mean=float(gain.differences.mean()),
        low=gain.interval[0] if gain.interval else None,
        high=gain.interval[1] if gain.interval else None,
        psnr=float(gain.own.mean()),
        floor=float((gain.own - gain.differences).mean()),
        identified=_rate_of(identified.of_attack(attack)),
        floor_identified=_rate_of(identified.of_attack(identified_more_often.baseline))
        if identified_more_often
        else None,
        identified_more_often=identified_more_often.interval[0]
        if identified_more_often and identified_more_often.interval
        else None,
        exposed=int(((own.value >= highest + psnr.measure.margin) & (np.isnan(hit) | (hit == 1))).sum()),
        n=len(own),
        clusters=len(np.unique(gain.clients)),
    )


def _rivals(attack: str) -> tuple[str, ...]:
    return (*BASELINES, f"wrong_client({attack})")


@dataclass(frozen=True, eq=False)
class _PairedDifference:
    """An attack against the baseline that leaves it the smallest gain, on the n examples that both have."""

    baseline: str
    own: Floats
    differences: Floats
    clients: Ints

    @property
    def interval(self) -> tuple[float, float] | None:
        return clustered_interval(self.differences, self.clients)


def _gain(graded: Scores, attack: str) -> _PairedDifference | None:
    own = graded.of_attack(attack)
    metric = graded.metrics[own.metric[0]] if len(own) else ""
    values, gains = capped(metric, own.value), []
    for baseline in _rivals(attack):
        floor = capped(metric, _lookup(graded.of_attack(baseline), own.example_keys()))
        both = ~np.isnan(floor)
        if both.any():
            gains.append(_PairedDifference(baseline, values[both], values[both] - floor[both], own.client[both]))
    return min(gains, key=lambda g: float(g.differences.mean()), default=None)


def _rate_of(rows: Scores) -> Rate | None:
    return Rate(int(rows.value.sum()), len(rows)) if len(rows) else None


def _lookup(rows: Scores, keys: Ints) -> Floats:
    """The value of each key (round, client, example) in some rows; NaN if there is none."""
    known, first = np.unique(rows.example_keys(), return_index=True)
    if not len(known):
        return np.full(len(keys), np.nan)
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, rows.value[first][place], np.nan)


def verdict(scores: Scores, ledger: Ledger) -> Verdict:
    """The run's verdict: "leaks" or "not shown to leak", with the strongest attack. It never says that a run is private."""
    compared = excesses(scores)
    if not compared:
        return Verdict("undetermined", _nothing_to_judge(scores, ledger))
    strongest = max(compared, key=lambda e: (e.leaks, e.mean))
    if not strongest.leaks and (why := _proves_nothing(compared, ledger)):
        return Verdict(
            "undetermined", f"Nothing can be said about leakage: {why}, so their failure proves nothing.", strongest
        )
    budget = planned_attacks(ledger)[strongest.attack].budget
    by, private = scores.measure, f"{scores.measure.private}s"
    numbers = (
        f"{strongest.psnr:.1f} {by.unit} {by.name} on average, the best baseline ({strongest.baseline}) "
        f"{strongest.floor:.1f} {by.unit}"
    )
    if strongest.identified is not None:
        numbers += f"; {strongest.identified.count} of {strongest.identified.n} images are identified"
    if strongest.exposed and not strongest.mean > 0:  # the mean hides them
        numbers += f", {strongest.exposed} of them {by.beyond}"
    numbers += _labels(scores, ledger)
    if strongest.clusters == 1:
        numbers += "; one client gives no interval"
    if strongest.leaks:
        words = f"leak: the strongest attack, {strongest.attack} ({budget}), reaches {numbers}."
        return Verdict("leaks", f"{_so_far(ledger)} {private} {words}", strongest)
    words = (
        f"are not shown to leak at this budget (strongest attack {strongest.attack}, {budget}): it reaches {numbers}; "
        "a stronger attack may still succeed."
    )
    return Verdict("not shown to leak", f"{_so_far(ledger)} {private} {words}", strongest)


def _proves_nothing(compared: Sequence[ExcessLeakage], ledger: Ledger) -> str:
    """Why the failure of these attacks proves nothing; empty if it does."""
    if ledger.meta().get("replay") == "mismatch":
        return "the replay check failed, so the attacks inverted a different computation from the clients'"
    cards = {row["name"]: row["knowledge"] for row in ledger.attacks()}
    if all(NO_DERIVATIVE in cards[e.attack] for e in compared):
        return f"{NO_DERIVATIVE}. The attacks never moved"
    return ""


def _so_far(ledger: Ledger) -> str:
    progress = ledger.progress()
    if not progress.queued + progress.leased:
        return "The clients'"
    return f"So far ({progress.done + progress.failed} of {progress.total} attacks done), the clients'"


def _labels(scores: Scores, ledger: Ledger) -> str:
    """How well labels were restored, by attacks that were not given them."""
    own = {name for name, planned in planned_attacks(ledger).items() if planned.labels == "restored"}
    pooled = [k for k in leakage(scores, "label_accuracy") if k.round is None and k.attack in own]
    best = best_of(pooled)
    return f"; {100 * (best.mean or 0):.0f} % of the labels are restored" if best is not None else ""


def _nothing_to_judge(scores: Scores, ledger: Ledger) -> str:
    real = scores.of_metric(scores.measure.metric)
    real = real.where(real.by_attacks)
    if not ledger.attacks():
        return "Nothing can be said about leakage: no attack was planned."
    if not any(is_attack(row["name"]) for row in ledger.attacks()):
        return "Nothing can be said about leakage: the plan has baselines only."
    if not len(real) and ledger.meta().get("replay") == "mismatch":
        return "Nothing can be said about leakage: the replay check failed, so no attack was run."
    if not len(real):
        return "Nothing can be said about leakage yet: no attack has been done."
    if np.isnan(real.value).all():
        counts = Counter(real.statuses[s] for s in real.status)
        hidden = counts.pop(UNGRADED, 0)
        outcomes = ", ".join(f"{n} x {status}" for status, n in sorted(counts.items()))
        other = f"no attack gave {_a(scores.measure.private)} to grade ({outcomes})"
        if hidden:
            reason = ungraded_reason(ledger)
            count = f"{hidden} reconstruction{'s' if hidden > 1 else ''}, none graded"
            other = f"{count}{f' ({reason})' if reason else ''}{f'; without one: {outcomes}' if outcomes else ''}"
        return f"Nothing can be said about leakage: {other}."
    return "Nothing can be said about leakage yet: no baseline has been graded beside the attacks."


def ungraded_reason(ledger: Ledger) -> str:
    """Why a deployment's clients graded nothing or not everything, in their words; empty if they graded everything."""
    return ledger.meta().get("grading", "").partition("not graded")[2].partition(": ")[2]


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
