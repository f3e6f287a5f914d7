"""Comparison of runs: leakage, accuracy, and differences between the scenarios."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.client.label_kinds import LabelKind
from fedgauge.server.views.figures import (
    WHOLE,
    Axis,
    Figure,
    Look,
    Series,
    interval_name,
    look_at,
    point_label,
    value_axis,
)
from fedgauge.server.views.formatting import number, percent
from fedgauge.server.views.leak_tables import ATTACK, IDENTIFIED, label_column, leak_cells, leak_columns, rate_of
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.privacy import spent_in
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.strength import best_of, final_accuracy, mean_of
from fedgauge.server.views.tables import Cell, Column, Table

RUN = Column("run", "run")
ACCURACY = Column("accuracy", "test accuracy", "number", 1, fraction=True)


class Comparison:
    """Leakage of several runs under every attack over all rounds, with their accuracy.

    `points` has a row for each run and attack, `differences` one for each setting that differs.
    """

    def __init__(self, readings: Sequence[RunSnapshot], metric: str | None = None) -> None:
        named = named_readings(readings)
        self.metric = metric or next((r.scores.measure.metric for r in readings), ImageModality.main.metric)
        known = [name for name in MEASURED if any(name in reading.metrics for reading in readings)]
        self.metrics = [(name, MEASURED[name].label) for name in known]
        self.runs = list(named)
        self.points = points(named, self.metric)
        self.differences = differences({name: r.tables for name, r in named.items()})
        self.utility = utility_figure(named, self.metric)


def named_readings(readings: Sequence[RunSnapshot]) -> dict[str, RunSnapshot]:
    """Name the runs, with a number where runs of different folders share a name."""
    named: dict[str, RunSnapshot] = {}
    for reading in readings:
        numbered = (f"{reading.run.name}-{i}" if i > 1 else reading.run.name for i in count(1))
        named[next(name for name in numbered if name not in named)] = reading
    return named


def points(named: Mapping[str, RunSnapshot], metric: str) -> Table:
    """List every attack on every run with the best baseline, accuracy and epsilon."""
    by, restored = MEASURED[metric], next((r.scores.label_kind for r in named.values()), LabelKind).metric
    columns = [RUN, ATTACK, ACCURACY, *leak_columns(by), Column.of(by, "floor", "best baseline"), IDENTIFIED]
    columns += [
        label_column(restored),
        Column("n", "examples", "count"),
        Column("epsilon", "epsilon", "number", less=True),
    ]
    rows: list[tuple[Cell, ...]] = []
    for name, reading in named.items():
        if metric not in reading.metrics:  # such as a run with other private data
            continue
        pooled, hits, labels = (reading.pooled(m) for m in (metric, "identified", restored))
        floor, epsilon = mean_of(best_of(pooled.values(), "baseline")), spent_in(reading).record
        for leak in (pooled[a] for a in reading.order if a in pooled and pooled[a].role == "attack"):
            others = floor, rate_of(hits.get(leak.attack)), mean_of(labels.get(leak.attack)), leak.n, epsilon
            rows.append((name, leak.attack, final_accuracy(reading.rounds), *leak_cells(leak), *others))
    return Table.of(f"Every attack on every run, {by.label}", columns, rows)


def differences(scenarios: Mapping[str, Mapping[str, Any]]) -> Table:
    """List the settings that differ between scenarios."""
    flat = [dict(_flat(tables)) for tables in scenarios.values()]
    rows: list[list[Cell]] = [
        [key, *(str(of[key]) if key in of else None for of in flat)]
        for key in dict.fromkeys(k for of in flat for k in of)
    ]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    columns = [Column("setting", "setting"), *(Column(name, name) for name in scenarios)]
    return Table(f"Settings that differ; {len(rows) - len(differing)} others agree", columns, differing)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and value and all(isinstance(inner, Mapping) for inner in value):
        value = {str(i): inner for i, inner in enumerate(value)}
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))


def utility_figure(named: Mapping[str, RunSnapshot], metric: str) -> Figure | None:
    """Draw the strongest attack of each run against the run's final accuracy; None if no run has both."""
    points, guesses, leaks = list[Series](), list[Series](), list[Leak]()
    for place, (name, reading) in enumerate(named.items()):
        pooled, accuracy = reading.pooled(metric).values(), final_accuracy(reading.rounds)
        leak, floor = best_of(pooled, "attack"), best_of(pooled, "baseline")
        if accuracy is None or leak is None:
            continue
        (low, high), epsilon = leak.interval or (None, None), number(spent_in(reading).record, None)
        note = f"{name}, {leak.attack}\n{point_label(leak)}\ntest accuracy {percent(accuracy)}\nepsilon {epsilon} for one record"
        look, label = look_at(place), str(place + 1)
        points.append(
            Series(f"{label}  {name}", "run", look, [accuracy], [leak.mean], [low], [high], note=[note], label=label)
        )
        leaks.append(leak)
        if floor is not None:
            guesses.append(Series("" if guesses else "best baseline", "baseline", FLOOR, [accuracy], [floor.mean]))
    if not points:
        return None
    tested, y = [point.x[0] for point in points], value_axis(metric, [*points, *guesses])
    if not MEASURED[metric].higher_is_better:
        y = replace(y, low=y.high, high=y.low)
    margin = max(0.1 * (max(tested) - min(tested)), 0.02)
    ends = max(WHOLE[0], min(tested) - margin), min(WHOLE[1], max(tested) + margin)
    x, words = (
        Axis("test accuracy at the end", "fraction", *ends),
        "The bottom right is best: accurate, with little leakage.",
    )
    title, interval = "Leakage of the strongest attack against test accuracy", interval_name(metric, leaks)
    return Figure(f"utility-{metric}", title, words, x, y, [*points, *guesses], metric=metric, interval=interval)


FLOOR = Look("muted", symbol="line-ew")
