"""Schedules unfinished problems into batches that fit in memory; each problem keeps its own iteration count."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.engine.batch_limiter import BatchLimiter

Variables = dict[str, Tensor]  # what the problems of a wave optimise, by name

TOLERANCE = 1e-3  # the relative decrease of an objective that counts as a fall
CHECK_EVERY = 16  # iterations between two checks of the problems: a check waits for the device, an iteration does not


class Deadline:
    """The end of a budget's seconds."""

    def __init__(self, started: float, seconds: float | None) -> None:
        self.end = None if seconds is None else started + seconds

    def over(self) -> bool:
        """Whether the seconds are spent."""
        return self.end is not None and time.perf_counter() > self.end


@dataclass(frozen=True, eq=False)
class OptimizationResult:
    """How P problems ended.

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
        lowest: (N,) lowest objective so far, at the likelihood's full weight.
        since: (N,) iterations since the objective fell by more than the tolerance.
        finite: (N,) whether the objective was finite at least once since the last check.
    """

    variables: Variables
    moments: dict[str, tuple[Tensor, Tensor]]
    spent: Tensor
    lowest: Tensor
    since: Tensor
    finite: Tensor

    @classmethod
    def at(cls, variables: Variables) -> "OptimizerState":
        """The initial state."""
        x = variables["x"]
        moments = {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in variables.items()}
        since = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        lowest = torch.full_like(since, torch.inf, dtype=x.dtype)
        return cls(variables, moments, since.cpu().clone(), lowest, since, torch.zeros_like(since, dtype=torch.bool))

    def of(self, rows: Tensor) -> "OptimizerState":
        """The state of some problems, to advance and then `scatter` back."""
        return OptimizerState(
            {name: t[rows] for name, t in self.variables.items()},
            {name: (first[rows], second[rows]) for name, (first, second) in self.moments.items()},
            *(t[rows] for t in (self.spent, self.lowest, self.since, self.finite)),
        )

    def scatter(self, rows: Tensor, part: "OptimizerState", done: int) -> None:
        """Write back the state of some problems after `done` iterations."""
        for name, t in part.variables.items():
            self.variables[name][rows] = t
            for ours, theirs in zip(self.moments[name], part.moments[name], strict=True):
                ours[rows] = theirs
        self.spent[rows] += done
        self.lowest[rows], self.since[rows], self.finite[rows] = part.lowest, part.since, part.finite

    def finished(self, rows: Tensor, patience: int) -> Tensor:
        """Which of some problems are due for a check and have diverged or stalled (N,), in host memory."""
        due = (self.spent[rows] % CHECK_EVERY == 0) & (self.spent[rows] > 0)
        if not due.any():
            return due
        gone = ~self.finite[rows]
        if patience:
            gone |= self.since[rows] >= patience
        self.finite[rows[due]] = False
        return due & gone.cpu()

    def record(self, objectives: Tensor, full: Tensor | None) -> None:
        """Record whether objectives (N,) fell, by TOLERANCE at least, without waiting for the device.

        Args:
            full: (N,) whether the likelihood has its full weight, since others cannot be compared; None: all have.
        """
        if full is not None:
            objectives = torch.where(full, objectives, torch.inf)
        margin = torch.where(self.lowest.isfinite(), TOLERANCE * self.lowest.abs(), 0.0)
        fell = objectives < self.lowest - margin
        self.since.add_(1 if full is None else full).masked_fill_(fell, 0)
        self.lowest.copy_(torch.where(fell, objectives, self.lowest))


StepFn = Callable[
    [OptimizerState, Tensor, int], int
]  # state of some problems, their rows, maximal iterations -> iterations done


def advance(
    state: OptimizerState,
    units: Tensor,
    iterations: int,
    patience: int,
    limiter: BatchLimiter,
    clock: Deadline,
    stretch: StepFn,
) -> Tensor:
    """Advance all problems in place until each has finished; returns (P,) which the deadline interrupted.

    A problem finishes when its iterations are spent, when its objective was never finite between two checks, or when it
    has stalled; the next waiting one takes its place. If memory runs out during a stretch, only that stretch is repeated.

    Args:
        units: (U, R) problems that only advance together; the limiter counts units.
        patience: iterations without a fall after which a problem counts as stalled; 0: never.
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
                ended[live] = state.finished(rows, patience).view(len(live), -1).all(1)
            ended |= (state.spent >= iterations)[units].all(1)
    interrupted = torch.zeros(units.numel(), dtype=torch.bool)
    interrupted[units[~ended].flatten()] = True
    return interrupted
