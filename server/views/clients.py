"""The clients' view: the worst leak of each client over all rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views.leakage import counted_of_all
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.scores import capped
from fedgauge.server.views.tables import Cell, Column, Table

STATUSES = ("accepted", "rejected", "missing")


@dataclass(frozen=True, eq=False)
class Clients:
    """Worst case of every client under any attack; metrics: names with labels."""

    metric: str
    metrics: Sequence[tuple[str, str]]
    table: Table


def clients(reading: Reading, metric: str) -> Clients:
    """Return the clients by one metric, the worst first."""
    by = MEASURED[metric]
    columns = [
        Column("client", "client", "count"),
        Column.of(by, "worst", "worst case"),
        Column.of(by, "mean", "mean"),
        Column("round", "worst in round", "count"),
        Column("n", "examples", "count"),
        *(Column(status, status, "count") for status in STATUSES),
    ]
    rows = counted_of_all(reading.scores, metric)
    rows = rows.where(rows.by_attacks & rows.named(metric) & ~np.isnan(rows.value)).leakiest(metric)
    lines: list[tuple[float, list[Cell]]] = []
    for client in sorted({client for client, _ in reading.participation}):
        own, statuses = rows.where(rows.client == client), (reading.participation[client, s] for s in STATUSES)
        if not len(own):
            lines.append((np.inf, [client, None, None, None, 0, *statuses]))
            continue
        at = int(np.argmax(by.sign * own.value))
        worst, mean = float(own.value[at]), float(capped(metric, own.value).mean())
        lines.append((-by.sign * worst, [client, worst, mean, int(own.round[at]), len(own), *statuses]))
    table = Table(f"Clients, {by.label}", columns, [line for _, line in sorted(lines, key=lambda each: each[0])])
    return Clients(metric, [(name, MEASURED[name].label) for name in reading.metrics], table)
