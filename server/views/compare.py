"""Comparison of runs: leakage, accuracy, and differences between the scenarios."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle
from typing import Any

from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views.figures import (
    SYMBOLS,
    WHOLE,
    Axis,
    Figure,
    Look,
    Series,
    colour,
    interval_name,
    point_label,
    value_axis,
)
from fedgauge.server.views.formatting import number, percent
from fedgauge.server.views.leak_tables import ATTACK, IDENTIFIED, LABELS, leak_cells, leak_columns, rate_of
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.privacy import spent_in
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.strength import best_of, final_accuracy, mean_of
from fedgauge.server.views.tables import Cell, Column, Table

RUN = Column("run", "run")
ACCURACY = Column("accuracy", "test accuracy", "number", 1, fraction=True)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Leakage of several runs under every attack over all rounds, with their accuracy.

    Args:
        metrics: name and label of each metric of the runs.
        points: a row for each run and attack.
        differences: a row for each setting that differs.
    """

    metric: str
    metrics: Sequence[tuple[str, str]]
    runs: Sequence[str]
    points: Table
    differences: Table
    utility: Figure | None


def compare(readings: Sequence[Reading], metric: str | None = None) -> Comparison:
    """Compare runs by a metric; default: the main one of the first run."""
    metric = metric or next((r.scores.measure.metric for r in readings), ImageModality.main.metric)
    named = named_readings(readings)
    metrics = [m for m in MEASURED if any(m in reading.metrics for reading in readings)]
    return Comparison(
        metric=metric,
        metrics=[(m, MEASURED[m].label) for m in metrics],
        runs=list(named),
        points=points(named, metric),
        differences=differences({name: r.tables for name, r in named.items()}),
        utility=utility_figure(named, metric),
    )


def named_readings(readings: Sequence[Reading]) -> dict[str, Reading]:
    """Name the runs, with a number where runs of different folders share a name."""
    named: dict[str, Reading] = {}
    for reading in readings:
        numbered = (f"{reading.run.name}-{i}" if i > 1 else reading.run.name for i in count(1))
        named[next(name for name in numbered if name not in named)] = reading
    return named


def points(named: Mapping[str, Reading], metric: str) -> Table:
    """List every attack on every run with the best baseline, accuracy and epsilon."""
    by = MEASURED[metric]
    columns = [RUN, ATTACK, ACCURACY, *leak_columns(by), Column.of(by, "floor", "best baseline"), IDENTIFIED, LABELS]
    columns += [Column("n", "examples", "count"), Column("epsilon", "epsilon", "number", less=True)]
    rows: list[tuple[Cell, ...]] = []
    for name, reading in named.items():
        pooled, hits, labels = (reading.pooled(m) for m in (metric, "identified", "label_accuracy"))
        floor, epsilon = mean_of(best_of(pooled.values(), "baseline")), spent_in(reading).record
        for leak in _attacked(reading, metric):
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


def utility_figure(named: Mapping[str, Reading], metric: str) -> Figure | None:
    """Draw leakage against final accuracy: colours are runs, symbols attacks; None if no run has both."""
    names = dict.fromkeys(a for reading in named.values() for a in reading.order if is_attack(a))
    symbols, colours = dict(zip(names, cycle(SYMBOLS), strict=False)), dict(zip(named, count(), strict=False))
    accuracies = {name: final_accuracy(reading.rounds) for name, reading in named.items()}
    tested = {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}
    strongest = {name: best_of(reading.pooled(metric).values(), "attack") for name, reading in named.items()}
    leaks = [(name, k) for name in tested for k in _attacked(named[name], metric) if k.mean is not None]
    if not leaks:
        return None
    points: list[Series] = []
    numbers = {name: str(i) for i, name in enumerate(named, 1)}
    for name, leak in leaks:
        (low, high), accuracy, spent = leak.interval or (None, None), tested[name], spent_in(named[name]).record
        note = f"{name}, {leak.attack}\n{point_label(leak)}\ntest accuracy {percent(accuracy)}"
        note += f"\nepsilon {number(spent, None)} for one record"
        label = numbers[name] if leak is strongest[name] else ""
        look = Look(colour(colours[name]), symbol=symbols[leak.attack])
        points.append(Series("", "run", look, [accuracy], [leak.mean], [low], [high], note=[note], label=label))
    runs, attacks = dict.fromkeys(name for name, _ in leaks), dict.fromkeys(leak.attack for _, leak in leaks)
    floors = {name: best_of(named[name].pooled(metric).values(), "baseline") for name in runs}
    guesses = [
        Series("", "baseline", FLOOR, [tested[name]], [floor.mean])
        for name, floor in floors.items()
        if floor is not None
    ]
    guesses[:1] = [replace(guess, name="best baseline") for guess in guesses[:1]]
    legend = [
        *(Series(f"{numbers[name]}  {name}", "run", Look(colour(colours[name]), symbol="square")) for name in runs),
        *(Series(name, "attack", Look("ink", symbol=symbols[name])) for name in attacks),
    ]
    words = "The bottom right is best: accurate, with little leakage. Each run's number is at its strongest attack."
    y, (low, high) = value_axis(metric, [*points, *guesses]), (min(tested.values()), max(tested.values()))
    if not MEASURED[metric].higher_is_better:
        y = replace(y, low=y.high, high=y.low)
    margin = max(0.1 * (high - low), 0.02)
    x = Axis("test accuracy at the end", "fraction", max(WHOLE[0], low - margin), min(WHOLE[1], high + margin))
    series, interval = [*points, *guesses, *legend], interval_name(metric, [leak for _, leak in leaks])
    title = "Leakage against test accuracy"
    return Figure(f"utility-{metric}", title, words, x, y, series, metric=metric, interval=interval)


FLOOR = Look("muted", symbol="line-ew")


def _attacked(reading: Reading, metric: str) -> list[Leak]:
    """Return the Leaks of the attacks over all rounds, in the plan's order."""
    pooled = reading.pooled(metric)
    return [pooled[a] for a in reading.order if is_attack(a) and a in pooled]
