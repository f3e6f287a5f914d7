"""Several runs side by side: what each leaks, which accuracy it reaches, and how the scenarios differ."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, cycle
from typing import Any

from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views import formatting
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
from fedgauge.server.views.leakage import Leak, as_rate
from fedgauge.server.views.overview import numbers_of, rate_in_numbers
from fedgauge.server.views.privacy import privacy
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.strength import Limits, Tradeoff, best_of, final_accuracy, fronts, mean_of

Settings = dict[str, Any]


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
    points = [point for name, r in named.items() for point in _points(name, r, metric)]
    differing, same = differences([reading.tables for reading in readings])
    metrics = [m for m in MEASURED if any(m in reading.metrics for reading in readings)]
    places = dict(zip(named, colours or count(), strict=False))
    return {
        "metric": formatting.metric_facts(metric),
        "metrics": [formatting.metric_facts(m) for m in metrics],
        "runs": [_run(name, r) for name, r in named.items()],
        "points": points,
        "matrix": _matrix(named, metric),
        "differences": differing,
        "same": same,
        "utility": in_json(utility_figure(named, metric, places)),
        "rounds": in_json(_over_rounds(named, metric, places)),
    }


def named_readings(readings: Sequence[Reading]) -> dict[str, Reading]:
    """The runs by a name that no other has."""
    return dict(zip(distinct(r.run.name for r in readings), readings, strict=True))


def distinct(names: Iterable[str]) -> list[str]:
    """The names, numbered where runs of different folders share one."""
    unique: list[str] = []
    for name in names:
        numbered = (f"{name}-{i}" if i > 1 else name for i in count(1))
        unique.append(next(n for n in numbered if n not in unique))
    return unique


def _run(name: str, reading: Reading) -> dict[str, Any]:
    limits = Limits.of(reading.pooled("mse"))
    return {
        "id": name,
        "chain": formatting.chain(reading.tables),
        "facts": formatting.scenario_line(reading.tables),
        "accuracy": formatting.rounded(final_accuracy(reading.rounds)),
        "state": reading.state,
        "limit": formatting.rounded(limits.estimate),
        "bound": formatting.rounded(limits.bound),
        "gap": formatting.rounded(limits.gap),
        "epsilon": privacy(reading)["epsilon"],
    }


def tradeoff(reading: Reading, metric: str) -> Tradeoff:
    """What a run reached and what it leaked."""
    strongest = best_of(reading.pooled(metric).values(), "attack")
    return Tradeoff(_data(reading.tables["data"]), final_accuracy(reading.rounds), strongest)


def _points(name: str, reading: Reading, metric: str) -> Iterator[dict[str, Any]]:
    pooled, hits, labels = (reading.pooled(m) for m in (metric, "identified", "label_accuracy"))
    spent = privacy(reading)
    for attack in [a for a in reading.order if is_attack(a) and a in pooled]:
        leak, hit, restored = pooled[attack], hits.get(attack), labels.get(attack)
        yield {
            "run": name,
            "chain": formatting.chain(reading.tables),
            "attack": attack,
            "accuracy": formatting.rounded(final_accuracy(reading.rounds)),
            **numbers_of(leak),
            "exact": formatting.is_exact(leak.best),
            "identified": rate_in_numbers(as_rate(hit)) if hit and hit.n else None,
            "labels": formatting.rounded(restored.mean) if restored and restored.n else None,
            "n": leak.n,
            "epsilon": spent["epsilon"],
            "privacy": spent["words"],
        }


# a run's share of the data, not the data: runs that differ in these alone are compared
OF_THE_SPLIT = ("partition", "alpha", "shards_per_client", "batch_size", "auxiliary")


def _data(table: Mapping[str, Any]) -> str:
    """The data set of a run, without how it is split among clients."""
    return formatting.component({key: value for key, value in table.items() if key not in OF_THE_SPLIT})


def _matrix(named: Mapping[str, Reading], metric: str) -> dict[str, Any]:
    attacks = [*_symbols(named)]
    pooled = [reading.pooled(metric) for reading in named.values()]
    return {
        "rows": list(named),
        "columns": attacks,
        "mean": [
            [formatting.rounded(by_attack[a].mean) if a in by_attack else None for a in attacks] for by_attack in pooled
        ],
        "baseline": [formatting.rounded(mean_of(best_of(by_attack.values(), "baseline"))) for by_attack in pooled],
    }


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
    floors: list[Series] = []
    numbers = {name: str(i) for i, name in enumerate(named, 1)}
    for name, leak in leaks:
        (low, high), accuracy = formatting.interval_label(leak), tested[name]
        spent = privacy(named[name])["epsilon"]
        note = (
            f"{name}, {leak.attack}\n{formatting.point_label(leak)}\ntest accuracy {formatting.percent(accuracy)}\n"
            f"{'no epsilon' if spent is None else f'epsilon {formatting.number(spent, None)} for one record'}"
        )
        label = numbers[name] if leak is tradeoffs[name].strongest else ""
        look = Look(colour(colours[name]), symbol=symbols[leak.attack])
        points.append(Series("", "run", look, [accuracy], [leak.mean], [low], [high], note=[note], label=label))
    runs, attacks = dict.fromkeys(name for name, _ in leaks), dict.fromkeys(leak.attack for _, leak in leaks)
    for name in runs:
        if (floor := mean_of(best_of(named[name].pooled(metric).values(), "baseline"))) is not None:
            look = Look("muted", symbol="line-ew")
            floors.append(Series("" if floors else "best baseline", "baseline", look, [tested[name]], [floor]))
    lines = fronts([tradeoffs[name] for name in runs])
    front = Look("muted", (5, 3), width=1.5)
    drawn = [
        *(
            Series(
                f"Pareto front (strongest attacks){f', {data}' if len(lines) > 1 else ''}",
                "limit", front, [accuracy for _, accuracy in line], [leaked for leaked, _ in line],
            )
            for data, line in lines.items()
        ),
        *points,
        *floors,
    ]  # fmt: skip
    legend = [
        *(Series(f"{numbers[name]}  {name}", "run", Look(colour(colours[name]), symbol="square")) for name in runs),
        *(Series(name, "attack", Look("ink", symbol=symbols[name])) for name in attacks),
    ]
    y, (low, high) = value_axis(metric, [*points, *floors]), (min(tested.values()), max(tested.values()))
    if not MEASURED[metric].higher_is_better:
        y = replace(y, low=y.high, high=y.low)
    margin = max(0.1 * (high - low), 0.02)
    x = Axis("test accuracy at the end", "fraction", max(WHOLE[0], low - margin), min(WHOLE[1], high + margin))
    return Figure(
        f"utility-{metric}",
        "Leakage against test accuracy",
        _utility_words(tradeoffs, lines),
        x,
        y,
        [*drawn, *legend],
        metric=metric,
        interval=interval_name(metric, [leak for _, leak in leaks]),
    )


def _utility_words(tradeoffs: Mapping[str, Tradeoff], lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    best = [name for name, own in tradeoffs.items() if own.is_optimal(tradeoffs.values())]
    several = len(lines) > 1
    return (
        "The bottom right is best: accurate, and little leaks. Each run's number is at its strongest attack."
        f"{' Only runs on the same data set are compared.' if several else ''} No other run{' on its data set' if several else ''} "
        f"is both more accurate and leaks less than {', '.join(best)}."
    )


def _over_rounds(named: Mapping[str, Reading], metric: str, colours: Mapping[str, int]) -> Figure | None:
    """Leakage over rounds, run by run; of more runs than there are colours only each one's strongest attack."""
    symbols, alone, series = _symbols(named), len(named) > COLOURS, []
    for name, reading in named.items():
        strongest = tradeoff(reading, metric).strongest
        for attack in [a for a in reading.order if is_attack(a)]:
            if alone and (strongest is None or strongest.attack != attack):
                continue
            leaks = [
                k for k in reading.leaks(metric) if k.attack == attack and k.round is not None and k.mean is not None
            ]
            if leaks:
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


def differences(scenarios: Sequence[Settings]) -> tuple[list[dict[str, Any]], int]:
    """The settings that differ between scenarios, with each one's value ("–": not set), and the number of equal settings."""
    flat = [dict(_flat(tables)) for tables in scenarios]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    rows = [{"key": key, "values": [str(settings.get(key, "–")) for settings in flat]} for key in keys]
    differing = [row for row in rows if len(set(row["values"])) > 1]
    return differing, len(rows) - len(differing)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value and all(isinstance(inner, Mapping) for inner in value):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{prefix}.{i}")
    else:
        yield prefix, value
