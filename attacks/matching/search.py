"""Searches for the minimum of an objective, over all problems of a wave together; here by Adam."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fedgauge.attacks.base import Budget
from fedgauge.attacks.engine.batch_limiter import BatchLimiter
from fedgauge.attacks.engine.optimizers import adam, per_iteration_count
from fedgauge.attacks.engine.scheduler import Deadline, OptimizationResult, OptimizerState, Variables, advance
from fedgauge.attacks.engine.trace import Tracer
from fedgauge.attacks.matching.problems import Problems
from fedgauge.client.components import check_above_zero, check_at_least, check_part

Step = Callable[[Variables, Tensor, Tensor | float, Tensor | None], tuple[Tensor, Variables]]
Starts = Callable[[Tensor, Tensor], Variables]  # observations (N,), numbers of their draws (N,) -> fresh starts


@dataclass(frozen=True, eq=False)
class SearchContext:
    """The problems of one search, and what it may spend on them.

    Args:
        starts: draws fresh starts.
    """

    problems: Problems
    starts: Starts
    budget: Budget
    limiter: BatchLimiter
    clock: Deadline
    tracer: Tracer


@dataclass(frozen=True)
class Search(ABC):
    """How an objective is minimised.

    Args:
        double: compute in float64, for exact attacks.
    """

    double: bool = field(default=False, kw_only=True)

    @property
    def coupling(self) -> float:
        """Weight of the term that pulls an observation's restarts towards their mean."""
        return 0.0

    @property
    @abstractmethod
    def state_per_variable(self) -> int:
        """Numbers kept for each one that is searched for."""

    @abstractmethod
    def minimise(self, variables: Variables, context: SearchContext) -> OptimizationResult:
        """Advance the variables of all problems in place; SearchFails says why it cannot."""

    def nearby(self, x: Tensor, at: Sequence[int]) -> Tensor | None:
        """Displacements (samples, N or 1, images, C, H, W) over which the objective is averaged; None: there are none.

        Args:
            at: each problem's iteration.
        """
        return None


@dataclass(frozen=True)
class AdamSearch(adam, Search):
    """Adam, whose objective may change from iteration to iteration.

    Args:
        box: keep pixels in [0, 1] after each step.
        anneal: the likelihood's weight at the start; it grows geometrically to 1 over the first half of the iterations.
        samples, radius: average the objective over images drawn uniformly from a box of this half-width around the guess.
        group: pulls an observation's restarts towards their mean (GradInversion).
        flat: weight of the length of the objective's slope by the images, penalised too (Fan et al., 2025), whose own slope is a
            difference over the distance `reach`: each iteration evaluates two gradients.
        compile: compile the whole step by torch.compile, once for each wave size, where it always takes the same path. Needs
            a C++ compiler; without one the attack is not applicable. LeNet on a CPU thread: 1.5 to 3 times faster after 60 to
            85 CPU seconds of compiling, which pays off from 3,000 iterations (K = 64) or 8,000 (K = 8).
    """

    box: bool = True
    anneal: float = 1.0
    samples: int = 1
    radius: float = 0.0
    group: float = 0.0
    flat: float = 0.0
    reach: float = 1e-2
    compile: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "group", "radius", "flat")
        check_above_zero(self, "reach")
        check_at_least(self, 1, "samples")
        check_part(self, "anneal")

    @property
    def coupling(self) -> float:
        return self.group

    def minimise(self, variables: Variables, context: SearchContext) -> OptimizationResult:
        problems, limiter, clock = context.problems, context.limiter, context.clock
        state, units, iterations = OptimizerState.at(variables), problems.units, context.budget.iterations
        stretch = partial(self._advance, context, self._step(problems, limiter))
        interrupted = advance(state, units, iterations, self.patience, limiter, clock, stretch)

        def value(some: Tensor) -> Tensor:
            rows = units[some].flatten()
            return problems.value({name: t[rows] for name, t in variables.items()}, rows)

        return OptimizationResult(torch.cat(limiter.each(value, torch.arange(len(units)))), state.spent, interrupted)

    def _step(self, problems: Problems, limiter: BatchLimiter) -> Step:
        if not (self.compile and problems.one_path):
            return problems.value_and_slopes
        from fedgauge.attacks.matching.compiled_step import CompiledStep

        return CompiledStep(problems, limiter).value_and_slopes

    def _advance(self, context: SearchContext, step: Step, part: OptimizerState, rows: Tensor, length: int) -> int:
        """Advance some problems in place, each from its own iteration; returns the iterations done."""
        problems, variables, iterations = context.problems, part.variables, context.budget.iterations
        counts, bounds = part.spent.tolist(), {k: b for k, b in problems.bounds.items() if self.box or k != "x"}
        for done in range(length):
            if context.clock.over():
                return done
            at = [count + done for count in counts]
            weight = per_iteration_count(lambda n: self.anneal ** max(0.0, 1 - 2 * n / iterations), at, part.lowest)
            nearby = self.nearby(variables["x"], at)
            value, slopes = step(variables, rows, weight, nearby)
            if self.flat:
                slopes = self._with_penalty(step, variables, rows, weight, nearby, slopes)
            part.finite.logical_or_(value.isfinite())
            if self.patience and not (isinstance(weight, float) and weight < 1):
                part.record(value, weight == 1 if isinstance(weight, Tensor) else None)
            whole = nearby is None and isinstance(weight, float) and weight == 1
            self._keep(context, variables, rows, at, value if whole else None)
            for name, t in variables.items():
                slope = slopes[name].nan_to_num(0.0, 0.0, 0.0)
                slope = slope.sign() if self.signed and name in problems.signed else slope
                self.step(t, slope, part.moments[name], at, iterations)
            for name, (low, high) in bounds.items():
                torch.clamp(variables[name], low, high, out=variables[name])
        return length

    def _with_penalty(
        self,
        step: Step,
        variables: Variables,
        rows: Tensor,
        weight: Tensor | float,
        nearby: Tensor | None,
        slopes: Variables,
    ) -> Variables:
        """The slopes of objective + flat * |its slope by the images|: that slope's change along itself."""
        x = slopes["x"].nan_to_num(0.0, 0.0, 0.0)
        length = x.flatten(1).norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
        away = self.reach * x / length.view(-1, *[1] * (x.ndim - 1))
        _, there = step(variables, rows, weight, away[None] if nearby is None else nearby + away)
        return {name: t + self.flat / self.reach * (there[name] - t) for name, t in slopes.items()}

    def _keep(
        self, context: SearchContext, variables: Variables, rows: Tensor, at: Sequence[int], value: Tensor | None
    ) -> None:
        """Keep the snapshots that are due; values (N,) are those of the whole objective, None where these are not known."""
        due = torch.tensor([context.tracer.due(n) for n in at])
        if due.any():
            value = context.problems.value(variables, rows) if value is None else value
            images = context.problems.joined(variables["x"][due], rows[due])
            context.tracer.keep(rows[due], torch.tensor(at)[due], value[due], images)

    def nearby(self, x: Tensor, at: Sequence[int]) -> Tensor | None:
        """Displacements, uniform in the box; a problem's iteration decides its draws, so that packing changes nothing."""
        if not self.radius:
            return None
        drawn = {n: torch.rand(self.samples, *x.shape[1:], generator=torch.Generator().manual_seed(n)) for n in set(at)}
        boxes = [drawn[n] for n in (at if len(drawn) > 1 else at[:1])]
        return (self.radius * (2 * torch.stack(boxes, 1) - 1)).to(x)
