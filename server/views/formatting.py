"""Numbers and names as the page and the report show them."""

import math
from collections.abc import Mapping
from typing import Any

from fedgauge.attacks.modality.image_metrics import PSNR_CAP
from fedgauge.attacks.modality.registry import HIGHER_IS_BETTER, LABELS
from fedgauge.attacks.plan import describe
from fedgauge.server.views.leakage import Leak, as_rate
from fedgauge.server.views.roles import is_limit

ENDED = {"converged": "finished"}  # an attack that ran its schedule to the end is not known to have converged
RATES = ("identified",)  # 0 or 1 per example, so no worst case, and Wilson intervals


def number(value: float | None, digits: int = 3) -> str:
    """A number to `digits` decimals, infinity as ∞, a missing one as a dash."""
    if value is None or math.isnan(value):
        return "–"
    return ("−∞" if value < 0 else "∞") if math.isinf(value) else f"{value:.{digits}f}"


def decibel(value: float | None) -> str:
    """A PSNR."""
    return number(value, 1)


def percent(value: float | None) -> str:
    """A fraction in whole percent."""
    return "–" if value is None else f"{100 * value:.0f}\u00a0%"


def status_words(status: str) -> str:
    """How an attack ended, as users read it."""
    return ENDED.get(status, status.replace("_", " "))


def rounded(value: float | None) -> float | None:
    """Five significant digits, None if not finite: valid JSON, and a report of a thousand rounds stays small."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def plotted_value(metric: str, value: float | None) -> float | None:
    """The value to draw: the infinite PSNR of an exact hit is drawn at the cap, as it would flatten all others."""
    return min(value, PSNR_CAP) if metric.startswith("psnr") and value is not None else value


def is_exact(value: float | None) -> bool:
    """Whether a PSNR belongs to an exact hit."""
    return value is not None and math.isinf(value)


CLEAR = 40.0  # dB: beyond it the eye sees no difference


def ceiling(metric: str) -> float:
    """The value from which on more leakage is not seen: the end of a colour scale that is the same for all runs."""
    if metric.startswith("psnr"):
        return CLEAR
    if not HIGHER_IS_BETTER[metric]:
        return 0.0
    return 100.0 if "%" in LABELS.get(metric, "") else 1.0


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
    return as_rate(leak).interval if leak.metric in RATES else (leak.low, leak.high)


def point_label(leak: Leak) -> str:
    """The label of a point in a figure."""
    low, high = interval_label(leak)
    digits = 1 if leak.metric.startswith("psnr") or "%" in LABELS.get(leak.metric, "") else 3
    if is_limit(leak.attack):
        return number(leak.mean, digits)
    within = "" if low is None else f" ({number(low, digits)} to {number(high, digits)})"
    worst = "" if leak.metric in RATES else f", worst case {number(leak.best, digits)}"
    lost = f", {sum(leak.failed.values())} failed" if leak.failed else ""
    hidden = f", {leak.ungraded} not graded" if leak.ungraded else ""
    return f"{number(leak.mean, digits)}{within}{worst}, n = {leak.n}{lost}{hidden}"
