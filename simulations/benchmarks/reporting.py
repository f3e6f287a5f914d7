"""A benchmark's figures with units and targets, kept with the settings that reproduce them."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedgauge.simulations.run.environment import environment

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Figure:
    """One number; None if it could not be measured, and then the note says why."""

    name: str
    value: float | None
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    def __str__(self) -> str:
        value = "-" if self.value is None else f"{self.value:.4g}"
        met = {True: "yes", False: "NO", None: ""}[self.met]
        return "  ".join(filter(None, (self.name, value, self.unit, self.target, met, self.note)))

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def met(self) -> bool | None:
        """True if the target is met; None without a target or a value."""
        if self.value is None or not self.target:
            return None
        return self.value >= self.at_least if self.at_least is not None else self.value <= (self.at_most or 0.0)


def keep(
    path: Path,
    name: str,
    started: float,
    figures: Sequence[Figure],
    settings: Mapping[str, object],
    rows: Sequence[Mapping[str, object]] = (),
) -> int:
    """Write a benchmark's figures with the settings, the machine and the date; return 1 if a target is missed.

    Args:
        rows: from which the figures were computed.
    """
    keys = ("name", "value", "unit", "target", "met", "note")
    kept = {
        "benchmark": name,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "seconds": round(time.monotonic() - started, 1),
        "figures": [{key: getattr(figure, key) for key in keys} for figure in figures],
        **({"rows": rows} if rows else {}),
        "settings": settings,
        "environment": environment(),
    }
    path.write_text(json.dumps(kept, indent=2, allow_nan=False) + "\n")
    return int(any(figure.met is False for figure in figures))


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds (user and system) of this process for some work, which other load on the machine hardly changes."""
    started = time.process_time()
    work()
    return time.process_time() - started


def interleaved(
    works: Mapping[str, Callable[[], object]],
    repetitions: int,
    clock: Callable[[Callable[[], object]], float] = cpu_seconds,
) -> dict[str, list[float]]:
    """Seconds of each work in each repetition, in turns, so that a slow minute of the machine affects all equally.

    Every work runs once before, unmeasured.
    """
    rounds = [{name: clock(work) for name, work in works.items()} for _ in range(repetitions + 1)]
    return {name: [seconds[name] for seconds in rounds[1:]] for name in works}
