"""Several runs side by side: what each leaks, which accuracy it reaches, and how the scenarios differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, cycle
from typing import Any

from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views import formatting, tables
from fedgauge.server.views.figures import (
    COLOURS,
    SYMBOLS,
    WHOLE,
    Axis,
    Figure,
    Look,
    Series,
    colour,
    in_json,
    interval_name,
    leak_series,
    round_axis,
    value_axis,
)
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.overview import numbers_of, rate_in_numbers
from fedgauge.server.views.privacy import privacy
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.strength import Tradeoff, best_of, final_accuracy, fronts, mean_of


def compare(
    readings: Sequence[Reading], metric: str | None = None, colours: Sequence[int] | None = None
) -> dict[str, Any]:
    """The runs' leakage under every attack, over all rounds, with the accuracy that each reached.

    Args:
        metric: default: the first run's main one.
        colours: a number for each run's colour; default: its place.
    """
    metric = metric or next((r.scores.measure.metric for r in readings), ImageModality.main.metric)
    named = named_readings(readings)
    metrics = [m for m in MEASURED if any(m in reading.metrics for reading in readings)]
    places = dict(zip(named, colours or count(), strict=False))
    return {
        "metric": formatting.metric_facts(metric),
        "metrics": [formatting.metric_facts(m) for m in metrics],
        "runs": [{"id": name, "facts": formatting.scenario_line(r.tables)} for name, r in named.items()],
        "points": [point for name, r in named.items() for point in _points(name, r, metric)],
        "prices": in_json(tables.prices(named, metric)),
        "differences": in_json(tables.differences({name: r.tables for name, r in named.items()})),
        "utility": in_json(utility_figure(named, metric, places)),
        "rounds": in_json(_over_rounds(named, metric, places)),
    }


def named_readings(readings: Sequence[Reading]) -> dict[str, Reading]:
    """The runs by a name that no other has: numbered where runs of different folders share one."""
    named: dict[str, Reading] = {}
    for reading in readings:
        numbered = (f"{reading.run.name}-{i}" if i > 1 else reading.run.name for i in count(1))
        named[next(name for name in numbered if name not in named)] = reading
    return named


def tradeoff(reading: Reading, metric: str) -> Tradeoff:
    """What a run reached and what it leaked."""
    strongest = best_of(reading.pooled(metric).values(), "attack")
    return Tradeoff(_data(reading.tables["data"]), final_accuracy(reading.rounds), strongest)


def _points(name: str, reading: Reading, metric: str) -> Iterator[dict[str, Any]]:
    accuracy, spent = formatting.rounded(final_accuracy(reading.rounds)), privacy(reading)
    chain = formatting.chain(reading.tables)
    shared = {"run": name, "chain": chain, "accuracy": accuracy, "epsilon": spent["epsilon"], "privacy": spent["words"]}
    hits, labels = (reading.pooled(m) for m in ("identified", "label_accuracy"))
    for leak in _attacked(reading, metric):
        yield {
            **shared,
            "attack": leak.attack,
            **numbers_of(leak),
            "identified": rate_in_numbers(hits.get(leak.attack)),
            "labels": formatting.rounded(mean_of(labels.get(leak.attack))),
            "n": leak.n,
        }


# a run's share of the data, not the data: runs that differ in these alone are compared
OF_THE_SPLIT = ("partition", "alpha", "shards_per_client", "batch_size", "auxiliary")


def _data(table: Mapping[str, Any]) -> str:
    """The data set of a run, without how it is split among clients."""
    return formatting.component({key: value for key, value in table.items() if key not in OF_THE_SPLIT})


def utility_figure(
    named: Mapping[str, Reading], metric: str, colours: Mapping[str, int] | None = None
) -> Figure | None:
    """Leakage against the final test accuracy: colours are runs, symbols attacks; None if no run has both."""
    symbols, colours = _symbols(named), colours or dict(zip(named, count(), strict=False))
    tradeoffs = {name: tradeoff(reading, metric) for name, reading in named.items()}
    tested = {name: own.accuracy for name, own in tradeoffs.items() if own.accuracy is not None}
    leaks = [(name, k) for name in tested for k in _attacked(named[name], metric) if k.mean is not None]
    if not leaks:
        return None
    points: list[Series] = []
    numbers = {name: str(i) for i, name in enumerate(named, 1)}
    for name, leak in leaks:
        (low, high), accuracy, spent = formatting.interval_label(leak), tested[name], privacy(named[name])["epsilon"]
        note = (
            f"{name}, {leak.attack}\n{formatting.point_label(leak)}\ntest accuracy {formatting.percent(accuracy)}\n"
            f"{'no epsilon' if spent is None else f'epsilon {formatting.number(spent, None)} for one record'}"
        )
        label = numbers[name] if leak is tradeoffs[name].strongest else ""
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
    lines = fronts([tradeoffs[name] for name in runs])
    several = len(lines) > 1
    drawn = []
    for data, line in lines.items():
        x_line, y_line = zip(*line, strict=True)
        name = f"Pareto front (strongest attacks){f', {data}' if several else ''}"
        drawn.append(Series(name, "limit", FRONT, x_line, y_line))
    legend = [
        *(Series(f"{numbers[name]}  {name}", "run", Look(colour(colours[name]), symbol="square")) for name in runs),
        *(Series(name, "attack", Look("ink", symbol=symbols[name])) for name in attacks),
    ]
    best = [name for name, own in tradeoffs.items() if own.is_optimal(tradeoffs.values())]
    words = (
        "The bottom right is best: accurate, and little leaks. Each run's number is at its strongest attack. No other run on "
        f"the same data set is both more accurate and leaks less than {', '.join(best)}."
    )
    y, (low, high) = value_axis(metric, [*points, *guesses]), (min(tested.values()), max(tested.values()))
    if not MEASURED[metric].higher_is_better:
        y = replace(y, low=y.high, high=y.low)
    margin = max(0.1 * (high - low), 0.02)
    x = Axis("test accuracy at the end", "fraction", max(WHOLE[0], low - margin), min(WHOLE[1], high + margin))
    series, interval = [*drawn, *points, *guesses, *legend], interval_name(metric, [leak for _, leak in leaks])
    title = "Leakage against test accuracy"
    return Figure(f"utility-{metric}", title, words, x, y, series, metric=metric, interval=interval)


FLOOR, FRONT = Look("muted", symbol="line-ew"), Look("muted", (5, 3), width=1.5)


def _over_rounds(named: Mapping[str, Reading], metric: str, colours: Mapping[str, int]) -> Figure | None:
    """Leakage over rounds, run by run; of more runs than there are colours only each one's strongest attack."""
    symbols, alone, series = _symbols(named), len(named) > COLOURS, []
    for name, reading in named.items():
        strongest = tradeoff(reading, metric).strongest
        for attack in [a for a in reading.order if is_attack(a)]:
            leaks = [k for k in reading.leaks(metric) if k.attack == attack and k.round and k.mean is not None]
            if leaks and not (alone and (strongest is None or strongest.attack != attack)):
                drawn = leak_series(attack, leaks, Look(colour(colours[name]), symbol=symbols[attack]))
                series.append(replace(drawn, name=f"{name}, {attack}", role="run", low=(), high=(), worst=()))
    if not series:
        return None
    words = "Means over the examples of a round. Colours are runs, symbols attacks, as above."
    words += " Only each run's strongest attack is drawn." if alone else ""
    x, y = round_axis([x for s in series for x in s.x]), value_axis(metric, series)
    return Figure("rounds", "Leakage over rounds, run by run", words, x, y, series, metric=metric)


def _symbols(named: Mapping[str, Reading]) -> dict[str, str]:
    """A symbol for each attack of any run."""
    attacks = dict.fromkeys(a for reading in named.values() for a in reading.order if is_attack(a))
    return dict(zip(attacks, cycle(SYMBOLS), strict=False))


def _attacked(reading: Reading, metric: str) -> list[Leak]:
    """The Leaks of the attacks over all rounds, in the plan's order."""
    pooled = reading.pooled(metric)
    return [pooled[a] for a in reading.order if is_attack(a) and a in pooled]
