"""Searches for the minimum of an objective, over all problems of a wave together: Adam and L-BFGS."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedgauge.attacks.base import Budget
from fedgauge.attacks.engine.batch_limiter import BatchLimiter
from fedgauge.attacks.engine.deadline import Deadline, Variables
from fedgauge.attacks.engine.optimizers import Adam, Descent, lbfgs, minimise, restarted
from fedgauge.attacks.matching.problems import Problems
from fedgauge.client.components import Checked, NotNegative, Positive, Share

Step = Callable[[Variables, Tensor, float], tuple[Tensor, Variables]]
Shapes = dict[str, torch.Size]  # of each variable of one problem


@dataclass(frozen=True, eq=False)
class SearchContext:
    """The problems of one search, and what it may spend on them."""

    problems: Problems
    budget: Budget
    limiter: BatchLimiter
    clock: Deadline


@dataclass(frozen=True)
class Search(ABC):
    """A method that minimises an objective.

    Args:
        double: compute in float64, for exact attacks.
    """

    double: bool = field(default=False, kw_only=True)
    group = 0.0  # weight of the term that pulls an observation's restarts towards their mean

    @property
    @abstractmethod
    def state_per_variable(self) -> int:
        """Numbers kept for each one that is searched for."""

    @abstractmethod
    def minimise(self, variables: Variables, context: SearchContext) -> tuple[Tensor, Tensor, Tensor]:
        """Advance the variables of all P problems in place.

        Returns:
            (P,) objectives, iterations or evaluations spent, and whether the deadline ended a search early.

        Raises:
            SearchFails: it cannot.
        """


@dataclass(frozen=True)
class AdamSearch(Checked, Search):
    """Adam (Kingma & Ba, 2015), elementwise, so that problems stay independent; the likelihood's weight may grow.

    Args:
        rate: step size, in units of normalised pixels.
        signed: use the gradient's sign (Inverting Gradients).
        cuts: the rate is divided by ten at each of these fractions of the iterations.
        decay: the rate is multiplied by this after every iteration.
        box: keep pixels in [0, 1] after each step.
        anneal: the likelihood's weight at the start; it grows geometrically to 1 over the first half of the iterations.
        group: pulls an observation's restarts towards their mean (GradInversion).
        flat: weight of a penalty on the length of the objective's gradient by the images (Fan et al., 2025). The penalty's
            gradient is a difference over the distance `reach`, so each iteration evaluates two gradients.
        compile: record the whole step once for each wave size, where it always takes the same path. A GPU replays its calls
            together (a CUDA graph). On the CPU torch.compile makes kernels of it: it needs a C++ compiler and some thousand
            iterations to pay off.
    """

    rate: Positive = 0.1
    signed: bool = False
    cuts: tuple[float, ...] = ()
    decay: float = 1.0
    box: bool = True
    anneal: Share = 1.0
    group: NotNegative = 0.0
    flat: NotNegative = 0.0
    reach: Positive = 1e-2
    compile: bool = False
    state_per_variable = 2

    def rate_at(self, iteration: int, iterations: int) -> float:
        passed: int = sum(iteration >= cut * iterations for cut in self.cuts)
        return self.rate * 0.1**passed * self.decay**iteration

    def minimise(self, variables: Variables, context: SearchContext) -> tuple[Tensor, Tensor, Tensor]:
        problems, limiter = context.problems, context.limiter
        step, spent = self._step(problems, limiter), torch.zeros(problems.count, dtype=torch.int64)
        interrupted = torch.zeros(problems.count, dtype=torch.bool)

        def descend(some: Tensor) -> Tensor:
            rows = problems.units[some].flatten()
            part = {name: t[rows] for name, t in variables.items()}
            spent[rows], interrupted[rows] = self._descend(context, step, part, rows)
            for name, t in part.items():
                variables[name][rows] = t
            return problems.value_and_slopes(part, rows)[0]

        objectives = torch.cat(limiter.each(descend, torch.arange(len(problems.units))))
        return objectives, spent, interrupted

    def _step(self, problems: Problems, limiter: BatchLimiter) -> Step:
        if not self.compile:
            return problems.value_and_slopes
        from fedgauge.attacks.matching.compiled_step import CompiledStep

        return CompiledStep(problems, limiter).value_and_slopes

    def _descend(self, context: SearchContext, step: Step, variables: Variables, rows: Tensor) -> tuple[int, bool]:
        """Move some problems in place; returns the iterations, and whether the deadline ended them."""
        problems, iterations, done = context.problems, context.budget.iterations, 0
        optimizer = Adam(variables.values())
        while done < iterations and not context.clock.over():
            weight = self.anneal ** max(0.0, 1 - 2 * done / iterations)
            _, slopes = step(variables, rows, weight)
            if self.flat:
                slopes = self._with_penalty(step, variables, rows, weight, slopes)
            finite = {name: slopes[name].nan_to_num(0.0, 0.0, 0.0) for name in variables}
            signed = problems.signed if self.signed else set()
            moves = [slope.sign() if name in signed else slope for name, slope in finite.items()]
            optimizer.step(moves, self.rate_at(done, iterations))
            for name, (low, high) in problems.bounds.items():
                if self.box or name != "x":
                    torch.clamp(variables[name], low, high, out=variables[name])
            done += 1
        return done, done < iterations

    def _with_penalty(
        self, step: Step, variables: Variables, rows: Tensor, weight: float, slopes: Variables
    ) -> Variables:
        """The gradient of objective + flat * |its gradient by the images|, by a finite difference along that gradient."""
        x = slopes["x"].nan_to_num(0.0, 0.0, 0.0)
        length = x.flatten(1).norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
        away = self.reach * x / length.view(-1, *[1] * (x.ndim - 1))
        _, there = step({**variables, "x": variables["x"] + away}, rows, weight)
        return {name: t + self.flat / self.reach * (there[name] - t) for name, t in slopes.items()}


@dataclass(frozen=True)
class LBFGSSearch(lbfgs, Search):
    """L-BFGS of each problem by itself; the budget's iterations count evaluations of a problem, restarts included.

    A problem that ends without a fit starts afresh.
    """

    def minimise(self, variables: Variables, context: SearchContext) -> tuple[Tensor, Tensor, Tensor]:
        problems, clock = context.problems, context.clock
        shapes = {name: t.shape[1:] for name, t in variables.items()}
        everyone = torch.arange(problems.count, device=variables["x"].device)
        allowed = torch.full_like(everyone, context.budget.iterations)
        descent = self._search(context, shapes, everyone, _joined(variables), allowed)
        attempt = 0
        while not clock.over():
            fits = descent.f <= self.restart_above if self.restart_above else descent.f.isfinite()
            rows = (~fits & (descent.spent < allowed)).nonzero().flatten()
            if len(rows) == 0:
                break
            attempt += 1
            fresh = _joined(problems.starts(rows, attempt))
            left = (allowed - descent.spent)[rows]
            restarted(descent, self._search(context, shapes, rows, fresh, left), rows)
        for name, t in _apart(descent.x, shapes).items():
            variables[name][:] = t
        unfinished = ~descent.ended & (descent.spent < allowed)
        return descent.f, descent.spent, unfinished & clock.over()

    def _search(self, context: SearchContext, shapes: Shapes, among: Tensor, start: Tensor, allowed: Tensor) -> Descent:
        problems = context.problems

        def evaluate(points: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
            """Values and gradients of the chosen problems, as many together as the limiter allows."""
            rows = among[chosen].cpu()

            def together(some: Tensor) -> tuple[Tensor, Tensor]:
                value, slopes = problems.value_and_slopes(_apart(points[some], shapes), rows[some])
                return value, _joined(slopes)

            values, slopes = zip(*context.limiter.each(together, torch.arange(len(points))), strict=True)
            return torch.cat(values), torch.cat(slopes)

        return minimise(evaluate, start, allowed, self, context.clock.over)


def _joined(parts: Variables) -> Tensor:
    return torch.cat([t.flatten(1) for t in parts.values()], 1)


def _apart(points: Tensor, shapes: Shapes) -> Variables:
    pieces = points.split([shape.numel() for shape in shapes.values()], 1)
    return {name: t.view(-1, *shapes[name]) for name, t in zip(shapes, pieces, strict=True)}
