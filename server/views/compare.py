"""Several runs side by side: what each leaks, which accuracy it reaches, and how the scenarios differ."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from fedgauge.attacks.modality.registry import HIGHER_IS_BETTER, LABELS
from fedgauge.server.views import formatting
from fedgauge.server.views.leakage import Leak, as_rate
from fedgauge.server.views.overview import privacy, rate_in_numbers
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack, is_baseline, is_limit

Settings = dict[str, Any]


def compare(readings: Sequence[Reading], metric: str) -> dict[str, Any]:
    """The runs' leakage under every attack, over all rounds, with the accuracy that each reached."""
    named = list(zip(distinct(r.run.name for r in readings), readings, strict=True))
    data = {name: _data(r.tables["data"]) for name, r in named}
    points = _with_pareto([point for name, r in named for point in _points(name, r, metric)], data, metric)
    chains = {name: formatting.chain(r.tables) for name, r in named}
    differing, same = differences([reading.tables for reading in readings])
    metrics = [m for m in HIGHER_IS_BETTER if any(m in reading.metrics for reading in readings)]
    return {
        "metric": metric,
        "label": LABELS.get(metric, metric),
        "metrics": [{"name": m, "label": LABELS.get(m, m)} for m in metrics],
        "lower_is_worse": not HIGHER_IS_BETTER[metric],
        "ceiling": formatting.ceiling(metric),
        "runs": [_run(name, r, metric) for name, r in named],
        "points": points,
        "matrix": _matrix(dict(named), metric),
        "table": [{**point, "chain": chains[point["run"]]} for point in points],
        "differences": differing,
        "same": same,
        "curves": [curve for name, r in named for curve in _curves(name, r, metric)],
    }


def distinct(names: Iterable[str]) -> list[str]:
    """The names, numbered where runs of different folders share one."""
    unique: list[str] = []
    for name in names:
        numbered = (f"{name}-{i}" if i > 1 else name for i in count(1))
        unique.append(next(n for n in numbered if n not in unique))
    return unique


def _run(name: str, reading: Reading, metric: str) -> dict[str, Any]:
    return {
        "id": name,
        "chain": formatting.chain(reading.tables),
        "facts": formatting.scenario_line(reading.tables),
        "accuracy": _accuracy(reading),
        "state": reading.state,
        "limit": _best(reading.pooled(metric), metric, is_limit),
        "epsilon": privacy(reading)["epsilon"],
    }


def _accuracy(reading: Reading) -> float | None:
    return formatting.rounded(reading.rounds[max(reading.rounds)]["accuracy"]) if reading.rounds else None


def _points(name: str, reading: Reading, metric: str) -> Iterator[dict[str, Any]]:
    pooled, hits, labels = (reading.pooled(m) for m in (metric, "identified", "label_accuracy"))
    spent = privacy(reading)
    for attack in [a for a in reading.order if is_attack(a) and a in pooled]:
        leak, hit, restored = pooled[attack], hits.get(attack), labels.get(attack)
        yield {
            "run": name,
            "attack": attack,
            "accuracy": _accuracy(reading),
            "mean": formatting.rounded(leak.mean),
            "low": formatting.rounded(formatting.interval_label(leak)[0]),
            "high": formatting.rounded(formatting.interval_label(leak)[1]),
            "worst": formatting.rounded(leak.best),
            "exact": metric.startswith("psnr") and formatting.is_exact(leak.best),
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


def _with_pareto(points: Sequence[Mapping[str, Any]], data: Mapping[str, str], metric: str) -> list[dict[str, Any]]:
    """Mark each run's strongest attack, and whether no run on the same data beats its accuracy and leakage.

    Neither an accuracy nor a leakage compares across data sets, so each has a Pareto front of its own.
    """
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    strongest: dict[str, Mapping[str, Any]] = {}
    for point in points:
        if point["mean"] is None or point["accuracy"] is None:
            continue
        best = strongest.get(point["run"])
        if best is None or sign * point["mean"] > sign * best["mean"]:
            strongest[point["run"]] = point
    rivals = {run: [q for other, q in strongest.items() if data[other] == data[run]] for run in strongest}
    front = {run for run, p in strongest.items() if not any(_better(q, p, sign) for q in rivals[run])}
    marked = [(p, strongest.get(p["run"]) is p) for p in points]
    return [
        {**p, "data": data[p["run"]], "strongest": best, "pareto": best and p["run"] in front} for p, best in marked
    ]


def _better(one: Mapping[str, Any], other: Mapping[str, Any], sign: int) -> bool:
    """Whether a point is at least as good in accuracy and leakage, and better in one of them."""
    accuracy: float = one["accuracy"] - other["accuracy"]
    leakage: float = sign * (other["mean"] - one["mean"])
    return min(accuracy, leakage) >= 0 and max(accuracy, leakage) > 0


def _matrix(named: Mapping[str, Reading], metric: str) -> dict[str, Any]:
    attacks = list(dict.fromkeys(a for reading in named.values() for a in reading.order if is_attack(a)))
    pooled = [reading.pooled(metric) for reading in named.values()]
    return {
        "rows": list(named),
        "columns": attacks,
        "mean": [
            [formatting.rounded(by_attack[a].mean) if a in by_attack else None for a in attacks] for by_attack in pooled
        ],
        "baseline": [_best(by_attack, metric, is_baseline) for by_attack in pooled],
    }


def _best(pooled: Mapping[str, Leak], metric: str, kind: Callable[[str], bool]) -> float | None:
    """The best mean among baselines or among limits (the weakest limit is the one that holds for sure)."""
    means = [leak.mean for a, leak in pooled.items() if kind(a) and leak.mean is not None]
    if not means:
        return None
    return formatting.rounded(max(means) if HIGHER_IS_BETTER[metric] else min(means))


def _curves(name: str, reading: Reading, metric: str) -> Iterator[dict[str, Any]]:
    leaks = [leak for leak in reading.leaks(metric) if leak.round is not None and is_attack(leak.attack)]
    for attack in [a for a in reading.order if is_attack(a)]:
        own = [leak for leak in leaks if leak.attack == attack]
        if own:
            yield {
                "run": name,
                "attack": attack,
                "x": [leak.round for leak in own],
                "mean": [formatting.rounded(leak.mean) for leak in own],
            }


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
