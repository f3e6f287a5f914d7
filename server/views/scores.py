"""All scores of a run as columns, in an order independent of the workers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgauge.attacks.base import LIMITS, Role
from fedgauge.attacks.modality.base import MainMetric, Modality
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.membership import MEMBERSHIP
from fedgauge.attacks.modality.registry import MEASURED, further_leaks
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.client.label_kinds import SCORED, LabelKind
from fedgauge.server.store.ledger_types import UNGRADED, ScoreRow
from fedgauge.server.views.intervals import Floats, Ints

LARGEST = 1e100  # of a value, so that sums of squares are finite
Mask = NDArray[np.bool_]
SizeOf = Callable[[int, int], int]  # (round, client) -> how many examples the update is of
NAMES = ("attack", "metric", "status")
NUMBERS = ("round", "client", "example", "value")
ROW = [("round", int), ("client", int), ("attack", object), ("example", int), ("metric", object), ("status", object),
       ("value", float)]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Scores:
    """All score rows of a ledger as columns of length N; a missing value, or one beyond LARGEST, is NaN; shares are in [0, 1].

    Args:
        attack, metric, status: indices into attacks, metrics and statuses, which are sorted.
        modality: the kind of the run's data.
        size_of: number of examples of an update, which are all lost with a failed batch.
        unordered: if `example` is the place in the reconstruction, as clients grade, not in the batch.
        given_labels: attacks that are given the labels; `of_metric` leaves their labels out.
        roles: of the planned attacks, in their order.
        label_kind: kind of the labels.
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
    given_labels: frozenset[str] = frozenset()
    roles: Mapping[str, Role] = field(default_factory=dict)
    label_kind: type[LabelKind] = LabelKind

    @classmethod
    def of(cls, rows: Iterable[ScoreRow], **settings: Any) -> "Scores":
        """Sort rows by round, client, attack, example and metric; settings: the other fields."""
        table = np.fromiter(rows, ROW)
        columns: dict[str, Any] = {name: table[name] for name in NUMBERS}
        names = {name: tuple(sorted(set(table[name]))) for name in NAMES}
        for name in NAMES:
            code = {each: i for i, each in enumerate(names[name])}
            columns[name] = np.array([code[each] for each in table[name]], np.int64)
        known = [MEASURED.get(name) for name in names["metric"]]
        # infinity stays where the metric caps it
        capped = np.array([by is not None and by.cap is not None for by in known], dtype=bool)
        values, exact = columns["value"], capped[columns["metric"]] & (columns["value"] == np.inf)
        values = np.where((np.abs(values) > LARGEST) & ~exact, np.nan, values)
        # a foreign ledger has any value
        most = [np.inf if by is None else by.whole or (1.0 if by.rate else np.inf) for by in known]
        ends = np.array([(-np.inf if end == np.inf else 0.0, end) for end in most]).reshape(-1, 2)[columns["metric"]]
        columns["value"] = np.clip(values, ends[:, 0], ends[:, 1])
        order = np.lexsort([columns[name] for name in ("metric", "example", "attack", "client", "round")])
        columns |= {"attacks": names["attack"], "metrics": names["metric"], "statuses": names["status"]}
        return cls(**columns, **settings).where(order)

    def __len__(self) -> int:
        return len(self.value)

    def where(self, chosen: Mask | Ints) -> "Scores":
        return replace(self, **{name: getattr(self, name)[chosen] for name in (*NUMBERS, *NAMES)})

    def named(self, metric: str) -> Mask:
        return np.isin(self.metric, _code(self.metrics, metric))

    def of_metric(self, metric: str) -> "Scores":
        """Return the rows of a metric, and one row for each attempt without any value, which failed under every metric.

        A limit is only of its own metric. An attack that is given the labels has no label accuracy.
        """
        own = self.named(metric)
        left_out = self.by_limits & ~own
        if metric in SCORED:
            left_out |= np.isin(self.attack, [i for i, name in enumerate(self.attacks) if name in self.given_labels])
        if left_out.any():
            return self.where(~left_out).of_metric(metric)
        # attacks on examples do not fail at membership, nor membership tests at examples, nor either at another leak
        leaks = further_leaks()
        subject = {name: name if name in leaks else name in MEMBERSHIP for name in (*self.metrics, metric)}
        alike = np.array([subject[name] == subject[metric] for name in self.metrics], dtype=bool)[self.metric]
        missing = np.flatnonzero(np.isnan(self.value) & alike)
        if not len(missing):
            return self.where(own)
        attempt = self.attempt_keys()
        _, first = np.unique(attempt[missing], return_index=True)
        suspects = missing[first]
        graded = np.isin(attempt, attempt[suspects]) & (own | ~np.isnan(self.value))
        lost = suspects[~np.isin(attempt[suspects], attempt[graded])]
        return self.where(np.union1d(np.flatnonzero(own), lost))

    def of_attack(self, attack: str) -> "Scores":
        return self.where(self.attack == _code(self.attacks, attack))

    def comparable(self, metric: str) -> "Scores":
        """Number examples so that attacks can be compared.

        Only the client knows the example of a value that it graded. So examples are numbered by rank: the best value of one
        attack is compared with the best of another.
        """
        if not self.unordered or not len(self):
            return self
        rows = self.where(np.lexsort((-MEASURED[metric].sign * self.value, self.attack, self.client, self.round)))
        batch = self._pack(rows.round, rows.client, rows.attack)
        first = np.append(True, np.diff(batch) != 0)
        places = np.arange(len(rows))
        return replace(rows, example=places - np.maximum.accumulate(np.where(first, places, 0)))

    def leakiest(self, metric: str) -> "Scores":
        """Return the row of each example that leaks most."""
        rows = self.comparable(metric)
        keys = rows.example_keys()
        order = np.lexsort((MEASURED[metric].sign * rows.value, keys))
        last = np.append(np.diff(keys[order]) != 0, True) if len(rows) else np.zeros(0, bool)
        return rows.where(order[last])

    def counts(self, metric: str) -> Ints:
        """Count the examples of each row, (N,): all of its batch for a batch that failed as a whole, otherwise 1."""
        counts = np.ones(len(self), np.int64)
        if not MEASURED[metric].of_batch:
            whole = (self.example == WHOLE_BATCH) & ~self.by_limits
            lost = np.flatnonzero(whole & np.isnan(self.value) & ~self.ungraded)
            counts[lost] = [
                self.size_of(*key) for key in zip(self.round[lost].tolist(), self.client[lost].tolist(), strict=True)
            ]
        return counts

    def role(self, attack: str) -> Role:
        """The role of a name in the scores; one that is not planned is a reconstruction graded against a wrong client."""
        return self.roles.get(attack, "baseline")

    @property
    def by_limits(self) -> Mask:
        return np.isin(self.attack, [i for i, a in enumerate(self.attacks) if self.role(a) in LIMITS])

    @property
    def by_attacks(self) -> Mask:
        return np.isin(self.attack, [i for i, a in enumerate(self.attacks) if self.role(a) == "attack"])

    @property
    def ungraded(self) -> Mask:
        """Mask of the rows of reconstructions without a grade, (N,)."""
        return np.isin(self.status, _code(self.statuses, UNGRADED))

    @property
    def left_ungraded(self) -> int:
        return int((self.ungraded & self.by_attacks).sum())

    @property
    def measure(self) -> MainMetric:
        """Main metric, by which attacks are compared."""
        return self.modality.main

    def batch_keys(self) -> Ints:
        return self._pack(self.round, self.client)

    def attempt_keys(self) -> Ints:
        """Key of each row by (attack, round, client), (N,)."""
        return self._pack(self.attack, self.round, self.client)

    def example_keys(self) -> Ints:
        """Key of each row by (round, client, example), (N,)."""
        return self._pack(self.round, self.client, self.example - WHOLE_BATCH)

    @staticmethod
    def _pack(*columns: Ints) -> Ints:
        """Pack columns, each below 2 ** 21, into one number, (N,)."""
        return reduce(lambda packed, column: (packed << 21) + column, columns)


def _code(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else -1


def known_metrics(scores: Scores) -> list[str]:
    """Return the known metrics with at least one value."""
    present = {scores.metrics[i] for i in np.unique(scores.metric[~np.isnan(scores.value)])}
    present -= {m for m in SCORED if m in present and np.isnan(scores.of_metric(m).value).all()}  # they were given
    return [m for m in MEASURED if m in present]


def capped(metric: str, values: Floats) -> Floats:
    """Cap the values for a mean, such as the infinite PSNR of an exact reconstruction."""
    cap = MEASURED[metric].cap if metric in MEASURED else None
    return values if cap is None else np.minimum(values, cap)
