"""The clients' view: who leaks most, and in which round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views.figures import HeatMap
from fedgauge.server.views.formatting import in_metric, many
from fedgauge.server.views.intervals import Floats, evenly
from fedgauge.server.views.leak_tables import IDENTIFIED, LABELS
from fedgauge.server.views.leakage import counted, counted_of_all
from fedgauge.server.views.reading import Reading, viewed
from fedgauge.server.views.roles import is_attack, is_baseline
from fedgauge.server.views.scores import Scores, capped
from fedgauge.server.views.tables import Cell, Column, Table
from fedgauge.server.views.verdict import restored_labels

MOST_CELLS, MOST_ROUNDS = 50_000, 500  # of a heat map
STATUSES = ("accepted", "rejected", "missing")


@dataclass(frozen=True, eq=False)
class Clients:
    """The worst case of every client in every round, and of every client over all rounds.

    Args:
        metric, attack: what is shown; no attack: the worst over all.
        metrics: name and label of each that there is.
    """

    metric: str
    attack: str
    attacks: Sequence[str]
    metrics: Sequence[tuple[str, str]]
    figure: HeatMap | None
    table: Table


def clients(reading: Reading, metric: str, attack: str | None) -> Clients:
    """The clients by one metric.

    Args:
        attack: None for the worst over all attacks.
    """
    attacks = [a for a in reading.order if is_attack(a)]
    metrics = [(name, MEASURED[name].label) for name in reading.metrics]
    figure, table = heat_map(reading, metric, attack), clients_table(reading, metric, attack)
    return Clients(metric, attack or "", attacks, metrics, figure, table)


def heat_map(reading: Reading, metric: str, attack: str | None = None) -> HeatMap | None:
    """The worst leak of each client in each round, MOST_CELLS at most: who leaks most is shown; None before the first score."""
    rows, by = _graded(counted(reading.scores, metric), metric, attack), MEASURED[metric]
    every = np.unique(rows.round)
    table = clients_table(reading, metric, attack).records
    if not len(every) or not table:  # somebody else's ledger may have scores of clients that it never saw
        return None
    ids, rounds = [int(str(row["client"])) for row in table], evenly(every, MOST_ROUNDS)
    shown = sorted(ids[: MOST_CELLS // len(rounds)])
    worst = rows.where(np.isin(rows.client, shown) & np.isin(rows.round, rounds)).leakiest(metric, of_batch=True)
    values = capped(metric, worst.value)
    cells = np.full((len(shown), len(rounds)), None, object)
    cells[np.searchsorted(shown, worst.client), np.searchsorted(rounds, worst.round)] = values
    floor, name = _floor(reading, metric, ids) or (0.0 if by.higher_is_better else max(values, default=0.0), "nothing")
    step = max(1e-9, abs(by.ceiling) * 1e-6)  # a scale has a length
    darkest = min(floor, by.ceiling - step) if by.higher_is_better else max(floor, by.ceiling + step)
    words = [f"Client {table[0]['client']} leaks most, in round {table[0]['round']}."] if table[0]["round"] else []
    guess = f"{in_metric(metric, floor)}, what the best guess that does not read the update ({name}) reaches on average"
    bright = f"{in_metric(metric, by.ceiling)}{'' if by.cap is None else ' or more'}"
    words.append(f"Darkest is {guess}; brightest {bright}. A cross: nothing was graded there.")
    less, between = len(table) - len(shown), len(every) - len(rounds)
    if less or between:
        words.append(
            f"Left out: {many(less, 'client')} that leak less, and {many(between, 'round')} between those shown."
        )
    title = "Worst leak by client and round"
    return HeatMap("clients", title, " ".join(words), by, shown, rounds.tolist(), cells.tolist(), darkest, by.ceiling)


def _floor(reading: Reading, metric: str, ids: list[int]) -> tuple[float, str] | None:
    """The baseline that leaks most by luck: its worst case in a round of a client, on average; None if none is graded."""
    if metric == "label_accuracy":
        labels = restored_labels(reading)
        return (labels.guess, "how common the classes are") if labels else None
    found: list[tuple[float, str]] = []
    for name in filter(is_baseline, reading.order):
        rows = _graded(counted(reading.scores, metric), metric, name)
        worst = rows.where(np.isin(rows.client, ids)).leakiest(metric, of_batch=True)
        if len(worst):
            found.append((float(capped(metric, worst.value).mean()), name))
    return MEASURED[metric].leakiest(sorted(found), lambda each: each[0])


def _graded(rows: Scores, metric: str, attack: str | None) -> Scores:
    rows = rows.where(rows.by_attacks) if attack is None else rows.of_attack(attack)
    return rows.where(rows.named(metric) & ~np.isnan(rows.value))


@viewed
def clients_table(reading: Reading, metric: str, attack: str | None) -> Table:
    """A row for each client, the worst first."""
    by = MEASURED[metric]
    columns = [
        Column("client", "client", "count"),
        Column.of(by, "worst", "worst case"),
        Column.of(by, "mean", "mean"),
        Column("round", "worst in round", "count"),
        IDENTIFIED,
        LABELS,
        Column("n", "examples", "count"),
        *(Column(status, status, "count") for status in STATUSES),
    ]
    hits, labels = (reading.scores.of_metric(name) for name in ("identified", "label_accuracy"))
    parts = [(metric, counted_of_all(reading.scores, metric)), ("identified", hits), ("label_accuracy", labels)]
    graded = [(name, _graded(rows, name, attack)) for name, rows in parts]
    if attack is None:  # per example the value that leaks most
        graded = [(name, rows.leakiest(name)) for name, rows in graded]
    (_, rows), sign = graded[0], by.sign
    order = np.argsort(-sign * rows.value, kind="stable")[::-1]  # of equal ones the first comes last, and is taken
    leaks = zip(rows.value[order].tolist(), rows.round[order].tolist(), strict=True)
    worst = dict(zip(rows.client[order].tolist(), leaks, strict=True))
    means, identified, restored = (_sums(rows, capped(name, rows.value)) for name, rows in graded)
    lines: list[list[Cell]] = []
    for client in sorted({client for client, _ in reading.participation}):
        (n, total), (of, right), (batches, told) = (
            each.get(client, (0, 0.0)) for each in (means, identified, restored)
        )
        (most, round), mean = worst.get(client, (None, None)), total / n if n else None
        other = (int(right), of) if of else None, told / batches if batches else None
        lines.append(
            [client, most, mean, round, *other, n, *(reading.participation[client, status] for status in STATUSES)]
        )
    lines.sort(key=lambda row: -sign * worst.get(row[0], (-sign * np.inf,))[0])
    return Table(f"Clients, {by.label}", columns, lines)


def _sums(rows: Scores, values: Floats) -> dict[int, tuple[int, float]]:
    """By client how many values there are, and their sum."""
    ids, own, n = np.unique(rows.client, return_inverse=True, return_counts=True)
    return dict(zip(ids.tolist(), zip(n.tolist(), np.bincount(own, values).tolist(), strict=True), strict=True))
