"""Schedules unfinished problems into batches that fit in memory, and traces them; each has its own iteration count."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.engine.batch_limiter import BatchLimiter

Variables = dict[str, Tensor]  # what the problems of a wave optimise, by name

CHECK_EVERY = 16  # iterations between two checks of the problems: a check waits for the device, an iteration does not


class Deadline:
    """The end of a budget's seconds."""

    def __init__(self, started: float, seconds: float | None) -> None:
        self.end = None if seconds is None else started + seconds

    def over(self) -> bool:
        """Return True once the seconds are spent."""
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


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """Adam's state of N problems.

    Args:
        variables: each (N, ...).
        moments: of each variable's gradients.
        spent: (N,) iterations of each, in host memory.
        finite: (N,) whether the objective was finite at least once since the last check.
    """

    variables: Variables
    moments: dict[str, tuple[Tensor, Tensor]]
    spent: Tensor
    finite: Tensor

    @classmethod
    def at(cls, variables: Variables) -> "OptimizerState":
        """The initial state."""
        x = variables["x"]
        moments = {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in variables.items()}
        finite = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        return cls(variables, moments, torch.zeros(len(x), dtype=torch.int64), finite)

    def of(self, rows: Tensor) -> "OptimizerState":
        """The state of some problems, to advance and then `scatter` back."""
        return OptimizerState(
            {name: t[rows] for name, t in self.variables.items()},
            {name: (first[rows], second[rows]) for name, (first, second) in self.moments.items()},
            self.spent[rows],
            self.finite[rows],
        )

    def scatter(self, rows: Tensor, part: "OptimizerState", done: int) -> None:
        """Write back the state of some problems after `done` iterations."""
        for name, t in part.variables.items():
            self.variables[name][rows] = t
            for ours, theirs in zip(self.moments[name], part.moments[name], strict=True):
                ours[rows] = theirs
        self.spent[rows] += done
        self.finite[rows] = part.finite

    def diverged(self, rows: Tensor) -> Tensor:
        """Mark (N,), in host memory, the problems that are due for a check and have diverged."""
        due = (self.spent[rows] % CHECK_EVERY == 0) & (self.spent[rows] > 0)
        if not due.any():
            return due
        gone = ~self.finite[rows]
        self.finite[rows[due]] = False
        return due & gone.cpu()


StepFn = Callable[
    [OptimizerState, Tensor, int], int
]  # state of some problems, their rows, maximal iterations -> iterations done


def advance(
    state: OptimizerState,
    units: Tensor,
    iterations: int,
    limiter: BatchLimiter,
    clock: Deadline,
    stretch: StepFn,
) -> Tensor:
    """Advance all problems in place until each has finished; returns (P,) which the deadline interrupted.

    A problem finishes when its iterations are spent, or when its objective was never finite between two checks; the next
    waiting one takes its place. If memory runs out during a stretch, only that stretch is repeated.

    Args:
        units: (U, R) problems that only advance together; the limiter counts units.
    """
    ended = torch.zeros(len(units), dtype=torch.bool)
    while not (ended.all() or clock.over()):
        live = (~ended).nonzero().flatten()[: limiter.count]
        rows = units[live].flatten()
        with limiter.halve_on_out_of_memory(len(live)):
            part = state.of(rows)
            # up to the next check of any of them; each has its own iteration count, so packing changes no result
            length = int(torch.minimum(CHECK_EVERY - part.spent % CHECK_EVERY, iterations - part.spent).min())
            done = stretch(part, rows, length)
            state.scatter(rows, part, done)
            if done:
                ended[live] = state.diverged(rows).view(len(live), -1).all(1)
            ended |= (state.spent >= iterations)[units].all(1)
    interrupted = torch.zeros(units.numel(), dtype=torch.bool)
    interrupted[units[~ended].flatten()] = True
    return interrupted
