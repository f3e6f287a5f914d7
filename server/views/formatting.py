"""Numbers and names as the page and the report show them; static/format.js writes numbers in the same way."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedgauge.attacks.modality.base import Measured
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.attacks.plan import describe

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


def counted_words(counts: Mapping[str, int]) -> str:
    """How many ended in each way: 2 x diverged, 1 x failed; empty if none did."""
    return ", ".join(f"{n} x {status_words(status)}" for status, n in sorted(counts.items()))


def rounded(value: float | None) -> float | None:
    """Ten significant digits, None if not finite: valid JSON that is written as the value itself."""
    return None if (value := finite(value)) is None else float(f"{value:.9e}")


def finite(value: float | None) -> float | None:
    """The value as JSON may hold it: None if it is infinite or NaN."""
    return value if value is not None and math.isfinite(value) else None


def is_exact(value: float | None) -> bool:
    """Whether a PSNR belongs to an exact hit."""
    return value is not None and math.isinf(value)


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
