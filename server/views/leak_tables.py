"""Tables of results: by round, over all rounds, of membership, and by client."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple

import numpy as np

from fedgauge.attacks.base import LIMITS
from fedgauge.attacks.modality.base import MainMetric, Measured
from fedgauge.attacks.modality.membership import MEMBERSHIP, QUESTIONS, RATES
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views.leakage import Leak, counted_of_all
from fedgauge.server.views.scores import capped
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.strength import best_of, error_in_db, mean_of
from fedgauge.server.views.tables import Cell, Column, Table

ATTACK, KIND = Column("attack", "attack"), Column("kind", "kind")
EXAMPLES, CLIENTS = Column("n", "examples", "count"), Column("clusters", "clients", "count")
IDENTIFIED = Column("identified", "identified", "rate")
STATUSES = ("accepted", "rejected", "missing")
LOST, UNGRADED = Column("lost", "without a value"), Column("ungraded", "not graded", "count")


def leak_columns(by: Measured, name: str = "") -> list[Column]:
    named = f" {name}" if name else ""
    return [
        Column.of(by, "mean", f"mean{named}"),
        Column.of(by, "interval", "95 % interval", "interval"),
        Column.of(by, "worst", f"best{named}"),
    ]


def leak_cells(leak: Leak | None) -> tuple[Cell, Cell, Cell]:
    """Return a Leak's mean, 95 % interval and worst case for a client."""
    return (None, None, None) if leak is None else (leak.mean, leak.interval, leak.best)


def label_column(metric: str) -> Column:
    return Column.of(MEASURED[metric], "labels", MEASURED[metric].label)


def rate_of(leak: Leak | None) -> Cell:
    """Return the count and total of a Leak with a metric of 0 or 1."""
    return None if leak is None or not leak.n else astuple(leak.rate)


def rounds_table(reading: RunSnapshot) -> Table:
    """List each attack in each round, with the best baseline of the round."""
    kind, by = reading.scores.label_kind, reading.scores.measure
    order = [name for name in reading.order if reading.scores.role(name) == "attack"]
    columns = [
        Column("round", "round", "count"),
        Column("before", f"{kind.utility} before", "number", 1, fraction=True),
        Column("accuracy", kind.utility, "number", 1, fraction=True),
        ATTACK,
        *leak_columns(by, by.name),
        Column.of(by, "baseline", f"baseline {by.name}"),
        Column("guess", "best baseline"),
        IDENTIFIED,
        label_column(kind.metric),
        EXAMPLES,
        CLIENTS,
        LOST,
        UNGRADED,
    ]
    accuracy = {number: row["accuracy"] for number, row in reading.rounds.items()}
    leaks, labels, hits = (
        {(leak.round, leak.attack): leak for leak in reading.leakage(metric) if leak.round is not None}
        for metric in (by.metric, kind.metric, "identified")
    )
    rows: list[tuple[Cell, ...]] = []
    for round in sorted({round for round, _ in leaks if round is not None}):
        floor = best_of((leak for leak in leaks.values() if leak.round == round), "baseline")
        for leak in (leaks[round, name] for name in order if (round, name) in leaks):
            at = round, leak.attack
            tested = accuracy.get(round - 1), accuracy.get(round)
            guess = (floor.mean, floor.attack) if floor else (None, None)
            row = round, *tested, leak.attack, *leak_cells(leak), *guess, rate_of(hits.get(at)), mean_of(labels.get(at))
            rows.append((*row, leak.n, leak.clusters, leak.without_value, leak.ungraded or None))
    return Table.of("Results in each round", columns, rows)


def summary_table(reading: RunSnapshot) -> Table:
    """List each attack, limit and baseline over all rounds.

    A limit has only the PSNR of its mean squared error.
    """
    by: MainMetric = reading.scores.measure
    labels = reading.scores.label_kind.metric
    others = [m for m in reading.metrics if m not in (by.metric, "identified", labels, *MEMBERSHIP)]
    columns = [
        ATTACK,
        KIND,
        EXAMPLES,
        CLIENTS,
        *leak_columns(by, by.name),
        Column.of(by, "median", "median"),
        Column("of_error", "PSNR of the mean error (dB)", "number", 1),
        IDENTIFIED,
        label_column(labels),
        *(Column(m, f"{MEASURED[m].label}, mean", "number", MEASURED[m].digits, MEASURED[m].fraction) for m in others),
        LOST,
        UNGRADED,
    ]
    return Table.of("All rounds together", columns, _summary_rows(reading, by, others))


def _summary_rows(reading: RunSnapshot, by: MainMetric, others: list[str]) -> Iterable[tuple[Cell, ...]]:
    pooled = {metric: reading.pooled(metric) for metric in reading.metrics}
    headlines = {row["name"]: row["metric"] for row in reading.attacks}
    for attack in reading.order:
        leaks = {m: by_attack[attack] for m, by_attack in pooled.items() if attack in by_attack}
        headline = headlines.get(attack) or by.metric
        counted = None if headline in MEMBERSHIP else leaks.get(headline)
        if counted is None or (counted.role == "baseline" and not counted.n):
            continue  # a membership test, or a baseline of an attack without results
        limits = counted.role in LIMITS
        hits, shown = leaks.get("identified"), counted if headline == by.metric else None
        yield (
            attack,
            counted.role,
            *((None, None) if limits else (counted.n, counted.clusters)),
            *leak_cells(shown),
            None if shown is None else shown.median,
            error_in_db(leaks.get("mse")),
            rate_of(hits),
            mean_of(leaks.get(reading.scores.label_kind.metric)),
            *(mean_of(leaks.get(metric)) for metric in others),
            counted.without_value,
            counted.ungraded or None,
        )


def membership_table(reading: RunSnapshot) -> Table:
    """List each membership test, baseline and limit over all rounds."""
    columns = [
        Column("question", "question"),
        Column("test", "test"),
        KIND,
        Column("n", "members", "count"),
        Column("mean", "pairs in which the member scores higher", "number", 1, fraction=True),
        Column("interval", "95 % interval", "interval", 1, fraction=True),
        *(
            Column(f"detected{ending}", f"detected at {100 * rate:g} % false positives", "rate")
            for ending, rate in RATES.items()
        ),
    ]
    rows: list[tuple[Cell, ...]] = []
    for metric, (question, _) in QUESTIONS.items():
        leaks, at_rates = reading.pooled(metric), [reading.pooled(metric + ending) for ending in RATES]
        for name in (name for name in reading.order if name in leaks and leaks[name].n):
            leak = leaks[name]
            limit = leak.role in LIMITS
            # a limit has no count of members
            rates = [None if limit else rate_of(at.get(name)) for at in at_rates]
            interval = None if limit else leak.interval
            rows.append((question, name, leak.role, leak.n, leak.mean, interval, *rates))
    return Table.of("Tests of membership", columns, rows)


def clients(reading: RunSnapshot) -> Table:
    """List the worst case of every client under any attack, the worst first."""
    by, metric = reading.scores.measure, reading.scores.measure.metric
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
    participation = Counter((o["client"], o["status"]) for o in reading.observations)
    for client in sorted({client for client, _ in participation}):
        own, statuses = rows.where(rows.client == client), (participation[client, s] for s in STATUSES)
        if not len(own):
            lines.append((np.inf, [client, None, None, None, 0, *statuses]))
            continue
        at = int(np.argmax(by.sign * own.value))
        worst, mean = float(own.value[at]), float(capped(metric, own.value).mean())
        lines.append((-by.sign * worst, [client, worst, mean, int(own.round[at]), len(own), *statuses]))
    return Table(f"Clients, {by.label}", columns, [line for _, line in sorted(lines, key=lambda each: each[0])])
