"""Schedules unfinished problems into batches that fit in memory, and traces them; each has its own iteration count."""

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.base import Trace
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


class Tracer:
    """Snapshots of P problems in progress, each a possible result; they change no bit of the final one.

    Args:
        snapshots: about this many of each problem; 0 keeps nothing.
        iterations: of the whole budget, over which snapshots are evenly spaced.
        pixels: converts the optimised images to pixels.
    """

    def __init__(self, snapshots: int, iterations: int, problems: int, pixels: Callable[[Tensor], Tensor]) -> None:
        gaps = min(snapshots - 1, iterations)
        self._due = tuple(round(i * iterations / gaps) for i in range(gaps + 1)) if snapshots else ()
        self._pixels = pixels
        self._kept: list[dict[int, tuple[float, Tensor]]] = [{} for _ in range(problems)]  # by iteration

    def __bool__(self) -> bool:
        return bool(self._due)

    def due(self, iteration: int) -> bool:
        """True if a snapshot is due at an iteration of problems that advance together."""
        return iteration in self._due

    def follow(self, rows: Tensor, iterations: Tensor, objectives: Tensor, x: Tensor) -> None:
        """Keep the problems for which a snapshot has become due since their last one."""
        passed = [
            bisect_right(self._due, iteration) > bisect_right(self._due, max(self._kept[row], default=-1))
            for row, iteration in zip(rows.tolist(), iterations.tolist(), strict=True)
        ]
        chosen = torch.tensor(passed, device=x.device)
        self.keep(rows[chosen], iterations[chosen], objectives[chosen], x[chosen])

    def keep(self, rows: Tensor, iterations: Tensor, objectives: Tensor, x: Tensor) -> None:
        """Keep a snapshot of some problems: iterations (N,), objectives (N,), images (N, B, C, H, W)."""
        if not self:
            return
        images = self._pixels(x.detach()).clamp(0, 1).nan_to_num(0.0).mul(255).round().to("cpu", torch.uint8)
        judged = torch.where(objectives.isfinite(), objectives, torch.inf).tolist()
        for row, iteration, objective, image in zip(rows.tolist(), iterations.tolist(), judged, images, strict=True):
            self._kept[row][iteration] = (objective, image)

    def of(self, row: int) -> Trace | None:
        """The trace of one problem; None if there are no snapshots."""
        kept = sorted(self._kept[row].items())
        if not kept:
            return None
        return Trace(
            torch.tensor([iteration for iteration, _ in kept]),
            torch.tensor([objective for _, (objective, _) in kept], dtype=torch.float64),
            torch.stack([image for _, (_, image) in kept]),
        )
