"""What a run shows: leakage by round and attack beside its baselines and accuracy, with intervals, rates and a verdict.

Pure functions of a ledger: equal ledgers give equal numbers, whatever the order in which the workers wrote them.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan, sqrt
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from fedgauge.attacks.grading.audit import NO_DERIVATIVE, WHOLE_BATCH
from fedgauge.attacks.grading.image_metrics import HIGHER_IS_BETTER, PSNR_CAP
from fedgauge.attacks.plan import BASELINES, LIMITS, PlannedAttack
from fedgauge.client.data.corpora import Text
from fedgauge.client.protocol import Federation, Protocol
from fedgauge.server.store.ledger import UNGRADED, Ledger, ScoreRow

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Number = TypeVar("Number", np.int64, np.float64)
Role = Literal["attack", "limit", "baseline"]

NORMAL_95 = 1.959963984540054  # the standard normal's 97.5 % quantile
THRESHOLDS = tuple(range(10, 61))  # dB
MARGIN = 10.0  # dB: a tenth of the squared error


@dataclass(frozen=True)
class MainMetric:
    """The metric by which attacks are compared.

    Args:
        name, unit: in words.
        margin: by which no guess beats every baseline through luck.
        beyond: a margin in words.
        private: what is attacked, in words.
        cap: what a value counts in means, at most.
    """

    metric: str
    name: str
    unit: str
    margin: float
    beyond: str
    private: str
    cap: float


OF_IMAGES = MainMetric("psnr", "PSNR", "dB", MARGIN, "at a tenth of every baseline's error or less", "image", PSNR_CAP)
OF_TEXT = MainMetric(
    "rouge1", "ROUGE-1", "%", 50.0, "with half of the scale above every baseline or more", "sentence", 100.0
)


def best_so_far(ledger: Ledger) -> tuple[MainMetric, float | None]:
    """The measure of what was attacked, and the best value that an attack reached; None before the first."""
    for measure in (OF_TEXT, OF_IMAGES):
        best, _ = ledger.so_far(measure.metric, measure.cap)
        if best is not None:
            return measure, best
    return OF_IMAGES, None


def measure_of(federation: Federation) -> MainMetric:
    """That of the examples of a federation."""
    return OF_TEXT if isinstance(federation.shards.dataset, Text) else OF_IMAGES


# ------------------------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True, eq=False)
class Scores:
    """All score rows of a ledger as columns: (N,) each; a value is NaN where there was nothing to grade.

    Args:
        attack, metric, status: indices into attacks, metrics, statuses, which are in alphabetical order.
    """

    round: Ints
    client: Ints
    attack: Ints
    example: Ints
    metric: Ints
    value: Floats
    status: Ints
    attacks: tuple[str, ...]
    metrics: tuple[str, ...]
    statuses: tuple[str, ...]

    @classmethod
    def read(cls, ledger: Ledger) -> "Scores":
        """In one query."""
        return cls.none().and_also(ledger.scores_since(0))

    @classmethod
    def none(cls) -> "Scores":
        """No rows."""
        ints = np.zeros(0, np.int64)
        return cls(ints, ints, ints, ints, ints, np.zeros(0), ints, (), (), ())

    def and_also(self, rows: Iterable[ScoreRow]) -> "Scores":
        """With further rows.

        The order of the result depends on nothing but what is in it: by round, client, attack, example and metric.
        """
        round, client, example, value = (
            array("q"),
            array("q"),
            array("q"),
            array("d"),
        )  # lists would cost ten times the memory
        attack, metric, status = (_Names(known) for known in (self.attacks, self.metrics, self.statuses))
        for row in rows:
            round.append(row[0])
            client.append(row[1])
            attack.append(row[2])
            example.append(row[3])
            metric.append(row[4])
            status.append(row[5])
            value.append(nan if row[6] is None else row[6])
        columns = {
            "round": _after(self.round, round),
            "client": _after(self.client, client),
            "attack": attack.after(self.attack),
            "example": _after(self.example, example),
            "metric": metric.after(self.metric),
            "status": status.after(self.status),
        }
        values = _after(self.value, value)
        order = np.lexsort([columns[name] for name in ("metric", "example", "attack", "client", "round")])
        for name in columns:  # one after the other: a large run's are not to be there twice
            columns[name] = columns[name][order]
        return Scores(
            **columns, value=values[order], attacks=attack.sorted, metrics=metric.sorted, statuses=status.sorted
        )

    def __len__(self) -> int:
        return len(self.value)

    def where(self, chosen: Mask | Ints) -> "Scores":
        """Some of the rows."""
        columns = ("round", "client", "attack", "example", "metric", "value", "status")
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})

    def of_metric(self, metric: str) -> "Scores":
        """The rows of a metric, and one for each observation for which an attack gave nothing that any metric could grade.

        A wave whose worker died is one row of PSNR, and an attack that restores no image may restore no label either:
        for every metric that is an attempt that failed.
        """
        own = self.metric == (self.metrics.index(metric) if metric in self.metrics else -1)
        missing = np.flatnonzero(np.isnan(self.value))
        if not len(missing):
            return self.where(own)
        attempt = self._pack(self.attack, self.round, self.client)
        _, first = np.unique(attempt[missing], return_index=True)
        suspects = missing[first]
        graded = np.isin(attempt, attempt[suspects]) & (own | ~np.isnan(self.value))
        lost = suspects[~np.isin(attempt[suspects], attempt[graded])]
        return self.where(np.union1d(np.flatnonzero(own), lost))

    def of_attack(self, attack: str) -> "Scores":
        """The rows of an attack."""
        return self.where(self.attack == (self.attacks.index(attack) if attack in self.attacks else -1))

    @property
    def measure(self) -> MainMetric:
        """That of the kind of examples that were graded."""
        return OF_TEXT if OF_TEXT.metric in self.metrics else OF_IMAGES

    def example_keys(self) -> Ints:
        """(N,) one number for each (round, client, example)."""
        return self._pack(self.round, self.client, self.example - WHOLE_BATCH)

    @staticmethod
    def _pack(*columns: Ints) -> Ints:
        """(N,) one number for each distinct tuple of columns, each of which is below 2 ** 21."""
        packed = np.zeros_like(columns[0])
        for column in columns:
            packed = (packed << 21) + column
        return packed


def _after(known: NDArray[Number], more: "array[int] | array[float]") -> NDArray[Number]:
    """A column continued; what was gathered is not copied where it is all."""
    fresh = np.frombuffer(more, more.typecode).astype(known.dtype, copy=False) if len(more) else known[:0]
    return np.concatenate([known, fresh]) if len(known) else fresh


class _Names:
    """A column of names as codes, the first of which stand for names known before."""

    def __init__(self, known: tuple[str, ...]) -> None:
        self._code = {name: i for i, name in enumerate(known)}
        self._codes = array("i")

    def append(self, name: str) -> None:
        self._codes.append(self._code.setdefault(name, len(self._code)))

    @property
    def sorted(self) -> tuple[str, ...]:
        """All names in alphabetical order."""
        return tuple(sorted(self._code))

    def after(self, codes: Ints) -> Ints:
        """Codes of known names, then those of this column, as places in alphabetical order."""
        rank = {name: i for i, name in enumerate(self.sorted)}
        places = np.array([rank[name] for name in self._code], np.int64)
        return places[_after(codes, self._codes)] if len(places) else codes


def is_baseline(attack: str) -> bool:
    """Whether a name in the scores is a guess that does not read the update it is graded against."""
    return attack in BASELINES or attack.startswith("wrong_client(")


def is_limit(attack: str) -> bool:
    """Whether a name in the scores is a bound on every attack."""
    return attack in LIMITS


def is_attack(attack: str) -> bool:
    """Whether a name in the scores is an attack on the update: neither a baseline nor a limit."""
    return kind(attack) == "attack"


def kind(attack: str) -> Role:
    """What a name in the scores is."""
    if is_limit(attack):
        return "limit"
    return "baseline" if is_baseline(attack) else "attack"


def known_metrics(scores: Scores) -> list[str]:
    """The metrics with at least one value, those that this fedgauge knows."""
    present = {scores.metrics[i] for i in np.unique(scores.metric[~np.isnan(scores.value)])}
    return [m for m in HIGHER_IS_BETTER if m in present]


def in_means(metric: str, values: Floats) -> Floats:
    """Values as they enter a mean: an exact hit's infinite PSNR is capped."""
    return np.minimum(values, PSNR_CAP) if metric.startswith("psnr") else values


# ---------------------------------------------------------------------------------------------------------- intervals


def clustered_interval(values: Floats, clients: Ints) -> tuple[float, float] | None:
    """95 % t interval of the mean over examples, clustered by client; None below two clients.

    The mean is a ratio, of the clients' sums to their counts: its error is that of the sums about what their counts explain.
    """
    sums, counts = np.bincount(clients, values), np.bincount(clients)
    sums, counts = sums[counts > 0], counts[counts > 0]
    k, n = len(counts), counts.sum()
    if k < 2:  # one client says nothing on how clients differ
        return None
    mean = sums.sum() / n
    error = sqrt(k / (k - 1) * float(((sums - mean * counts) ** 2).sum())) / n
    half = stdtrit(k - 1, 0.975) * error
    return float(mean - half), float(mean + half)


@dataclass(frozen=True)
class Rate:
    """So many of n, with the 95 % Wilson interval (Wilson, 1927)."""

    count: int
    n: int

    def __post_init__(self) -> None:
        if not 0 <= self.count <= self.n:
            raise ValueError(f"a rate needs 0 <= count <= n, got {self.count} of {self.n}")

    @property
    def fraction(self) -> float | None:
        """None of nothing."""
        return self.count / self.n if self.n else None

    @property
    def interval(self) -> tuple[float, float]:
        """(low, high) in [0, 1]; all of it for n = 0."""
        if not self.n:
            return 0.0, 1.0
        p, z2 = self.count / self.n, NORMAL_95**2 / self.n
        centre, half = p + z2 / 2, NORMAL_95 * sqrt(p * (1 - p) / self.n + z2 / (4 * self.n))
        return max(0.0, (centre - half) / (1 + z2)), min(1.0, (centre + half) / (1 + z2))


# ------------------------------------------------------------------------------------------------------------ leakage


@dataclass(frozen=True)
class Leak:
    """How much one attack brought back in one round, or in all of them.

    Args:
        round: None for all rounds pooled.
        n: graded examples (for label_accuracy: batches).
        failed: rows without a value, by status; they are in no mean. Not among them:
        ungraded: reconstructions that a deployment's clients did not grade, each of a whole batch.
        mean, low, high: mean and 95 % t interval, clustered by client; PSNR capped at PSNR_CAP. None where there is
            nothing to average, or fewer than two clients for an interval.
        median: of raw values.
        best: the worst case for the client, raw: the value that leaks most.
        clusters: clients among the graded; below ten it belongs beside the interval.
    """

    attack: str
    round: int | None
    metric: str
    n: int
    failed: Mapping[str, int]
    mean: float | None
    median: float | None
    best: float | None
    low: float | None
    high: float | None
    clusters: int
    ungraded: int = 0


def leakage(scores: Scores, metric: str) -> list[Leak]:
    """One Leak for each (round, attack), by round, then one for each attack over all rounds; baselines among them.

    Raises:
        ValueError: a metric that this fedgauge does not know.
    """
    if metric not in HIGHER_IS_BETTER:
        raise ValueError(f"unknown metric {metric!r} (there are: {', '.join(HIGHER_IS_BETTER)})")
    return [*leakage_by_round(scores, metric), *leakage_of_all(scores, metric)]


def leakage_by_round(scores: Scores, metric: str) -> list[Leak]:
    """One Leak for each (round, attack), by round."""
    chosen, higher = scores.of_metric(metric), HIGHER_IS_BETTER[metric]
    return [_leak(part, metric, higher, int(part.round[0])) for part in _groups(chosen, (chosen.attack, chosen.round))]


def leakage_of_all(scores: Scores, metric: str) -> list[Leak]:
    """One Leak for each attack, over all rounds."""
    chosen, higher = scores.of_metric(metric), HIGHER_IS_BETTER[metric]
    return [_leak(part, metric, higher, None) for part in _groups(chosen, (chosen.attack,))]


def _groups(scores: Scores, keys: Sequence[Ints]) -> Iterator[Scores]:
    """The rows of each distinct tuple of keys, ordered by the last key first."""
    order = np.lexsort(keys)
    changes = np.any([np.diff(k[order]) != 0 for k in keys], axis=0) if len(scores) else np.array([], bool)
    for rows in np.split(order, np.flatnonzero(changes) + 1):
        if len(rows):
            yield scores.where(rows)


def _leak(part: Scores, metric: str, higher: bool, round: int | None) -> Leak:
    own = part.metric == (part.metrics.index(metric) if metric in part.metrics else -1)
    averaged = in_means(metric, part.value)
    graded = own & np.isfinite(averaged)
    failed = Counter(part.statuses[s] for s in part.status[~graded])
    ungraded = failed.pop(UNGRADED, 0)
    values, raw, clients = averaged[graded], part.value[graded], part.client[graded]
    interval = clustered_interval(values, clients)
    some = len(values) > 0
    return Leak(
        attack=part.attacks[part.attack[0]],
        round=round,
        metric=metric,
        n=len(values),
        failed=dict(sorted(failed.items())),
        mean=float(values.mean()) if some else None,
        median=_median(raw) if some else None,
        best=float(raw.max() if higher else raw.min()) if some else None,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        clusters=int(np.count_nonzero(np.bincount(clients))),
        ungraded=ungraded,
    )


def _median(values: Floats) -> float:
    ordered, middle = np.sort(values), len(values) // 2  # numpy's own takes ten times as long for a round's few
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


def rate(leak: Leak) -> Rate:
    """A Leak of a metric that is 0 or 1 (identified) as a rate."""
    return Rate(round((leak.mean or 0.0) * leak.n), leak.n)


# ------------------------------------------------------------------------------------------------------ participation


def rounds_seen(protocol: Protocol, replies: Iterable[tuple[int, int]]) -> dict[int, set[int]]:
    """For each client the rounds in which the server saw something of it.

    Args:
        replies: (round, client) of every one that came, be it rejected; under a secure sum of a group's first client.
    """
    seen: dict[int, set[int]] = {}
    for round, client in replies:
        for member in {client, *protocol.members(client, round)}:
            seen.setdefault(member, set()).add(round)
    return seen


# -------------------------------------------------------------------------------------------------------- round table


@dataclass(frozen=True)
class RoundLeak:
    """One real attack in one attacked round, with what it is compared with.

    Args:
        accuracy: test accuracy of the model after the round.
        attacked_accuracy: of the model that the clients were sent, whose updates were attacked.
        psnr: the Leak of the run's measure (of text, ROUGE-1) by the attack; its mean is None where nothing was graded.
        baseline: that of the best baseline in the round; None where none is graded.
        labels: mean label accuracy; None where the attack claims no labels.
        identified: None where it is not graded.
    """

    round: int
    accuracy: float | None
    attacked_accuracy: float | None
    attack: str
    psnr: Leak
    baseline: Leak | None
    labels: float | None
    identified: Rate | None


def round_table(scores: Scores, ledger: Ledger) -> list[RoundLeak]:
    """Every attacked round of which there are scores, attacks in the order of the plan."""
    accuracy = {row["round"]: row["accuracy"] for row in ledger.rounds()}
    measures = (scores.measure.metric, "label_accuracy", "identified")
    psnr, labels, identified = (_by_round(leakage(scores, m)) for m in measures)
    attacks = [a for a in attack_order(ledger, scores.attacks) if is_attack(a)]
    lines = []
    for round, by_attack in sorted(psnr.items()):
        floor = best_of([leak for name, leak in by_attack.items() if is_baseline(name)])
        for attack in [a for a in attacks if a in by_attack]:
            restored, known = (kind.get(round, {}).get(attack) for kind in (labels, identified))
            lines.append(
                RoundLeak(
                    round=round,
                    accuracy=accuracy.get(round),
                    attacked_accuracy=accuracy.get(round - 1),
                    attack=attack,
                    psnr=by_attack[attack],
                    baseline=floor,
                    labels=restored.mean if restored else None,
                    identified=rate(known) if known and known.n else None,
                )
            )
    return lines


def _by_round(found: Sequence[Leak]) -> dict[int, dict[str, Leak]]:
    by_round: dict[int, dict[str, Leak]] = {}
    for leak in found:
        if leak.round is not None:
            by_round.setdefault(leak.round, {})[leak.attack] = leak
    return by_round


def best_of(found: Sequence[Leak]) -> Leak | None:
    """The Leak with the highest mean; None where none has one."""
    graded = [leak for leak in found if leak.mean is not None]
    return max(graded, key=lambda leak: leak.mean or 0.0, default=None)


def attack_order(ledger: Ledger, names: Collection[str]) -> list[str]:
    """Names that stand in the scores: real attacks in the plan's order, then limits, then baselines."""
    planned = [row["name"] for row in ledger.attacks()]
    rank = {name: i for i, name in enumerate(planned)} | {f"wrong_client({n})": i for i, n in enumerate(planned)}
    return sorted(names, key=lambda a: (is_baseline(a), is_limit(a), a not in BASELINES, rank.get(a, len(rank)), a))


# ------------------------------------------------------------------------------------------------------ success rates


def success_curve(scores: Scores, ledger: Ledger) -> dict[str, list[Rate]]:
    """For each attack and baseline, how many examples reach each PSNR of THRESHOLDS, of all attacked: failures do not.

    What clients did not grade counts neither way: an attack of which they graded nothing has no curve, and where they graded
    nothing at all there is none. Of text there is none either: its thresholds are other ones.
    """
    if scores.measure != OF_IMAGES:
        return {}
    sizes = {(o["round"], o["client"]): o["examples"] or 1 for o in ledger.observations()}
    psnr = scores.of_metric("psnr")
    if _unknown(psnr):
        return {}
    curve = {}
    for attack in [a for a in attack_order(ledger, psnr.attacks) if not is_limit(a)]:
        rows = psnr.of_attack(attack)
        if not len(rows) or _unknown(rows):
            continue
        rows = rows.where(~_ungraded(rows))
        whole = rows.where(rows.example == WHOLE_BATCH)  # a batch lost as a whole: each of its examples
        lost = sum(sizes.get((int(r), int(c)), 1) - 1 for r, c in zip(whole.round, whole.client, strict=True))
        n = len(rows) + lost
        curve[attack] = [Rate(int((rows.value >= t).sum()), n) for t in THRESHOLDS]
    return curve


def ungraded(scores: Scores) -> int:
    """How many reconstructions by real attacks a deployment's clients did not grade."""
    return int((_ungraded(scores) & _by_attacks(scores)).sum())


def _ungraded(rows: Scores) -> Mask:
    hidden: Mask = rows.status == (rows.statuses.index(UNGRADED) if UNGRADED in rows.statuses else -1)
    return hidden


def _unknown(rows: Scores) -> bool:
    """Whether all that came back is ungraded: that the rest failed says nothing of a rate."""
    return bool(_ungraded(rows).any() and np.isnan(rows.value).all())


def _by_attacks(rows: Scores) -> Mask:
    own: Mask = np.array([is_attack(a) for a in rows.attacks], dtype=bool)[rows.attack]
    return own


# ------------------------------------------------------------------------------------------------------------ verdict


@dataclass(frozen=True)
class ExcessLeakage:
    """By how much an attack beats the baseline that is hardest for it, example by example.

    Args:
        attack, baseline: names.
        mean, low, high: of the differences of the run's measure (PSNR in dB, each capped; of text, ROUGE-1 in percent); the
            interval clustered by client, None below two.
        psnr, floor: mean measure of attack and baseline over the examples that both have.
        identified, floor_identified: how many examples are nearer to the attack's reconstruction, or to the best
            baseline's, than to every auxiliary image; None where that is not graded.
        oftener: the lower end of the interval by how much oftener the attack's are, clustered as the other; None below two
            clients, or where that is not graded.
        exposed: examples that are identified (where that is graded) at a tenth of the squared error of every baseline or
            less, of text by half of the scale above them: no guess comes so near by luck. Of `n`.
        clusters: clients.
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
        """Whether the images come back better than a guess: on average, or more often, or in a single case beyond luck."""
        return any(low is not None and low > 0 for low in (self.low, self.identified_more_often)) or self.exposed > 0


@dataclass(frozen=True)
class Verdict:
    """What may be said of a run, in a sentence, and the numbers that it stands on."""

    word: Literal["leaks", "not shown to leak", "undetermined"]
    sentence: str
    strongest: ExcessLeakage | None = None


def excesses(scores: Scores) -> list[ExcessLeakage]:
    """One for each real attack that shares examples with a baseline."""
    psnr, identified = (scores.of_metric(m) for m in (scores.measure.metric, "identified"))
    psnr, identified = (kind.where(~np.isnan(kind.value)) for kind in (psnr, identified))
    found = [_excess(psnr, identified, a) for a in psnr.attacks if is_attack(a)]
    return [e for e in found if e is not None]


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
    """What an attack has over the baseline that leaves it the least, on the examples that both have, (n,) each."""

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
    values, gains = in_means(metric, own.value), []
    for baseline in _rivals(attack):
        floor = in_means(metric, _lookup(graded.of_attack(baseline), own.example_keys()))
        both = ~np.isnan(floor)
        if both.any():
            gains.append(_PairedDifference(baseline, values[both], values[both] - floor[both], own.client[both]))
    return min(gains, key=lambda g: float(g.differences.mean()), default=None)


def _rate_of(rows: Scores) -> Rate | None:
    return Rate(int(rows.value.sum()), len(rows)) if len(rows) else None


def _lookup(rows: Scores, keys: Ints) -> Floats:
    """The value of each key (round, client, example) in some rows; NaN where there is none."""
    known, first = np.unique(rows.example_keys(), return_index=True)
    if not len(known):
        return np.full(len(keys), np.nan)
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, rows.value[first][place], np.nan)


def verdict(scores: Scores, ledger: Ledger) -> Verdict:
    """The run's verdict; it says "leaks" or "not shown to leak", with the strongest attack, never that a run is private."""
    found = excesses(scores)
    if not found:
        return Verdict("undetermined", _nothing_to_judge(scores, ledger))
    strongest = max(found, key=lambda e: (e.leaks, e.mean))
    if not strongest.leaks and (why := _proves_nothing(found, ledger)):
        return Verdict(
            "undetermined", f"Nothing can be said on leakage: {why}, and that they failed proves nothing.", strongest
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


def _proves_nothing(found: Sequence[ExcessLeakage], ledger: Ledger) -> str:
    """Why no failure of these attacks says anything; empty where one does."""
    if ledger.meta().get("replay") == "mismatch":
        return "the replay check failed, so the attacks inverted another computation than the clients'"
    cards = {row["name"]: row["knowledge"] for row in ledger.attacks()}
    if all(NO_DERIVATIVE in cards[e.attack] for e in found):
        return f"{NO_DERIVATIVE}. The attacks never moved"
    return ""


def _so_far(ledger: Ledger) -> str:
    progress = ledger.progress()
    if not progress.queued + progress.leased:
        return "The clients'"
    return f"So far ({progress.done + progress.failed} of {progress.total} attacks done), the clients'"


def _labels(scores: Scores, ledger: Ledger) -> str:
    """How well labels came back, where the threat model did not give them away."""
    own = {name for name, planned in planned_attacks(ledger).items() if planned.labels == "restored"}
    pooled = [k for k in leakage(scores, "label_accuracy") if k.round is None and k.attack in own]
    best = best_of(pooled)
    return f"; {100 * (best.mean or 0):.0f} % of the labels are restored" if best is not None else ""


def _nothing_to_judge(scores: Scores, ledger: Ledger) -> str:
    real = scores.of_metric(scores.measure.metric)
    real = real.where(_by_attacks(real))
    if not ledger.attacks():
        return "Nothing can be said on leakage: no attack was planned."
    if not any(is_attack(row["name"]) for row in ledger.attacks()):
        return "Nothing can be said on leakage: the plan has baselines only."
    if not len(real) and ledger.meta().get("replay") == "mismatch":
        return "Nothing can be said on leakage: the replay check failed, so no attack was run."
    if not len(real):
        return "Nothing can be said on leakage yet: no attack has been done."
    if np.isnan(real.value).all():
        told = Counter(real.statuses[s] for s in real.status)
        hidden = told.pop(UNGRADED, 0)
        outcomes = ", ".join(f"{n} x {status}" for status, n in sorted(told.items()))
        other = f"no attack gave {_a(scores.measure.private)} to grade ({outcomes})"
        if hidden:
            reason = not_graded(ledger)
            count = f"{hidden} reconstruction{'s' if hidden > 1 else ''}, none graded"
            other = f"{count}{f' ({reason})' if reason else ''}{f'; without one: {outcomes}' if outcomes else ''}"
        return f"Nothing can be said on leakage: {other}."
    return "Nothing can be said on leakage yet: no baseline has been graded beside the attacks."


def not_graded(ledger: Ledger) -> str:
    """Why a deployment's clients graded nothing, or not all, as they say; empty where they did."""
    return ledger.meta().get("grading", "").partition("not graded")[2].partition(": ")[2]


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def planned_attacks(ledger: Ledger) -> dict[str, PlannedAttack]:
    """The attacks as they were planned, in order."""
    return {row["name"]: PlannedAttack.from_json(row["planned"]) for row in ledger.attacks()}
