"""What a run shows: leakage by round and attack beside its baselines and accuracy, with intervals, rates and a verdict.

Pure functions of a ledger: equal ledgers give equal numbers, whatever the order in which the workers wrote them.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf, sqrt
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from attacks.audit import WHOLE_BATCH
from attacks.base import Budget
from attacks.limits import reconstruction_robustness
from attacks.metrics import PSNR_CAP, image_metrics
from attacks.plan import BASELINES, LIMITS, PlannedAttack
from client.update import Chain, per_example
from defenses.clip import clip
from defenses.noise import gaussian, identity
from server.ledger import Ledger

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Role = Literal["attack", "limit", "baseline"]

DRAWS = 2000  # of the bootstrap
SEED = 0  # of the bootstrap: the same table twice gives the same interval
NORMAL_95 = 1.959963984540054  # the standard normal's 97.5 % quantile
THRESHOLDS = tuple(range(10, 61))  # dB
MARGIN = 10.0  # dB: a tenth of the squared error


# ------------------------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True, eq=False)
class Scores:
    """All score rows of a ledger as columns: (N,) each; a value is NaN where there was nothing to grade.

    Args:
        attack, metric, status: indices into attacks, metrics, statuses, which are in order of first appearance.
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
        attacks: dict[str, int] = {}
        metrics: dict[str, int] = {}
        statuses: dict[str, int] = {}
        rows = [
            (
                r,
                c,
                attacks.setdefault(a, len(attacks)),
                e,
                metrics.setdefault(m, len(metrics)),
                statuses.setdefault(s, len(statuses)),
                np.nan if v is None else v,
            )
            for r, c, a, e, m, v, s, *_ in ledger.scores()
        ]
        table = np.array(rows, dtype=np.float64).reshape(-1, 7)
        round, client, attack, example, metric, status = table.T[:6].astype(np.int64)
        value = table[:, 6]
        return cls(
            round, client, attack, example, metric, value, status, tuple(attacks), tuple(metrics), tuple(statuses)
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
        attempt = self._pack(self.attack, self.round, self.client)
        graded = np.unique(attempt[own | ~np.isnan(self.value)])
        _, first = np.unique(attempt, return_index=True)
        lost = first[~np.isin(attempt[first], graded)]
        return self.where(np.union1d(np.flatnonzero(own), lost))

    def of_attack(self, attack: str) -> "Scores":
        """The rows of an attack."""
        return self.where(self.attack == (self.attacks.index(attack) if attack in self.attacks else -1))

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


@lru_cache(maxsize=1)
def _directions() -> Mapping[str, bool]:
    """Whether a higher value leaks more, for every metric that a ledger may hold."""
    built = image_metrics((3, 32, 32), torch.zeros(1, 3, 32, 32))
    # LPIPS is built only where its weights are, yet a ledger may come from another machine
    return {"label_accuracy": True, "lpips_alex": False} | {m.name: m.higher_is_better for m in built}


def higher_is_better(metric: str) -> bool:
    """From the attacker's side; ValueError for a metric that this fedleak does not know."""
    if metric not in _directions():
        raise ValueError(f"unknown metric {metric!r} (there are: {', '.join(sorted(_directions()))})")
    return _directions()[metric]


def known_metrics(scores: Scores) -> list[str]:
    """The metrics with at least one value, those that this fedleak knows."""
    present = {scores.metrics[i] for i in np.unique(scores.metric[~np.isnan(scores.value)])}
    return [m for m in ("psnr", "ssim", "mse", "identified", "label_accuracy") if m in present] + sorted(
        present & _directions().keys() - {"psnr", "ssim", "mse", "identified", "label_accuracy"}
    )


def in_means(metric: str, values: Floats) -> Floats:
    """Values as they enter a mean: an exact hit's infinite PSNR is capped."""
    return np.minimum(values, PSNR_CAP) if metric == "psnr" else values


# ---------------------------------------------------------------------------------------------------------- intervals


def clustered_interval(values: Floats, clients: Ints) -> tuple[float, float] | None:
    """95 % percentile bootstrap interval of the mean over examples, clients drawn with replacement; None below two clients."""
    _, cluster = np.unique(clients, return_inverse=True)
    sums, counts = np.bincount(cluster, values), np.bincount(cluster)
    if len(counts) < 2:  # one client says nothing on how clients differ
        return None
    weights = _resamples(len(counts))
    low, high = np.quantile((weights @ sums) / (weights @ counts), (0.025, 0.975))
    return float(low), float(high)


@lru_cache(maxsize=16)
def _resamples(clusters: int) -> Floats:
    """(DRAWS, clusters): how often each cluster is drawn; the same draws for all attacks, which are compared with each other."""
    drawn = np.random.default_rng(SEED).multinomial(clusters, np.full(clusters, 1 / clusters), DRAWS)
    return drawn.astype(np.float64)


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
        failed: rows without a value, by status; they are in no mean.
        mean, low, high: mean and 95 % bootstrap interval, clustered by client; PSNR capped at PSNR_CAP. None where there
            is nothing to average, or fewer than two clients for an interval.
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


def leakage(ledger: Ledger, metric: str) -> list[Leak]:
    """One Leak for each (round, attack), by round, then one for each attack over all rounds; baselines among them."""
    return leaks(Scores.read(ledger), metric)


def leaks(scores: Scores, metric: str) -> list[Leak]:
    """As leakage, of scores that are read already."""
    higher = higher_is_better(metric)
    chosen = scores.of_metric(metric)
    by_round = [
        _leak(part, metric, higher, int(part.round[0])) for part in _groups(chosen, (chosen.attack, chosen.round))
    ]
    return by_round + [_leak(part, metric, higher, None) for part in _groups(chosen, (chosen.attack,))]


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
        median=float(np.median(raw)) if some else None,
        best=float(raw.max() if higher else raw.min()) if some else None,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        clusters=len(np.unique(clients)),
    )


def rate(leak: Leak) -> Rate:
    """A Leak of a metric that is 0 or 1 (identified) as a rate."""
    return Rate(round((leak.mean or 0.0) * leak.n), leak.n)


# -------------------------------------------------------------------------------------------------------- round table


@dataclass(frozen=True)
class Line:
    """One real attack in one attacked round, with what it is compared with.

    Args:
        accuracy: test accuracy of the model after the round.
        attacked_accuracy: of the model that the clients were sent, whose updates were attacked.
        mean, best: PSNR in dB, as in Leak; None where nothing was graded.
        baseline, baseline_name: the best baseline's mean PSNR in the round, and which it is; None where none is graded.
        labels: mean label accuracy; None where the attack claims no labels.
        identified: None where it is not graded.
        psnr: the whole Leak.
    """

    round: int
    accuracy: float | None
    attacked_accuracy: float | None
    attack: str
    mean: float | None
    best: float | None
    baseline: float | None
    baseline_name: str | None
    labels: float | None
    identified: Rate | None
    psnr: Leak


def round_table(ledger: Ledger) -> list[Line]:
    """Every attacked round of which there are scores, attacks in the order of the plan."""
    scores = Scores.read(ledger)
    return lines_of({m: leaks(scores, m) for m in ("psnr", "label_accuracy", "identified")}, ledger)


def lines_of(found: Mapping[str, Sequence[Leak]], ledger: Ledger) -> list[Line]:
    """As round_table, of leaks that are computed already, by metric."""
    accuracy = {row["round"]: row["accuracy"] for row in ledger.rounds()}
    psnr, labels, identified = (_by_round(found.get(m, ())) for m in ("psnr", "label_accuracy", "identified"))
    attacks = [a for a in attack_order(ledger, {k.attack for k in found.get("psnr", ())}) if is_attack(a)]
    lines = []
    for round, by_attack in sorted(psnr.items()):
        floor = best_of([leak for name, leak in by_attack.items() if is_baseline(name)])
        for attack in [a for a in attacks if a in by_attack]:
            leak, restored, known = (kind.get(round, {}).get(attack) for kind in (psnr, labels, identified))
            assert leak is not None
            lines.append(
                Line(
                    round=round,
                    accuracy=accuracy.get(round),
                    attacked_accuracy=accuracy.get(round - 1),
                    attack=attack,
                    mean=leak.mean,
                    best=leak.best,
                    baseline=floor.mean if floor else None,
                    baseline_name=floor.attack if floor else None,
                    labels=restored.mean if restored else None,
                    identified=rate(known) if known and known.n else None,
                    psnr=leak,
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


def success_curve(ledger: Ledger) -> dict[str, list[Rate]]:
    """For each attack and baseline, how many examples reach each PSNR of THRESHOLDS, of all attacked: failures do not."""
    return successes(Scores.read(ledger), ledger)


def successes(scores: Scores, ledger: Ledger) -> dict[str, list[Rate]]:
    """As success_curve, of scores that are read already."""
    sizes = {(o["round"], o["client"]): o["examples"] or 1 for o in ledger.observations()}
    psnr = scores.of_metric("psnr")
    curve = {}
    for attack in [a for a in attack_order(ledger, psnr.attacks) if not is_limit(a)]:
        rows = psnr.of_attack(attack)
        whole = rows.where(rows.example == WHOLE_BATCH)  # a batch lost as a whole: each of its examples
        lost = sum(sizes.get((int(r), int(c)), 1) - 1 for r, c in zip(whole.round, whole.client, strict=True))
        n = len(rows) + lost
        curve[attack] = [Rate(int((rows.value >= t).sum()), n) for t in THRESHOLDS]
    return curve


# -------------------------------------------------------------------------------------------------------- certificate


@dataclass(frozen=True)
class Mechanism:
    """What normal noise does for one example of an update.

    Args:
        multiplier: noise over the most that the example can move what it is added to.
        releases: of the example under fresh noise, in one round.
    """

    multiplier: float
    releases: int


def gaussian_mechanism(chain: Chain, batch_size: int) -> Mechanism | None:
    """Clipping, then normal noise, as a Gaussian mechanism; None of another chain. What follows only processes the release.

    An example clipped by itself moves the mean of b by max_norm / b at most; clipped as a whole, what is released lies
    within max_norm of what is released of nothing. What is released is a step's gradient, or after local_sgd the update.
    """
    local, trained, reach = chain.local, False, inf
    size = min(local.batch_size or batch_size, batch_size)
    for link in chain.links:
        each = isinstance(link, per_example)
        inner = link.inner if isinstance(link, per_example) else link
        if isinstance(inner, clip):
            reach = min(reach, inner.max_norm / (size if each else 1))
        elif link is local:
            if (
                local.steps > 1 and reach < inf
            ):  # the example moves the later steps' weights, and so the others' gradients
                return None
            reach, trained = reach * local.rate, True
        elif isinstance(link, gaussian) and link.sigma > 0 and reach < inf:
            return Mechanism(link.sigma / reach, 1 if trained else ceil(local.steps / (batch_size // size)))
        elif not isinstance(link, identity):
            return None
    return None


def certified(curve: Mapping[str, Sequence[Rate]], mechanism: Mechanism, rounds: int = 1) -> list[float] | None:
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


# ------------------------------------------------------------------------------------------------------------ verdict


@dataclass(frozen=True)
class Excess:
    """By how much an attack beats the baseline that is hardest for it, example by example.

    Args:
        attack, baseline: names.
        mean, low, high: of the PSNR differences in dB, each PSNR capped; the interval clustered by client, None below two.
        psnr, floor: mean PSNR of attack and baseline over the examples that both have.
        identified, floor_identified: how many examples are nearer to the attack's reconstruction, or to the best
            baseline's, than to every auxiliary image; None where that is not graded.
        exposed: examples that are identified (where that is graded) at a tenth of the squared error of every baseline or
            less: no guess comes so near by luck. Of `n`.
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
    exposed: int
    n: int
    clusters: int

    @property
    def leaks(self) -> bool:
        """Whether the images come back better than a guess: on average, or more often, or in a single case beyond luck."""
        nearer = self.low is not None and self.low > 0
        oftener = (
            self.identified is not None
            and self.floor_identified is not None
            and self.identified.interval[0] > self.floor_identified.interval[1]
        )
        return nearer or oftener or self.exposed > 0


@dataclass(frozen=True)
class Verdict:
    """What may be said of a run, in a sentence, and the numbers that it stands on."""

    word: Literal["leaks", "not shown to leak", "undetermined"]
    sentence: str
    strongest: Excess | None = None


def excesses(scores: Scores) -> list[Excess]:
    """One for each real attack that shares examples with a baseline."""
    psnr, identified = (scores.of_metric(m) for m in ("psnr", "identified"))
    psnr, identified = (kind.where(~np.isnan(kind.value)) for kind in (psnr, identified))
    found = [_excess(psnr, identified, a) for a in psnr.attacks if is_attack(a)]
    return [e for e in found if e is not None]


def _excess(psnr: Scores, identified: Scores, attack: str) -> Excess | None:
    own = psnr.of_attack(attack)
    keys, capped = own.example_keys(), in_means("psnr", own.value)
    rivals = (*BASELINES, f"wrong_client({attack})")
    floors = {b: _lookup(psnr.of_attack(b), keys) for b in rivals}
    shared = {b: ~np.isnan(floor) for b, floor in floors.items() if not np.isnan(floor).all()}
    if not shared:
        return None
    gains = {b: capped[both] - in_means("psnr", floors[b][both]) for b, both in shared.items()}
    hardest = min(gains, key=lambda b: float(gains[b].mean()))
    both, gain = shared[hardest], gains[hardest]
    interval = clustered_interval(gain, own.client[both])
    highest = np.fmax.reduce(list(floors.values()))  # NaN where no baseline is graded
    hit = _lookup(identified.of_attack(attack), keys)
    known = [r for b in rivals if (r := _rate_of(identified.of_attack(b))) is not None]
    return Excess(
        attack=attack,
        baseline=hardest,
        mean=float(gain.mean()),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        psnr=float(capped[both].mean()),
        floor=float(in_means("psnr", floors[hardest][both]).mean()),
        identified=_rate_of(identified.of_attack(attack)),
        floor_identified=max(known, key=lambda r: r.fraction or 0.0, default=None),
        exposed=int(((own.value >= highest + MARGIN) & (np.isnan(hit) | (hit == 1))).sum()),
        n=len(own),
        clusters=len(np.unique(own.client[both])),
    )


def _rate_of(rows: Scores) -> Rate | None:
    return Rate(int(rows.value.sum()), len(rows)) if len(rows) else None


def _lookup(rows: Scores, keys: Ints) -> Floats:
    """The value of each key (round, client, example) in some rows; NaN where there is none."""
    known, first = np.unique(rows.example_keys(), return_index=True)
    if not len(known):
        return np.full(len(keys), np.nan)
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, rows.value[first][place], np.nan)


def verdict(ledger: Ledger) -> Verdict:
    """The run's verdict; it says "leaks" or "not shown to leak", with the strongest attack, never that a run is private."""
    return judge(Scores.read(ledger), ledger)


def judge(scores: Scores, ledger: Ledger) -> Verdict:
    """As verdict, of scores that are read already."""
    found = excesses(scores)
    if not found:
        return Verdict("undetermined", _nothing_to_judge(scores, ledger))
    strongest = max(found, key=lambda e: (e.leaks, e.mean))
    if not strongest.leaks and ledger.meta().get("replay") == "mismatch":
        words = (
            "Nothing can be said on leakage: the replay check failed, so the attacks inverted another computation than the "
            "clients', and that they failed proves nothing."
        )
        return Verdict("undetermined", words, strongest)
    budget = budgets(ledger).get(strongest.attack, "budget unknown")
    numbers = (
        f"{strongest.psnr:.1f} dB PSNR on average, the best baseline ({strongest.baseline}) {strongest.floor:.1f} dB"
    )
    if strongest.identified is not None:
        numbers += f"; {strongest.identified.count} of {strongest.identified.n} images are identified"
    if strongest.exposed and not strongest.mean > 0:  # the mean hides them
        numbers += f", {strongest.exposed} of them at a tenth of every baseline's error or less"
    numbers += _labels(scores, ledger)
    if strongest.leaks:
        words = f"leak: the strongest attack, {strongest.attack} ({budget}), reaches {numbers}."
        return Verdict("leaks", f"{_so_far(ledger)} images {words}", strongest)
    words = (
        f"are not shown to leak at this budget (strongest attack {strongest.attack}, {budget}): it reaches {numbers}; "
        "a stronger attack may still succeed."
    )
    return Verdict("not shown to leak", f"{_so_far(ledger)} images {words}", strongest)


def _so_far(ledger: Ledger) -> str:
    progress = ledger.progress()
    if not progress.queued + progress.leased:
        return "The clients'"
    return f"So far ({progress.done + progress.failed} of {progress.total} attacks done), the clients'"


def _labels(scores: Scores, ledger: Ledger) -> str:
    """How well labels came back, where the threat model did not give them away."""
    own = {name for name, planned in planned_attacks(ledger).items() if planned.labels == "restored"}
    pooled = [k for k in leaks(scores, "label_accuracy") if k.round is None and k.attack in own]
    best = best_of(pooled)
    return f"; {100 * (best.mean or 0):.0f} % of the labels are restored" if best is not None else ""


def _nothing_to_judge(scores: Scores, ledger: Ledger) -> str:
    real = scores.of_metric("psnr")
    real = real.where(np.array([is_attack(scores.attacks[a]) for a in real.attack], dtype=bool))
    if not ledger.attacks():
        return "Nothing can be said on leakage: no attack was planned."
    if not any(is_attack(row["name"]) for row in ledger.attacks()):
        return "Nothing can be said on leakage: the plan has baselines only."
    if not len(real):
        return "Nothing can be said on leakage yet: no attack has been done."
    if np.isnan(real.value).all():
        told = Counter(real.statuses[s] for s in real.status)
        outcomes = ", ".join(f"{n} x {status}" for status, n in sorted(told.items()))
        return f"Nothing can be said on leakage: no attack gave an image to grade ({outcomes})."
    return "Nothing can be said on leakage yet: no baseline has been graded beside the attacks."


def budgets(ledger: Ledger) -> dict[str, str]:
    """What each attack may spend on one observation, in words."""
    return {name: _budget(planned.budget) for name, planned in planned_attacks(ledger).items()}


def planned_attacks(ledger: Ledger) -> dict[str, PlannedAttack]:
    """The attacks as they were planned, in order."""
    return {row["name"]: PlannedAttack.from_json(row["planned"]) for row in ledger.attacks()}


def _budget(budget: Budget) -> str:
    words = f"{_counted(budget.iterations, 'iteration')} x {_counted(budget.restarts, 'restart')}"
    return words + (f", at most {budget.seconds:g} s a wave" if budget.seconds is not None else "")


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")
