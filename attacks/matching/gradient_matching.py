"""Gradient matching: find images with the observed update, under a prior.

It reconstructs argmin_x likelihood(seen, forward(x)) + sum of weight * prior(x), for K observations x R restarts together.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedgauge.attacks import label_restoration as labelling
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Status, Streams, Wave, not_applicable
from fedgauge.attacks.engine.batch_limiter import BatchLimiter, largest_batch
from fedgauge.attacks.engine.compatibility import doubled, parameter_problem
from fedgauge.attacks.engine.deadline import Deadline, Variables
from fedgauge.attacks.engine.gradient_distances import likelihood, rounding_likelihood
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import gaussian_by_class, other_priors
from fedgauge.attacks.matching.problems import Problems, SearchFails
from fedgauge.attacks.matching.search import AdamSearch, Search, SearchContext
from fedgauge.attacks.problem import refuse
from fedgauge.attacks.solved_labels import NotRestored
from fedgauge.client.models.losses import Expected, is_mean, takes_probabilities


@dataclass(frozen=True)
class GradientMatching(Attack):
    """The engine: searches for all observations and restarts of a wave together; a recipe is an objective and a search."""

    objective: Objective = field(default_factory=Objective)
    search: Search = field(default_factory=AdamSearch)
    tunes: ClassVar[bool] = True

    @property
    def label_source(self) -> Literal["restored", "optimised"]:
        return self.objective.labels

    needs_derivative = True

    @property
    def trains_first(self) -> bool:
        return any(prior.trains_first for prior in self.objective.priors)

    def variants(self, known: Knowledge) -> Mapping[str, Attack]:
        """Other priors: a stronger total variation, and normal distributions fitted to auxiliary images."""
        own = self.objective.likelihood or likelihood(known.chain.update_distribution, known.batch_size)
        found: dict[str, Attack] = {}
        for words, priors in other_priors(self.objective.priors, known, own.density).items():
            found[words] = self.with_objective(priors=priors)
        levels = known.chain.levels_in_norm
        if levels and found:
            words, priors = gaussian_by_class(self.objective.priors, 1.0)
            rounding = rounding_likelihood(levels)
            found[f"{words}, likelihood of the rounding"] = self.with_objective(likelihood=rounding, priors=priors)
        return found

    def with_objective(self, **changes: Any) -> "GradientMatching":
        return replace(self, objective=replace(self.objective, **changes))

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        return self.continued(wave, known, budget, streams, None)

    def continued(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams, start: Tensor | None
    ) -> list[Reconstruction]:
        """`reconstruct` from given images (K, B, C, H, W) in [0, 1] instead of noise; further restarts still draw noise."""
        try:
            found = self.search_all(wave, known, budget, streams, start)
        except SearchFails as error:
            return not_applicable(wave, str(error))
        known, dtype = found.problems.known, found.problems.dtype
        return found.best(budget, lambda x: known.examples(x).to(dtype))

    def search_all(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams, start: Tensor | None = None
    ) -> "EveryRestart":
        """Search with every restart of every observation.

        Raises:
            SearchFails: that is impossible.
        """
        clock = Deadline(budget.seconds)
        try:
            problems = self._problems(wave, known, budget.restarts, streams)
            rows = torch.arange(problems.count)
            variables = problems.starts(rows)
            limiter = self._batch_limiter(problems, variables)
        except ValueError as error:
            raise SearchFails(str(error)) from error
        if start is not None:
            first = problems.free(known.normalise(start)).repeat(1, problems.epochs, *[1] * len(known.shape))
            variables["x"][:: budget.restarts] = first.to(variables["x"])
        outcome = self.search.minimise(variables, SearchContext(problems, budget, limiter, clock))
        return EveryRestart(problems, *problems.joined(variables, rows), *outcome)

    def _problems(self, wave: Wave, known: Knowledge, restarts: int, streams: Streams) -> Problems:
        refuse(parameter_problem(known.model, wave.params))
        like = next(iter(wave.params.values()))
        y = None
        if known.labels is not None or self.objective.labels == "restored":
            with suppress(NotRestored):
                y = self._labels(wave, known, restarts, streams).to(like.device)
        if y is None and not takes_probabilities(known.loss, known.classes, known.label_kind):
            if not is_mean(known.loss, known.classes, known.label_kind):
                why = "the loss takes whole labels only and is no mean over the examples, so labels cannot be optimised"
                raise ValueError(f"{why}: let it take floats as labels")
            known = replace(known, loss=Expected(known.loss, reads_input=True))
        if self.search.double:
            known = doubled(known)
            params, update = ({k: t.double() for k, t in part.items()} for part in (wave.params, wave.update))
            wave = replace(wave, params=params, update=update)
        return Problems(self.objective, wave, known, y, restarts, like.dtype, self.search.group, streams)

    def _labels(self, wave: Wave, known: Knowledge, restarts: int, streams: Streams) -> Tensor:
        """Labels (P, images) of each problem; if steps, or clients of a sum, take slices, restarts try different ones."""
        training = self.objective.training
        epochs, y = training.epochs(known), labelling.restore(wave, known)
        size = known.chain.slice_of(known.batch_size)
        if size >= known.batch_size or (known.labels is not None and training.order_known):
            return y.repeat_interleave(restarts, 0)
        drawn = [stream("assignments", 0) for stream in streams]
        values, which = zip(*(own.unique(dim=0, return_inverse=True) for own in y), strict=True)
        found = []
        for own, numbers, rng in zip(values, which, drawn, strict=True):
            order = labelling.assignments(numbers, size, restarts, rng, epochs)
            found.append(own[order[torch.arange(restarts) % len(order)]])
        return torch.cat(found)

    def _batch_limiter(self, problems: Problems, variables: Variables) -> BatchLimiter:
        x, units = variables["x"], problems.units

        def dry(count: int) -> None:
            rows = units[:count].flatten()
            part = {name: t[rows] for name, t in variables.items()}
            problems.value_and_slopes(part, rows)

        held = self.search.state_per_variable * sum(t.numel() * t.element_size() for t in variables.values())
        return BatchLimiter(largest_batch(dry, len(units), x.device, held))


@dataclass(frozen=True, eq=False)
class EveryRestart:
    """The results of the P = K * R searches of a wave.

    Args:
        images: normalised (P, B, ...); labels: (P, B).
        values: (P,) of the objective; spent: (P,) iterations; interrupted: (P,) whether the deadline ended it early.
    """

    problems: Problems
    images: Tensor
    labels: Tensor
    values: Tensor
    spent: Tensor
    interrupted: Tensor

    @cached_property
    def objectives(self) -> Tensor:
        return torch.where(self.values.isfinite(), self.values, torch.inf).view(-1, self.problems.restarts)

    def best(self, budget: Budget, examples: Callable[[Tensor], Tensor]) -> list[Reconstruction]:
        """Each observation's restart with the lowest objective; `examples` makes examples of its images."""
        restarts, answers = self.problems.restarts, []
        for k, restart in enumerate(self.objectives.argmin(1).tolist()):
            row, own = k * restarts + restart, slice(k * restarts, (k + 1) * restarts)
            x, value, done = examples(self.images[row]), float(self.objectives[k, restart]), int(self.spent[own].max())
            status: Status = "converged"
            reason = self.problems.way.note
            if not (math.isfinite(value) and x.isfinite().all()):
                status, reason = "diverged", "the objective or the result is not finite"
            elif self.interrupted[own].any():
                status, reason = "out_of_budget", f"{done} of {budget.iterations} iterations in {budget.seconds} s"
            answers.append(Reconstruction(x, self.labels[row], value, done, 0.0, status, reason))
        return answers
