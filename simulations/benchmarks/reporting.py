"""A benchmark's report: figures with units and targets, and the settings that reproduce them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fedgauge.simulations.run.environment import environment


@dataclass(frozen=True)
class Figure:
    """One number; None if it could not be measured, and then the note says why."""

    name: str
    value: float | None
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def target(self) -> str:
        """The target as text, empty if there is none."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def met(self) -> bool | None:
        """True if the target is met; None without a target or a value."""
        if self.value is None or not self.target:
            return None
        return self.value >= self.at_least if self.at_least is not None else self.value <= (self.at_most or 0.0)


@dataclass(frozen=True)
class BenchmarkReport:
    """A benchmark's figures and settings (n, seeds, budgets)."""

    figures: tuple[Figure, ...]
    settings: Mapping[str, object]


def record(name: str, report: BenchmarkReport, seconds: float) -> Mapping[str, Any]:
    """A report for a results file: figures, settings, machine, date."""
    keys = ("name", "value", "unit", "target", "met", "note")
    return {
        "benchmark": name,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "seconds": round(seconds, 1),
        "figures": [{key: getattr(figure, key) for key in keys} for figure in report.figures],
        "settings": dict(report.settings),
        "environment": environment(),
    }


def cells(figure: Mapping[str, Any]) -> list[str]:
    """A figure's row as text."""
    value = "-" if figure["value"] is None else f"{figure['value']:.4g}"
    met = {True: "yes", False: "NO", None: ""}[figure["met"]]
    return [figure["name"], value, figure["unit"], figure["target"], met, figure["note"]]


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
