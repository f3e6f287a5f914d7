"""The end of a search: its time limit, and its result for each problem."""

import time
from dataclasses import dataclass

from torch import Tensor

Variables = dict[str, Tensor]  # what the problems of a wave optimise, by name


class Deadline:
    """The end of a budget's seconds."""

    def __init__(self, started: float, seconds: float | None) -> None:
        self.end = None if seconds is None else started + seconds

    def over(self) -> bool:
        return self.end is not None and time.perf_counter() > self.end


@dataclass(frozen=True, eq=False)
class OptimizationResult:
    """The results of P problems.

    Args:
        objectives: (P,).
        spent: (P,) iterations or evaluations.
        interrupted: (P,) whether the deadline ended it early.
    """

    objectives: Tensor
    spent: Tensor
    interrupted: Tensor
