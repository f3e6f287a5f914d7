"""L-BFGS over the problems of a wave: each descends by itself, and restarts if it ends without a fit."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedgauge.attacks.engine.optimizers import Callback, Descent, lbfgs, minimise, restarted
from fedgauge.attacks.engine.scheduler import OptimizationResult, Variables
from fedgauge.attacks.matching.search import Search, SearchContext


@dataclass(frozen=True)
class LBFGSSearch(lbfgs, Search):
    """L-BFGS of each problem by itself; the budget's iterations count evaluations of a problem, restarts included."""

    def minimise(self, variables: Variables, context: SearchContext) -> OptimizationResult:
        return QuasiNewton(self, context).descend(variables)


class QuasiNewton:
    """One descent of all problems within a budget; those that end without a fit start afresh."""

    def __init__(self, settings: lbfgs, context: SearchContext) -> None:
        self.settings, self.problems, self.starts = settings, context.problems, context.starts
        self.evaluations = context.budget.iterations  # of each problem, including its restarts
        self.limiter, self.clock, self.tracer = context.limiter, context.clock, context.tracer
        self.shapes: dict[str, torch.Size] = {}

    def descend(self, variables: Variables) -> OptimizationResult:
        """Advance the variables of all problems in place."""
        self.shapes = {name: t.shape[1:] for name, t in variables.items()}
        everyone = torch.arange(self.problems.count, device=variables["x"].device)
        restarts, allowed = self.problems.restarts, torch.full_like(everyone, self.evaluations)
        descent = self._search(everyone, _joined(variables), allowed)
        attempt = 0
        while not self.clock.over():
            rows = (self._unfit(descent) & (descent.spent < allowed)).nonzero().flatten()
            if len(rows) == 0:
                break
            attempt += 1
            fresh = _joined(self.starts(rows // restarts, rows % restarts + attempt * restarts))
            left = (allowed - descent.spent)[rows]
            restarted(descent, self._search(rows, fresh, left, descent), rows)
        for name, t in self._apart(descent.x).items():
            variables[name][:] = t
        unfinished = ~descent.ended & (descent.spent < allowed)
        return OptimizationResult(descent.f, descent.spent, unfinished & self.clock.over())

    def _unfit(self, descent: Descent) -> Tensor:
        return ~(descent.f <= self.settings.restart_above) if self.settings.restart_above else ~descent.f.isfinite()

    def _search(self, among: Tensor, start: Tensor, allowed: Tensor, before: Descent | None = None) -> Descent:
        evaluate = partial(self._evaluate, among)
        watch = self._watching(among, before)
        return minimise(evaluate, start, allowed, self.settings, over=self.clock.over, watch=watch)

    def _evaluate(self, among: Tensor, points: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Values and gradients of the chosen problems, as many together as the limiter allows."""
        rows = among[chosen].cpu()

        def together(some: Tensor) -> tuple[Tensor, Tensor]:
            value, slopes = self.problems.value_and_slopes(self._apart(points[some]), rows[some])
            return value, _joined(slopes)

        values, slopes = zip(*self.limiter.each(together, torch.arange(len(points))), strict=True)
        return torch.cat(values), torch.cat(slopes)

    def _watching(self, among: Tensor, before: Descent | None) -> Callback:
        def watch(at: Descent, live: Tensor) -> None:
            x, f, spent, rows = at.x[live], at.f[live], at.spent[live], among[live]
            if before is not None:  # a new draw counts once it is lower
                lower = f < before.f[rows].nan_to_num(torch.inf)
                x, f = torch.where(lower[:, None], x, before.x[rows]), torch.where(lower, f, before.f[rows])
                spent = spent + before.spent[rows]
            self.tracer.follow(rows, spent, f, self.problems.joined(self._apart(x)["x"], rows))

        return watch if self.tracer else lambda at, live: None

    def _apart(self, points: Tensor) -> Variables:
        pieces = points.split([shape.numel() for shape in self.shapes.values()], 1)
        return {name: t.view(-1, *self.shapes[name]) for name, t in zip(self.shapes, pieces, strict=True)}


def _joined(parts: Variables) -> Tensor:
    return torch.cat([t.flatten(1) for t in parts.values()], 1)
