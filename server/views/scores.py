"""All scores of a run as columns, in an order that does not depend on which worker wrote first."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgauge.attacks.modality.base import MainMetric, Modality
from fedgauge.attacks.modality.image_metrics import mse
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.membership import MEMBERSHIP
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.attacks.plan import ERROR_LIMITS
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.server.store.ledger_types import UNGRADED, ScoreRow
from fedgauge.server.views.intervals import Floats, Ints
from fedgauge.server.views.roles import is_attack, is_limit

LABELS = "label_accuracy"
LARGEST = 1e100  # of a value: sums of squares of larger ones may be no numbers
Mask = NDArray[np.bool_]
SizeOf = Callable[[int, int], int]  # (round, client) -> how many examples the update is of
NAMES = ("attack", "metric", "status")
NUMBERS = ("round", "client", "example", "value")
ROW = [("round", int), ("client", int), ("attack", object), ("example", int), ("metric", object), ("status", object),
       ("value", float)]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Scores:
    """All score rows of a ledger as columns of length N; a value is NaN where there was nothing to grade.

    So is one that no view could compute with: beyond LARGEST, and no exact hit. A ledger from elsewhere may hold any number.

    Args:
        attack, metric, status: indices into attacks, metrics and statuses, which are in alphabetical order.
        modality: the kind of the run's data.
        size_of: how many examples an update is of: so many are lost with a batch that came to nothing as a whole.
        unordered: whether `example` is the place in the reconstruction, as clients grade, and not in the batch.
        told_labels: the attacks to which the threat model gives the labels, which are then no leak: `of_metric` leaves them out.
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
    modality: type[Modality] = ImageModality
    size_of: SizeOf = lambda round, client: 1
    unordered: bool = False
    told_labels: frozenset[str] = frozenset()

    @classmethod
    def empty(cls) -> "Scores":
        """No rows."""
        ints = np.zeros(0, np.int64)
        return cls(ints, ints, ints, ints, ints, np.zeros(0), ints, (), (), ())

    def extended(self, rows: Iterable[ScoreRow]) -> "Scores":
        """These rows and further ones, sorted by round, client, attack, example and metric.

        Equal rows give equal columns, in whatever order they came.
        """
        fresh = np.fromiter(rows, ROW)
        columns: dict[str, Any] = {name: np.concatenate([getattr(self, name), fresh[name]]) for name in NUMBERS}
        known = {"attack": self.attacks, "metric": self.metrics, "status": self.statuses}
        names = {name: tuple(sorted({*known[name], *fresh[name]})) for name in NAMES}
        for name in NAMES:
            code = {each: i for i, each in enumerate(names[name])}
            renumbered = np.array([code[each] for each in known[name]], np.int64)[getattr(self, name)]
            columns[name] = np.concatenate([renumbered, np.array([code[each] for each in fresh[name]], np.int64)])
        columns["value"] = _usable(columns["value"], columns["metric"], names["metric"])
        order = np.lexsort([columns[name] for name in ("metric", "example", "attack", "client", "round")])
        columns |= {"attacks": names["attack"], "metrics": names["metric"], "statuses": names["status"]}
        return replace(self, **columns).where(order)._without_answered()

    def _without_answered(self) -> "Scores":
        """Without the rows that stood for a reconstruction until somebody graded it."""
        waiting = self.ungraded & (self.example == WHOLE_BATCH)
        if not waiting.any():
            return self
        attempt = self.attempt_keys()
        answered = waiting & np.isin(attempt, attempt[~waiting])
        return self.where(~answered) if answered.any() else self

    def __len__(self) -> int:
        return len(self.value)

    def where(self, chosen: Mask | Ints) -> "Scores":
        """The chosen rows."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in (*NUMBERS, *NAMES)})

    def named(self, metric: str) -> Mask:
        """(N,) whether a row is of a metric."""
        return np.isin(self.metric, _code(self.metrics, metric))

    def of_metric(self, metric: str) -> "Scores":
        """The rows of a metric, and one row for each observation of which an attack gave nothing that any metric could grade.

        A limit on the error is of the mean squared error alone, since a mean of PSNRs lies above the PSNR of the mean error. Of
        labels, an attack that is given them has none.

        A wave whose worker died leaves one row of the main metric, and an attack that restores no example may restore no label
        either: under every metric that counts as a failed attempt.
        """
        without = {*(ERROR_LIMITS if metric != mse.name else ()), *(self.told_labels if metric == LABELS else ())}
        left_out = np.isin(self.attack, [i for i, name in enumerate(self.attacks) if name in without])
        if left_out.any():
            return self.where(~left_out).of_metric(metric)
        own = self.named(metric)
        # an attack on examples does not fail at membership, nor the other way round
        of_members = np.array([name in MEMBERSHIP for name in self.metrics], dtype=bool)[self.metric]
        missing = np.flatnonzero(np.isnan(self.value) & (of_members == (metric in MEMBERSHIP)))
        if not len(missing):
            return self.where(own)
        attempt = self.attempt_keys()
        _, first = np.unique(attempt[missing], return_index=True)
        suspects = missing[first]
        graded = np.isin(attempt, attempt[suspects]) & (own | ~np.isnan(self.value))
        lost = suspects[~np.isin(attempt[suspects], attempt[graded])]
        return self.where(np.union1d(np.flatnonzero(own), lost))

    def of_attack(self, attack: str) -> "Scores":
        """The rows of an attack."""
        return self.where(self.attack == _code(self.attacks, attack))

    def comparable(self, metric: str) -> "Scores":
        """Rows of one metric, all with a value, whose `example` is the same one under every attack.

        Nobody but the client knows which example a value is of that it graded. So the best of one attack is compared with the best
        of another, the second with the second: no more is told apart than is known.
        """
        if not self.unordered or not len(self):
            return self
        rows = self.where(np.lexsort((-MEASURED[metric].sign * self.value, self.attack, self.client, self.round)))
        batch = self._pack(rows.round, rows.client, rows.attack)
        first = np.append(True, np.diff(batch) != 0)
        places = np.arange(len(rows))
        return replace(rows, example=places - np.maximum.accumulate(np.where(first, places, 0)))

    def leakiest(self, metric: str, of_batch: bool = False) -> "Scores":
        """Of rows of one metric, for each example the one that leaks most; of_batch: for each (round, client)."""
        rows = self if of_batch else self.comparable(metric)
        keys = rows.batch_keys() if of_batch else rows.example_keys()
        order = np.lexsort((MEASURED[metric].sign * rows.value, keys))
        last = np.append(np.diff(keys[order]) != 0, True) if len(rows) else np.zeros(0, bool)
        return rows.where(order[last])

    def counts(self, metric: str) -> Ints:
        """(N,) how many examples each of these rows of a metric counts as: a batch that was lost as a whole, all of its own.

        What nobody graded counts as one reconstruction, and a limit is one number a batch, lost or not.
        """
        counts = np.ones(len(self), np.int64)
        if not MEASURED[metric].of_batch:
            whole = (self.example == WHOLE_BATCH) & ~self.by_limits
            lost = np.flatnonzero(whole & np.isnan(self.value) & ~self.ungraded)
            counts[lost] = [
                self.size_of(*key) for key in zip(self.round[lost].tolist(), self.client[lost].tolist(), strict=True)
            ]
        return counts

    @property
    def by_limits(self) -> Mask:
        """(N,) whether a row is of a limit."""
        return np.isin(self.attack, [i for i, a in enumerate(self.attacks) if is_limit(a)])

    @property
    def by_attacks(self) -> Mask:
        """(N,) whether a row is of an attack, not of a baseline or limit."""
        return np.isin(self.attack, [i for i, a in enumerate(self.attacks) if is_attack(a)])

    @property
    def ungraded(self) -> Mask:
        """(N,) whether a row stands for a reconstruction that a deployment's client did not grade."""
        return np.isin(self.status, _code(self.statuses, UNGRADED))

    @property
    def left_ungraded(self) -> int:
        """How many reconstructions by attacks a deployment's clients did not grade."""
        return int((self.ungraded & self.by_attacks).sum())

    @property
    def measure(self) -> MainMetric:
        """The metric by which the run's attacks are compared."""
        return self.modality.main

    def batch_keys(self) -> Ints:
        """(N,) one number for each (round, client)."""
        return self._pack(self.round, self.client)

    def attempt_keys(self) -> Ints:
        """(N,) one number for each (attack, round, client)."""
        return self._pack(self.attack, self.round, self.client)

    def series_keys(self) -> Ints:
        """(N,) one number for each (attack, client)."""
        return self._pack(self.attack, self.client)

    def example_keys(self) -> Ints:
        """(N,) one number for each (round, client, example)."""
        return self._pack(self.round, self.client, self.example - WHOLE_BATCH)

    @staticmethod
    def _pack(*columns: Ints) -> Ints:
        """(N,) one number for each distinct tuple of columns, each of which is below 2 ** 21."""
        return reduce(lambda packed, column: (packed << 21) + column, columns)


def _code(names: tuple[str, ...], name: str) -> int:
    """The index of a name; -1 if it is not there."""
    return names.index(name) if name in names else -1


def _usable(values: Floats, metric: Ints, names: tuple[str, ...]) -> Floats:
    """The values, NaN for what is beyond LARGEST; an infinite one stays where the metric's mean caps it."""
    far = np.abs(values) > LARGEST
    capped = np.array([name in MEASURED and MEASURED[name].cap is not None for name in names], dtype=bool)[metric]
    return np.where(far & ~(capped & (values == np.inf)), np.nan, values)


def known_metrics(scores: Scores) -> list[str]:
    """The metrics with at least one value, of those that this version of fedgauge knows."""
    present = {scores.metrics[i] for i in np.unique(scores.metric[~np.isnan(scores.value)])}
    if LABELS in present and np.isnan(scores.of_metric(LABELS).value).all():
        present.remove(LABELS)  # every attack was given them
    return [m for m in MEASURED if m in present]


def capped(metric: str, values: Floats) -> Floats:
    """The values that enter a mean: the infinite PSNR of an exact hit is capped."""
    cap = MEASURED[metric].cap if metric in MEASURED else None
    return values if cap is None else np.minimum(values, cap)
