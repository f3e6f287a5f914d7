"""The clients' view: leakage by client and round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views.figures import HeatMap
from fedgauge.server.views.formatting import in_metric, many
from fedgauge.server.views.intervals import Floats, evenly
from fedgauge.server.views.leakage import counted, counted_of_all
from fedgauge.server.views.reading import Reading, viewed
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.scores import Scores, capped
from fedgauge.server.views.strength import best_of
from fedgauge.server.views.tables import Cell, Column, Table

MOST_CLIENTS, MOST_ROUNDS = 100, 500  # of a heat map
STATUSES = ("accepted", "rejected", "missing")


@dataclass(frozen=True, eq=False)
class Clients:
    """Worst case of every client, by round and over all rounds.

    Args:
        attack: empty: the worst of all attacks.
        metrics: name and label of each metric of the run.
    """

    metric: str
    attack: str
    attacks: Sequence[str]
    metrics: Sequence[tuple[str, str]]
    figure: HeatMap | None
    table: Table


def clients(reading: Reading, metric: str, attack: str | None) -> Clients:
    """Return the clients by one metric, for one attack or the worst of all (None)."""
    attacks = [a for a in reading.order if is_attack(a)]
    metrics = [(name, MEASURED[name].label) for name in reading.metrics]
    figure, table = heat_map(reading, metric, attack), clients_table(reading, metric, attack)
    return Clients(metric, attack or "", attacks, metrics, figure, table)


def heat_map(reading: Reading, metric: str, attack: str | None = None) -> HeatMap | None:
    """Return the worst leak by client and round, of the clients that leak most; None before the first score."""
    rows, by = _graded(counted(reading.scores, metric), metric, attack), MEASURED[metric]
    every = np.unique(rows.round)
    table = clients_table(reading, metric, attack).records
    if not len(every) or not table:
        return None
    ids, rounds = [int(str(row["client"])) for row in table], evenly(every, MOST_ROUNDS)
    shown = sorted(ids[:MOST_CLIENTS])
    worst = rows.where(np.isin(rows.client, shown) & np.isin(rows.round, rounds)).leakiest(metric, of_batch=True)
    values = capped(metric, worst.value)
    cells = np.full((len(shown), len(rounds)), None, object)
    cells[np.searchsorted(shown, worst.client), np.searchsorted(rounds, worst.round)] = values
    guess = best_of(reading.pooled(metric).values(), "baseline")
    floor = guess.mean if guess and guess.mean is not None else 0.0 if by.higher_is_better else max(values, default=0.0)
    step = max(1e-9, abs(by.ceiling) * 1e-6)  # the least length of the scale
    darkest = min(floor, by.ceiling - step) if by.higher_is_better else max(floor, by.ceiling + step)
    words = [f"Client {table[0]['client']} leaks most, in round {table[0]['round']}."] if table[0]["round"] else []
    dark = f"{in_metric(metric, floor)}{f', the mean of {guess.attack}' if guess else ''}"
    bright = f"{in_metric(metric, by.ceiling)}{'' if by.cap is None else ' or more'}"
    words.append(f"Darkest: {dark}; brightest: {bright}. A cross: nothing was graded.")
    if less := len(table) - len(shown):
        words.append(f"Left out: {many(less, 'client')} with less leakage.")
    title = "Worst leak by client and round"
    return HeatMap("clients", title, " ".join(words), by, shown, rounds.tolist(), cells.tolist(), darkest, by.ceiling)


def _graded(rows: Scores, metric: str, attack: str | None) -> Scores:
    rows = rows.where(rows.by_attacks) if attack is None else rows.of_attack(attack)
    return rows.where(rows.named(metric) & ~np.isnan(rows.value))


@viewed
def clients_table(reading: Reading, metric: str, attack: str | None) -> Table:
    """List the clients, the worst first."""
    by = MEASURED[metric]
    columns = [
        Column("client", "client", "count"),
        Column.of(by, "worst", "worst case"),
        Column.of(by, "mean", "mean"),
        Column("round", "worst in round", "count"),
        Column("n", "examples", "count"),
        *(Column(status, status, "count") for status in STATUSES),
    ]
    rows, sign = _graded(counted_of_all(reading.scores, metric), metric, attack), by.sign
    if attack is None:  # the worst value of each example
        rows = rows.leakiest(metric)
    order = np.argsort(-sign * rows.value, kind="stable")[::-1]  # the last of a client is its first worst case
    leaks = zip(rows.value[order].tolist(), rows.round[order].tolist(), strict=True)
    worst = dict(zip(rows.client[order].tolist(), leaks, strict=True))
    sums = _sums(rows, capped(metric, rows.value))
    lines: list[list[Cell]] = []
    for client in sorted({client for client, _ in reading.participation}):
        n, total = sums.get(client, (0, 0.0))
        (most, round), mean = worst.get(client, (None, None)), total / n if n else None
        lines.append([client, most, mean, round, n, *(reading.participation[client, status] for status in STATUSES)])
    lines.sort(key=lambda row: -sign * worst.get(row[0], (-sign * np.inf,))[0])
    return Table(f"Clients, {by.label}", columns, lines)


def _sums(rows: Scores, values: Floats) -> dict[int, tuple[int, float]]:
    """Return the number of values and their sum by client."""
    ids, own, n = np.unique(rows.client, return_inverse=True, return_counts=True)
    return dict(zip(ids.tolist(), zip(n.tolist(), np.bincount(own, values).tolist(), strict=True), strict=True))
