"""Leakage of each attack, by round and over all rounds."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedgauge.attacks.base import Role
from fedgauge.attacks.modality.membership import HELD, MEMBER, MEMBERSHIP
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.store.ledger_types import UNGRADED
from fedgauge.server.views.formatting import counted_words
from fedgauge.server.views.intervals import Ints, Rate, clustered_interval
from fedgauge.server.views.scores import Scores, capped


@dataclass(frozen=True)
class Leak:
    """Leakage of one attack in one round, or over all rounds.

    Args:
        round: None for all rounds.
        n: number of graded examples (for label_accuracy: batches).
        failed: number of examples (or batches) without a value, by status; no mean counts them.
        ungraded: number of reconstructions without a grade, each of a whole batch; not among the failed.
        mean, low, high: mean of capped values with its 95 % interval, clustered by client, Wilson's for a rate. None without
            values, or with fewer than two clients for an interval.
        median, best: of uncapped values; best: the one that leaks most.
        clusters: number of graded clients.
    """

    attack: str
    role: Role
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

    @property
    def worst(self) -> float | None:
        """The worst case to draw, capped; None for rates, baselines and limits."""
        if self.best is None or MEASURED[self.metric].rate or self.role != "attack":
            return None
        return float(capped(self.metric, np.array(self.best)))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval to show, with its upper end at most at the metric's cap."""
        if self.low is None or self.high is None:
            return None
        cap = MEASURED[self.metric].cap
        return self.low, self.high if cap is None else min(self.high, cap)

    @property
    def rate(self) -> Rate:
        """Count and total of a metric that is 0 or 1."""
        return Rate(round((self.mean or 0.0) * self.n), self.n)

    @property
    def without_value(self) -> str:
        return counted_words(self.failed)


def leakage(scores: Scores, metric: str) -> list[Leak]:
    """Return one Leak for each round and name, then one for each name over all rounds."""
    chosen = counted(scores, metric)
    by_round = [_leak(part, metric, int(part.round[0])) for part in _groups(chosen, (chosen.attack, chosen.round))]
    return [*by_round, *leakage_of_all(scores, metric)]


def leakage_of_all(scores: Scores, metric: str) -> list[Leak]:
    chosen = counted_of_all(scores, metric)
    return [_leak(part, metric, None) for part in _groups(chosen, (chosen.attack,))]


def counted(scores: Scores, metric: str) -> Scores:
    """Return the rows that count in a metric's means, with the failed ones."""
    rows = scores.of_metric(metric)
    if metric not in MEMBERSHIP:
        return rows
    if metric.startswith(HELD):  # such a test says nothing about the rest of the client's data
        single = scores.attack[scores.named(MEMBER) & ~np.isnan(scores.value)]
        rows = rows.where(~np.isin(rows.attack, single))
    return rows


def counted_of_all(scores: Scores, metric: str) -> Scores:
    """Return these rows over all rounds; a test of a client's data counts only after its last round."""
    rows = counted(scores, metric)
    if not metric.startswith(HELD):
        return rows
    asked = scores.where(scores.named(HELD) & ~np.isnan(scores.value))
    series, own = np.unique((asked.attack << 21) + asked.client, return_inverse=True)
    last = np.zeros(len(series), np.int64)
    np.maximum.at(last, own, asked.round)
    kept = asked.attempt_keys()[asked.round == last[own]]
    return rows.where(np.isnan(rows.value) | np.isin(rows.attempt_keys(), kept))


def _groups(scores: Scores, keys: Sequence[Ints]) -> Iterator[Scores]:
    """Yield the rows of each distinct tuple of keys; the last key sorts first."""
    order = np.lexsort(keys)
    changes = np.any([np.diff(k[order]) != 0 for k in keys], axis=0) if len(scores) else np.array([], bool)
    for rows in np.split(order, np.flatnonzero(changes) + 1):
        if len(rows):
            yield scores.where(rows)


def _leak(part: Scores, metric: str, round: int | None) -> Leak:
    own = part.named(metric)
    averaged = capped(metric, part.value)
    graded = own & np.isfinite(averaged)
    lost, failed = part.where(~graded), Counter[str]()
    for status, count in zip(lost.status.tolist(), lost.counts(metric).tolist(), strict=True):
        failed[part.statuses[status]] += count
    ungraded = failed.pop(UNGRADED, 0)
    clusters, values, raw = part.client[graded], averaged[graded], part.value[graded]
    low, high = clustered_interval(values, clusters, whole=MEASURED[metric].whole) or (None, None)
    some = len(values) > 0
    if some and MEASURED[metric].rate:
        low, high = Rate(int(np.rint(values.sum())), len(values)).interval
    attack = part.attacks[part.attack[0]]
    return Leak(
        attack=attack,
        role=part.role(attack),
        round=round,
        metric=metric,
        n=len(values),
        failed=dict(sorted(failed.items())),
        mean=float(values.mean()) if some else None,
        median=float(np.median(raw)) if some else None,
        best=MEASURED[metric].leakiest(raw.tolist(), float),
        low=low,
        high=high,
        clusters=len(np.unique(clusters)),
        ungraded=ungraded,
    )
