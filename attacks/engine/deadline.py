"""The time limit of a search, and what it searches for."""

import time

from torch import Tensor

Variables = dict[str, Tensor]  # what the problems of a wave optimise, by name


class Deadline:
    """The end of a budget's seconds, which start now; None: no end."""

    def __init__(self, seconds: float | None = None) -> None:
        self.end = None if seconds is None else time.perf_counter() + seconds

    def over(self) -> bool:
        return self.end is not None and time.perf_counter() > self.end
