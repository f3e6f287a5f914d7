"""The end of a search: its time limit, and its result for each problem."""

import time
from dataclasses import dataclass

from torch import Tensor

Variables = dict[str, Tensor]  # what the problems of a wave optimise, by name


class Deadline:
    """The end of a budget's seconds, which start now; None: no end."""

    def __init__(self, seconds: float | None = None) -> None:
        self.end = None if seconds is None else time.perf_counter() + seconds

    def over(self) -> bool:
        return self.end is not None and time.perf_counter() > self.end


@dataclass(frozen=True, eq=False)
class OptimizationResult:
    """The results of P problems, each tensor (P,)."""

    objectives: Tensor
    spent: Tensor  # iterations or evaluations
    interrupted: Tensor  # whether the deadline ended it early
