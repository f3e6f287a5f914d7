"""What a benchmark reports: figures with units and targets, and the settings that would produce them again."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fedgauge.attacks.engine.batch_limiter import keep_freed_memory

Progress = Callable[[int, int], None]  # (steps done, steps in all)


@dataclass(frozen=True)
class Figure:
    """One number; value None: it could not be measured, and the note says why."""

    name: str
    value: float | None
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def target(self) -> str:
        """The target in words, or nothing."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is no target or no value."""
        if self.value is None or not self.target:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


@dataclass(frozen=True)
class BenchmarkReport:
    """A benchmark's figures, and how they were measured: n, seeds, budgets; rows: the same as plain records, where it has any."""

    figures: tuple[Figure, ...]
    settings: Mapping[str, object]
    rows: tuple[Mapping[str, object], ...] = ()


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, as a worker sets itself up: speeds are compared per core."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds, user and system, of this process while working: what else the machine does counts little."""
    started = time.process_time()
    work()
    return time.process_time() - started


def interleaved(
    works: Mapping[str, Callable[[], object]], repetitions: int, progress: Progress
) -> dict[str, list[float]]:
    """CPU seconds of each work in each repetition, in turns, so that a slow minute of the machine hits all alike.

    Every work runs once before, unmeasured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    done, total = 0, (repetitions + 1) * len(works)
    for repetition in range(repetitions + 1):
        for name, work in works.items():
            spent = cpu_seconds(work)
            if repetition:
                seconds[name].append(spent)
            progress(done := done + 1, total)
    return seconds
