"""The clients' view: leakage by client and round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views.figures import HeatMap
from fedgauge.server.views.formatting import in_metric, many
from fedgauge.server.views.intervals import evenly
from fedgauge.server.views.leakage import counted, counted_of_all
from fedgauge.server.views.reading import Reading, viewed
from fedgauge.server.views.scores import Scores, capped
from fedgauge.server.views.strength import best_of
from fedgauge.server.views.tables import Cell, Column, Table

MOST_CLIENTS, MOST_ROUNDS = 100, 500  # of a heat map
STATUSES = ("accepted", "rejected", "missing")


@dataclass(frozen=True, eq=False)
class Clients:
    """Worst case of every client under any attack, by round and over all rounds; metrics: names with labels."""

    metric: str
    metrics: Sequence[tuple[str, str]]
    figure: HeatMap | None
    table: Table


def clients(reading: Reading, metric: str) -> Clients:
    """Return the clients by one metric."""
    metrics = [(name, MEASURED[name].label) for name in reading.metrics]
    return Clients(metric, metrics, heat_map(reading, metric), clients_table(reading, metric))


def heat_map(reading: Reading, metric: str) -> HeatMap | None:
    """Return the worst leak by client and round, of the clients that leak most; None before the first score."""
    rows, by = _graded(counted(reading.scores, metric), metric), MEASURED[metric]
    every = np.unique(rows.round)
    table = clients_table(reading, metric).records
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


def _graded(rows: Scores, metric: str) -> Scores:
    return rows.where(rows.by_attacks & rows.named(metric) & ~np.isnan(rows.value))


@viewed
def clients_table(reading: Reading, metric: str) -> Table:
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
    rows = _graded(counted_of_all(reading.scores, metric), metric).leakiest(metric)
    lines: list[tuple[float, list[Cell]]] = []
    for client in sorted({client for client, _ in reading.participation}):
        own, statuses = rows.where(rows.client == client), (reading.participation[client, s] for s in STATUSES)
        if not len(own):
            lines.append((np.inf, [client, None, None, None, 0, *statuses]))
            continue
        at = int(np.argmax(by.sign * own.value))
        worst, mean = float(own.value[at]), float(capped(metric, own.value).mean())
        lines.append((-by.sign * worst, [client, worst, mean, int(own.round[at]), len(own), *statuses]))
    return Table(f"Clients, {by.label}", columns, [line for _, line in sorted(lines, key=lambda each: each[0])])
