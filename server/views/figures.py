"""Specifications of figures, which the page's scripts and Matplotlib draw."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from fedgauge.attacks.base import LIMITS, Role
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.views.formatting import number, percent
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.membership import RATES_SHOWN, roc_curves
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.success import THRESHOLDS, certified_success, success_curve

COLOURS = 6  # of series in static/style.css
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down")  # one more than colours
BASELINE_DASHES = ((5, 3), (7, 3, 1.5, 3), (1.5, 3), (8, 2), (10, 3, 1.5, 3, 1.5, 3))
WHOLE = (-0.02, 1.03)  # the limits of an axis from 0 to 100 %


@dataclass(frozen=True)
class Axis:
    """Axis of a figure.

    Args:
        kind: round: whole numbers; fraction: percent; log: percent, logarithmic.
        low, high: its ends; default: fit the values.
    """

    label: str
    kind: Literal["number", "round", "fraction", "log"] = "number"
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Look:
    """Style of a series.

    Args:
        colour: a variable of static/style.css.
        dash: lengths of dashes and gaps; empty: solid.
        symbol: Plotly's name of the marker; empty: none.
        width: of the line, in pixels.
    """

    colour: str
    dash: Sequence[float] = ()
    symbol: str = ""
    width: float = 2.4


LIMIT, INK = Look("limit", (9, 3), "line-ew", 2.2), Look("ink", width=1.5)


@dataclass(frozen=True, eq=False)
class Series:
    """Line or point of a figure.

    Args:
        name: in the legend; empty: left out of it.
        role: accuracy: on the right axis, if there is one; run: one of several compared runs.
        x, mean: the line; empty: only an entry of the legend.
        low, high, worst: the interval and the worst case at each x; empty: none.
        note: a text for each point.
        label: a text next to a point.
    """

    name: str
    role: Role | Literal["accuracy", "run"]
    look: Look
    x: Sequence[float] = ()
    mean: Sequence[float | None] = ()
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    worst: Sequence[float | None] = ()
    note: Sequence[str] = ()
    label: str = ""


@dataclass(frozen=True, eq=False)
class Figure:
    """Plot of lines or points.

    Args:
        name: of its files.
        meaning: the caption.
        interval: name of the intervals in a legend; empty: no intervals.
    """

    name: str
    title: str
    meaning: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    right: Axis | None = None
    metric: str = ""
    interval: str = ""


def look_at(place: int) -> Look:
    return Look(f"series-{place % COLOURS}", symbol=SYMBOLS[place % len(SYMBOLS)])


def looks_of(reading: RunSnapshot) -> dict[str, Look]:
    attacks, baselines, looks = count(), count(), {}
    for name in reading.names:
        match reading.scores.role(name):
            case "attack":
                looks[name] = look_at(next(attacks))
            case "limit" | "estimate":
                looks[name] = LIMIT
            case "baseline":
                dash = BASELINE_DASHES[next(baselines) % len(BASELINE_DASHES)]
                looks[name] = Look("muted", dash, "line-ew", 1.5)
    return looks


def rounds_figures(reading: RunSnapshot) -> list[Figure]:
    """Draw leakage and test accuracy over rounds, one figure for each metric."""
    tested = {n: row["accuracy"] for n, row in sorted(reading.rounds.items()) if row["accuracy"] is not None}
    look = INK if len(tested) > 1 else replace(INK, symbol="circle")
    utility = f"test {reading.scores.label_kind.utility}"
    curve = Series(utility, "accuracy", look, [*tested], [*tested.values()], note=[*map(percent, tested.values())])
    accuracy = [replace(curve, name=f"{utility} (right)")] if tested else []
    drawn = list(filter(None, (_leakage(reading, metric, accuracy) for metric in reading.metrics)))
    if drawn or not tested:
        return drawn
    axes = round_axis([*tested]), Axis(utility, "fraction", *WHOLE)
    return [Figure("accuracy", TITLE, f"There is no score: only the {utility} is drawn.", *axes, [curve])]


TITLE = "Leakage and test accuracy over rounds"


def _leakage(reading: RunSnapshot, metric: str, accuracy: Sequence[Series]) -> Figure | None:
    leaks = [leak for leak in reading.leakage(metric) if leak.round is not None and leak.mean is not None]
    looks = looks_of(reading)
    by_attack = {attack: [leak for leak in leaks if leak.attack == attack] for attack in reading.order}
    series = [leak_series(own, looks[attack]) for attack, own in by_attack.items() if own]
    if not series:
        return None
    attacks = [leak for leak in leaks if leak.role == "attack"]
    return Figure(
        f"leakage-{metric}",
        TITLE,
        "The gap between an attack and the grey lines (baselines) is leakage.",
        round_axis([x for s in (*series, *accuracy) for x in s.x]),
        value_axis(metric, series),
        [*series, *accuracy],
        right=Axis(f"test {reading.scores.label_kind.utility}", "fraction", *WHOLE) if accuracy else None,
        metric=metric,
        interval=interval_name(metric, attacks),
    )


def leak_series(leaks: Sequence[Leak], look: Look) -> Series:
    ends, first = [leak.interval or (None, None) for leak in leaks], leaks[0]
    low, high = zip(*ends, strict=True) if first.role == "attack" else ((), ())
    worst = [leak.worst for leak in leaks]
    return Series(
        name_of(first.attack, first.role),
        first.role,
        look,
        [leak.round or 0 for leak in leaks],
        [leak.mean for leak in leaks],
        low,
        high,
        worst if any(value is not None for value in worst) else (),
        [point_label(leak) for leak in leaks],
    )


def name_of(attack: str, role: Role) -> str:
    return f"{attack} (an estimate)" if role == "estimate" else attack


def point_label(leak: Leak) -> str:
    digits = MEASURED[leak.metric].digits
    mean, shown = number(leak.mean, digits), leak.interval
    if leak.role in LIMITS:
        return mean
    parts = [mean if shown is None else f"{mean} ({number(shown[0], digits)} to {number(shown[1], digits)})"]
    parts += [] if leak.worst is None else [f"worst case {number(leak.best, digits)}"]
    lost = [leak.without_value] if leak.failed else []
    return ", ".join([*parts, f"n = {leak.n}", *lost, *([f"{leak.ungraded} not graded"] if leak.ungraded else [])])


def round_axis(rounds: Iterable[float]) -> Axis:
    last = max(1, *rounds, 1)
    return Axis("round", "round", -0.03 * last, 1.03 * last)


def value_axis(metric: str, series: Sequence[Series]) -> Axis:
    """Return a metric's axis, which cuts wide intervals off so that values stay readable."""
    measured = MEASURED[metric]
    if measured.fraction:
        return Axis(measured.label, "fraction", *WHOLE)
    values = [v for s in series for v in (*s.mean, *s.worst) if v is not None]
    drawn = [*values, *(v for s in series for v in (*s.low, *s.high) if v is not None)]
    low, high = min(values), max(values)
    margin = 0.5 * max(high - low, 1e-3 * max(abs(low), abs(high)), 1e-9)
    edge = 0.1 * margin
    low, high = max(min(drawn) - edge, low - margin), min(max(drawn) + edge, high + margin)
    return Axis(measured.label, low=low if measured.higher_is_better else max(low, -0.03 * high), high=high)


def interval_name(metric: str, leaks: Sequence[Leak]) -> str:
    """Name the intervals of these Leaks; empty without one."""
    clusters = [leak.clusters for leak in leaks if leak.interval is not None]
    if not clusters or MEASURED[metric].rate:
        return "95 % interval (Wilson)" if clusters else ""
    return f"95 % interval ({min(clusters)} clients{'' if min(clusters) == max(clusters) else ' or more'})"


def success_figure(reading: RunSnapshot) -> Figure | None:
    """Draw the share of examples reconstructed at each PSNR or better; None without a curve."""
    curve, looks = success_curve(reading), looks_of(reading)
    if not curve:
        return None
    series = []
    for attack, rates in curve.items():
        low, high = zip(*(rate.interval for rate in rates), strict=True)
        notes = [f"{r.count} of {r.n} ({percent(r.interval[0])} to {percent(r.interval[1])})" for r in rates]
        parts, role = [rate.fraction for rate in rates], reading.scores.role(attack)
        own = Series(attack, role, looks[attack], THRESHOLDS, parts, note=notes)
        series.append(replace(own, low=low, high=high) if role == "attack" else own)
    if certified := certified_success(reading, curve):
        notes = [f"at most {percent(v)} of the examples, by any attack on one round" for v in certified]
        series.append(Series("certified (ReRo), one round", "limit", LIMIT, THRESHOLDS, certified, note=notes))
    x, y = Axis("PSNR threshold (dB)", low=10, high=60), Axis("share of examples", "fraction", *WHOLE)
    words = "The share of examples that reach each PSNR. Attempts without an image count as failed."
    return Figure("success", "Success over thresholds", words, x, y, series)


def membership_figure(reading: RunSnapshot) -> Figure | None:
    """Draw the members detected at each rate of false positives; None without a test on enough candidates."""
    curves, looks = roc_curves(reading.scores), looks_of(reading)
    known = [rate for i, rate in enumerate(RATES_SHOWN) if any(c[i] is not None for c in curves.values())]
    if len(known) < 2:
        return None
    least = known[0]
    series = [
        Series(
            name,
            reading.scores.role(name),
            looks[name],
            RATES_SHOWN,
            [None if y is None else max(y, least / 2) for y in curves[name]],
            note=[percent(y) for y in curves[name]],
        )
        for name in reading.order
        if name in curves
    ]
    chance = Series("chance", "baseline", Look("muted", (1, 2), width=1), RATES_SHOWN, RATES_SHOWN)
    words = "The higher a curve on the left, the more members are detected with confidence."
    x = Axis("false positives", "log", least, 1)
    y = Axis("members detected", "log", least / 2, 1.07)
    return Figure("membership", "Members detected against false positives", words, x, y, [*series, chance])
