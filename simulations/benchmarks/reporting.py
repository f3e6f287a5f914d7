"""What a benchmark reports: figures with units and targets, and the settings that reproduce them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fedgauge.simulations.run.environment import environment
from fedgauge.simulations.run.environment import one_thread as one_thread

Progress = Callable[[int, int], None]  # (steps done, steps in all)


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
        """Whether the target is met; None without a target or a value."""
        if self.value is None or not self.target:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


@dataclass(frozen=True)
class BenchmarkReport:
    """A benchmark's figures and settings (n, seeds, budgets); rows: the figures as plain records, if it has any."""

    figures: tuple[Figure, ...]
    settings: Mapping[str, object]
    rows: tuple[Mapping[str, object], ...] = ()


def record(name: str, report: BenchmarkReport, seconds: float) -> dict[str, Any]:
    """A report for a results file: figures, settings, machine, date."""
    figures = [
        {"name": f.name, "value": f.value, "unit": f.unit, "target": f.target, "met": f.met, "note": f.note}
        for f in report.figures
    ]
    return {
        "benchmark": name,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "seconds": round(seconds, 1),
        "figures": figures,
        "rows": [dict(row) for row in report.rows],
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
    progress: Progress,
    clock: Callable[[Callable[[], object]], float] = cpu_seconds,
) -> dict[str, list[float]]:
    """Seconds of each work in each repetition, in turns, so that a slow minute of the machine affects all equally.

    Every work runs once before, unmeasured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    done, total = 0, (repetitions + 1) * len(works)
    for repetition in range(repetitions + 1):
        for name, work in works.items():
            spent = clock(work)
            if repetition:
                seconds[name].append(spent)
            progress(done := done + 1, total)
    return seconds


def sentence(error: BaseException) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
