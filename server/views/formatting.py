"""Numbers and names as the page and the report show them; static/format.js writes numbers in the same way."""

import math
from collections.abc import Mapping
from dataclasses import fields
from decimal import Context, Decimal
from typing import Any

from fedgauge.attacks.modality.base import Measured
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.attacks.plan import describe
from fedgauge.server.views.leakage import Leak, as_rate
from fedgauge.server.views.roles import is_limit

NONE = "–"
FIVE_DIGITS = Context(prec=5)
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
    """Five significant digits, None if not finite: valid JSON, and a report of a thousand rounds stays small.

    Rounding to fewer digits then gives what the value itself gives: 12.49996 is no half, so it becomes 12.499.
    """
    if (value := finite(value)) is None:
        return None
    text = f"{value:.4e}"
    if float(text) != value and text.partition("e")[0].rstrip("0").endswith("5"):
        return float(Decimal(text).next_toward(Decimal(float(value)), FIVE_DIGITS))
    return float(text)


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
    clients, rounds = tables["clients"], tables["rounds"]
    parts = [
        f"{clients} client{'s' if clients > 1 else ''}",
        f"{rounds} round{'s' if rounds > 1 else ''}",
        component(tables["data"]),
        component(tables["model"]),
        f"chain {chain(tables)}",
        f"seed {tables['seed']}",
    ]
    return "; ".join(parts)


def interval_label(leak: Leak) -> tuple[float | None, float | None]:
    """A mean's 95 % interval: Wilson's for a rate, clustered by client for other metrics."""
    return as_rate(leak).interval if MEASURED[leak.metric].rate else (leak.low, leak.high)


def point_label(leak: Leak) -> str:
    """The label of a point in a figure."""
    low, high = interval_label(leak)
    measured = MEASURED[leak.metric]
    digits = measured.digits
    if is_limit(leak.attack):
        return number(leak.mean, digits)
    within = "" if low is None else f" ({number(low, digits)} to {number(high, digits)})"
    worst = "" if measured.rate else f", worst case {number(leak.best, digits)}"
    lost = f", {sum(leak.failed.values())} failed" if leak.failed else ""
    hidden = f", {leak.ungraded} not graded" if leak.ungraded else ""
    return f"{number(leak.mean, digits)}{within}{worst}, n = {leak.n}{lost}{hidden}"
