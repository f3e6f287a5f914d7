"""Numbers and names as text; static/format.js writes numbers alike."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedgauge.attacks.modality.base import Measured
from fedgauge.attacks.plan import describe

NONE = "–"
ENDED = {"converged": "finished"}  # a full schedule does not prove convergence


def number(value: float | None, digits: int | None = 3) -> str:
    """Write a number to `digits` decimals (None: three significant digits).

    Example:
        >>> number(2.345, 1), number(float("inf")), number(None), number(1234.5, None)
        ('2.3', '∞', '–', '1.23e+03')
    """
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    return f"{value:z.3g}" if digits is None else f"{value:z.{digits}f}"


def decibel(value: float | None) -> str:
    return number(value, 1)


def in_unit(value: float | None, by: Measured) -> str:
    text = number(value, by.digits)
    return text if text == NONE else f"{text} {by.unit}".strip()


def percent(value: float | None, digits: int = 0, space: str = "\u00a0") -> str:
    """Write a fraction in percent."""
    return NONE if value is None or math.isnan(value) else f"{number(100 * value, digits)}{space}%"


def status_words(status: str) -> str:
    return ENDED.get(status, status.replace("_", " "))


def counted_words(counts: Mapping[str, int]) -> str:
    """Write counts by status, such as "2 x diverged, 1 x failed"."""
    return ", ".join(f"{n} x {status_words(status)}" for status, n in sorted(counts.items()))


def rounded(value: float | None) -> float | None:
    """Round to ten significant digits; None if not finite, as JSON requires."""
    return None if (value := finite(value)) is None else float(f"{value:.9e}")


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def component(table: Mapping[str, Any]) -> str:
    return describe(table).removesuffix("()")


def chain(tables: Mapping[str, Any]) -> str:
    sums = [f"secure sum of {tables['secure_sum']['group']}"] if "secure_sum" in tables else []
    return " > ".join([*map(component, tables["chain"]), *sums])


def scenario_line(tables: Mapping[str, Any]) -> str:
    counts = f"{many(tables['clients'], 'client')}; {many(tables['rounds'], 'round')}"
    parts = f"{component(tables['data'])}; {component(tables['model'])}; chain {chain(tables)}"
    return f"{counts}; {parts}; seed {tables['seed']}"


def many(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def listed(parts: Sequence[str], most: int, between: str = "; ") -> str:
    """Join the first parts, with the number of the others.

    Example:
        >>> listed(["one", "two", "three"], most=2)
        'one; two; 1 more'
    """
    more = [f"{len(parts) - most} more"] if len(parts) > most else []
    return between.join([*parts[:most], *more])
