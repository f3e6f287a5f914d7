"""Numbers and names as the page and the report show them; static/format.js writes numbers in the same way."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fedgauge.attacks.modality.base import Measured
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.attacks.plan import describe
from fedgauge.server.views.leakage import Leak, as_rate
from fedgauge.server.views.roles import is_limit

NONE = "–"
MOST_WORDS = 240  # letters of a client's message that are shown
ENDED = {"converged": "finished"}  # an attack that ran its schedule to the end is not known to have converged


def number(value: float | None, digits: int | None = 3) -> str:
    """A number to `digits` decimals (None: three significant digits), infinity as ∞, a missing one as a dash.

    Halves go to the even digit, as everywhere in Python.
    """
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    return f"{value:z.3g}" if digits is None else f"{value:z.{digits}f}"


def between(low: float | None, high: float | None, digits: int | None = 3) -> str:
    """An interval."""
    return f"{number(low, digits)} to {number(high, digits)}"


def decibel(value: float | None) -> str:
    """A PSNR."""
    return number(value, 1)


def in_unit(value: float | None, by: Measured) -> str:
    """A metric's value with its unit."""
    text = number(value, by.digits)
    return text if text == NONE else f"{text} {by.unit}".strip()


def in_metric(metric: str, value: float | None) -> str:
    """A metric's value with its unit, a share in percent."""
    measured = MEASURED[metric]
    return percent(value) if measured.fraction else in_unit(value, measured)


def percent(value: float | None, digits: int = 0, space: str = "\u00a0") -> str:
    """A fraction in percent."""
    return NONE if value is None or math.isnan(value) else f"{number(100 * value, digits)}{space}%"


def status_words(status: str) -> str:
    """How an attack ended, as users read it."""
    return ENDED.get(status, status.replace("_", " "))


def rounded(value: float | None) -> float | None:
    """Ten significant digits, None if not finite: valid JSON that is written as the value itself."""
    return None if (value := finite(value)) is None else float(f"{value:.9e}")


def finite(value: float | None) -> float | None:
    """The value as JSON may hold it: None if it is infinite or NaN."""
    return value if value is not None and math.isfinite(value) else None


def plotted_value(metric: str, value: float | None) -> float | None:
    """The value to draw: the infinite PSNR of an exact hit is drawn at the cap, as it would flatten all others."""
    cap = MEASURED[metric].cap
    return value if value is None or cap is None else min(value, cap)


def is_exact(value: float | None) -> bool:
    """Whether a PSNR belongs to an exact hit."""
    return value is not None and math.isinf(value)


def metric_facts(metric: str) -> dict[str, Any]:
    """What a metric is, for the page's scripts."""
    measured = MEASURED[metric]
    return {"name": metric, **{f.name: getattr(measured, f.name) for f in fields(Measured)}}


def component(table: Mapping[str, Any]) -> str:
    """A component with its arguments; without brackets if it has none."""
    return describe(table).removesuffix("()")


def chain(tables: Mapping[str, Any]) -> str:
    """A scenario's chain, in the order in which a gradient passes through it."""
    return " > ".join(map(component, tables["chain"]))


def scenario_line(tables: Mapping[str, Any]) -> str:
    """A scenario in one line."""
    counts = f"{many(tables['clients'], 'client')}; {many(tables['rounds'], 'round')}"
    parts = f"{component(tables['data'])}; {component(tables['model'])}; chain {chain(tables)}"
    return f"{counts}; {parts}; seed {tables['seed']}"


def many(n: int, noun: str) -> str:
    """A number with its noun."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def listed(parts: Sequence[str], most: int, between: str = "; ") -> str:
    """The first parts in one sentence, with the number of the others."""
    more = [f"{len(parts) - most} more"] if len(parts) > most else []
    return between.join([*parts[:most], *more])


def shortened(reason: str) -> str:
    """A client's message, shortened, on one line."""
    words = " ".join(reason.split())
    return words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]} ..."


def interval_label(leak: Leak) -> tuple[float | None, float | None]:
    """A mean's 95 % interval: Wilson's for a rate, clustered by client for other metrics."""
    return as_rate(leak).interval if MEASURED[leak.metric].rate else (leak.low, leak.high)


def interval_words(leak: Leak) -> str:
    """A mean's interval as text, with the number of clusters if it is below ten."""
    if leak.low is None:
        return f"no interval from {leak.clusters} {leak.cluster}" if leak.clusters == 1 else ""
    few = f", {leak.clusters} {leak.cluster}s" if leak.clusters < 10 else ""
    return f"{between(leak.low, leak.high, MEASURED[leak.metric].digits)}{few}"


def point_label(leak: Leak) -> str:
    """The label of a point in a figure."""
    if is_limit(leak.attack):
        return number(leak.mean, MEASURED[leak.metric].digits)
    low, high = interval_label(leak)
    measured = MEASURED[leak.metric]
    digits = measured.digits
    parts = [
        number(leak.mean, digits) if low is None else f"{number(leak.mean, digits)} ({between(low, high, digits)})"
    ]
    parts += [] if measured.rate else [f"worst case {number(leak.best, digits)}"]
    parts += [f"n = {leak.n}"]
    parts += [f"{sum(leak.failed.values())} failed"] if leak.failed else []
    return ", ".join([*parts, *([f"{leak.ungraded} not graded"] if leak.ungraded else [])])
