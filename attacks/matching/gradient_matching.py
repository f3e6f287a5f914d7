"""Gradient matching: find the images whose update is the observed one, under a prior.

It reconstructs argmin_x likelihood(seen, forward(x)) + sum of weight * prior(x), for K observations x R restarts together.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedgauge.attacks import labels as labelling
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Status, Stream, Wave, not_applicable
from fedgauge.attacks.engine.batch_limiter import BatchLimiter, largest_batch
from fedgauge.attacks.engine.optimizers import adam, lbfgs, per_iteration_count
from fedgauge.attacks.engine.scheduler import Deadline, OptimizationResult, OptimizerState, Variables, advance
from fedgauge.attacks.engine.trace import Tracer, check_snapshots
from fedgauge.attacks.matching import local_steps
from fedgauge.attacks.matching.model_check import check_parameters
from fedgauge.attacks.matching.problems import ModelFails, Problems
from fedgauge.attacks.matching.quasi_newton import QuasiNewton
from fedgauge.attacks.matching.settings import MatchingSettings
from fedgauge.client.models.losses import takes_probabilities
from fedgauge.client.update import Update

Step = Callable[[Variables, Tensor, Tensor | float, Tensor | None], tuple[Tensor, Variables]]


@dataclass(frozen=True)
class GradientMatching(MatchingSettings, Attack):
    """The engine: optimises all observations and restarts of a wave together, with a recipe's settings."""

    @property
    def label_source(self) -> Literal["restored", "optimised"]:
        return self.labels

    @property
    def needs_derivative(self) -> bool:
        return True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        return self.continued(wave, known, budget, streams, None)

    def traced(self, snapshots: int) -> "GradientMatching":
        check_snapshots(snapshots)
        return replace(self, trace=snapshots)

    def continued(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream], start: Tensor | None
    ) -> list[Reconstruction]:
        """`reconstruct` from given images (K, B, C, H, W) in [0, 1] instead of noise; further restarts still draw noise."""
        started = time.perf_counter()
        try:
            check_parameters(known.model, wave.params)
        except ValueError as error:
            return not_applicable(wave, str(error))
        if reason := _refusal(known):
            return not_applicable(wave, reason)
        soft = self.labels == "optimised" and known.labels is None
        if soft and not takes_probabilities(known.loss, known.classes):
            return not_applicable(wave, "the loss takes whole labels only, so they cannot be optimised with the images")
        like = next(iter(wave.params.values()))
        try:
            epochs = local_steps.epochs(known.chain, known.batch_size) if self.tied else 1
            y = None if soft else self._labels(wave, known, budget.restarts, streams, epochs).to(like.device)
            if self.double:
                wave, known = _doubled(wave, known)
            problems = Problems(self, wave, known, y, budget.restarts, like.dtype, epochs)
            tracer = Tracer(self.trace, budget.iterations, problems.count, known.pixels)
            draw = partial(self._draw, problems=problems, streams=streams, soft=soft)
            rows = torch.arange(problems.count)
            variables = draw(rows // budget.restarts, rows % budget.restarts)
            limiter = self._batch_limiter(problems, variables)
            step = self._step(problems, limiter)
        except ValueError as error:
            return not_applicable(wave, str(error))
        if start is not None:
            variables["x"][:: budget.restarts] = known.normalise(start).repeat(1, epochs, 1, 1, 1).to(variables["x"])
        clock = Deadline(started, budget.seconds)
        try:
            if isinstance(self.optimizer, lbfgs):
                settings = self.optimizer
                outcome = QuasiNewton(settings, problems, draw, budget.iterations, limiter, clock, tracer).descend(
                    variables
                )
            else:
                outcome = self._adam(problems, variables, budget, limiter, clock, tracer, step)
        except ModelFails as error:
            return not_applicable(wave, str(error))
        images = problems.joined(variables["x"], rows)
        tracer.keep(rows, outcome.spent, outcome.objectives, images)
        labels = problems.joined_labels(variables, rows)
        return self._answers(images, labels, outcome, problems, tracer, budget, time.perf_counter() - started)

    def _labels(self, wave: Wave, known: Knowledge, restarts: int, streams: Sequence[Stream], epochs: int) -> Tensor:
        """Labels (P, images) of each problem; if steps, or clients of a sum, take slices, restarts try different ones."""
        y = labelling.restore(wave, known)
        size = known.chain.slice_of(known.batch_size)
        if size >= known.batch_size or (known.labels is not None and not self.tied):
            return y.repeat_interleave(restarts, 0)
        drawn = [stream("assignments", 0) for stream in streams]
        orders = [labelling.assignments(y[k], size, restarts, rng, epochs) for k, rng in enumerate(drawn)]
        return torch.cat([order[torch.arange(restarts) % len(order)] for order in orders])

    def _batch_limiter(self, problems: Problems, variables: Variables) -> BatchLimiter:
        """Limits the problems to what fits into free memory besides the optimiser's state of all of them."""
        x, units = variables["x"], problems.units

        def dry(count: int) -> None:
            rows = units[:count].flatten()
            part = {name: t[rows] for name, t in variables.items()}
            problems.value_and_slopes(part, rows, 1.0, self._nearby(part["x"], [0]))

        held = self.optimizer.state_per_variable * sum(t.numel() * t.element_size() for t in variables.values())
        return BatchLimiter(largest_batch(dry, len(units), x.device, held))

    def _step(self, problems: Problems, limiter: BatchLimiter) -> Step:
        if not self.compile or problems.way.route == "loop":  # a recorded loop would keep its branches
            return problems.value_and_slopes
        from fedgauge.attacks.matching.compiled_step import CompiledStep

        return CompiledStep(problems, limiter).value_and_slopes

    def _answers(
        self,
        images: Tensor,
        labels: Tensor,
        outcome: OptimizationResult,
        problems: Problems,
        tracer: Tracer,
        budget: Budget,
        seconds: float,
    ) -> list[Reconstruction]:
        """Each observation's restart with the lowest objective, from images (P, B, C, H, W) and labels (P, B)."""
        restarts, known = problems.restarts, problems.known
        objectives = outcome.objectives
        objectives = torch.where(objectives.isfinite(), objectives, torch.inf).view(-1, restarts)
        answers = []
        for k, best in enumerate(objectives.argmin(1).tolist()):
            row, own = k * restarts + best, slice(k * restarts, (k + 1) * restarts)
            x = known.pixels(images[row]).clamp(0, 1).to(problems.dtype)
            done = int(outcome.spent[own].max())
            status: Status = "converged"
            reason = problems.way.note
            if not torch.isfinite(objectives[k, best]) or not torch.isfinite(x).all():
                status, reason = "diverged", "the objective or the image is not finite"
            elif outcome.interrupted[own].any():
                status, reason = "out_of_budget", f"{done} of {budget.iterations} iterations in {budget.seconds} s"
            share = seconds / len(objectives)
            objective, trace = float(objectives[k, best]), tracer.of(row)
            answers.append(Reconstruction(x, labels[row], objective, done, share, status, reason, trace))
        return answers

    def _draw(
        self, owners: Tensor, draws: Tensor, *, problems: Problems, streams: Sequence[Stream], soft: bool
    ) -> Variables:
        """Fresh starts: Gaussian images (N, images, C, H, W), and Gaussian logits (N, images, classes) for soft labels."""
        known, images, like = problems.known, problems.images, next(iter(problems.params.values()))

        def normal(purpose: str, *size: int) -> Tensor:
            pairs = zip(owners.tolist(), draws.tolist(), strict=True)
            return torch.stack([torch.randn(size, generator=streams[k](purpose, r)) for k, r in pairs]).to(like)

        variables = {"x": normal("start", images, *known.shape)}
        if soft:
            variables["y"] = normal("labels", images, known.classes)
        if self.surrogate:
            variables["at"] = torch.full((len(owners), 1), 0.5).to(like)
        for name, latent in problems.noise.items():
            variables[name] = torch.zeros(len(owners), *latent.shape).to(like)  # the most likely value
        for name, (_, explained) in problems.explained.items():
            variables[name] = torch.zeros(len(owners), images, explained.numbers).to(like)
        return variables

    def _adam(
        self,
        problems: Problems,
        variables: Variables,
        budget: Budget,
        limiter: BatchLimiter,
        clock: Deadline,
        tracer: Tracer,
        step: Step,
    ) -> OptimizationResult:
        """Advance all problems in place."""
        assert isinstance(self.optimizer, adam)
        state, units = OptimizerState.at(variables), problems.units

        def stretch(part: OptimizerState, rows: Tensor, length: int) -> int:
            return self._advance(problems, part, rows, length, budget, clock, tracer, step)

        interrupted = advance(state, units, budget.iterations, self.optimizer.patience, limiter, clock, stretch)

        def value(some: Tensor) -> Tensor:
            rows = units[some].flatten()
            return problems.value({name: t[rows] for name, t in variables.items()}, rows)

        return OptimizationResult(torch.cat(limiter.each(value, torch.arange(len(units)))), state.spent, interrupted)

    def _advance(
        self,
        problems: Problems,
        part: OptimizerState,
        rows: Tensor,
        length: int,
        budget: Budget,
        clock: Deadline,
        tracer: Tracer,
        step: Step,
    ) -> int:
        """Advance some problems in place, each from its own iteration; returns the iterations done."""
        assert isinstance(self.optimizer, adam)
        (low, high), variables = problems.bounds(), part.variables
        counts, unsigned = part.spent.tolist(), {"at", *problems.explained}
        for done in range(length):
            if clock.over():
                return done
            at = [count + done for count in counts]
            likelihood_weight = per_iteration_count(
                lambda n: self.anneal ** max(0.0, 1 - 2 * n / budget.iterations), at, part.lowest
            )
            nearby = self._nearby(variables["x"], at)
            value, slopes = step(variables, rows, likelihood_weight, nearby)
            self._note(part, value, likelihood_weight)
            due = torch.tensor([tracer.due(n) for n in at])
            if due.any():
                judged = (
                    value
                    if isinstance(likelihood_weight, float) and likelihood_weight == 1 and nearby is None
                    else None
                )
                judged = problems.value(variables, rows) if judged is None else judged
                images = problems.joined(variables["x"][due], rows[due])
                tracer.keep(rows[due], torch.tensor(at)[due], judged[due], images)
            for name, t in variables.items():
                slope = slopes[name].nan_to_num(0.0, 0.0, 0.0)
                slope = slope.sign() if self.optimizer.signed and name not in unsigned else slope
                self.optimizer.step(t, slope, part.moments[name], at, budget.iterations)
            if self.box:
                torch.clamp(variables["x"], low, high, out=variables["x"])
            if self.surrogate:
                variables["at"].clamp_(0, 1)
        return length

    def _note(self, part: OptimizerState, value: Tensor, likelihood_weight: Tensor | float) -> None:
        """Record the objectives for the next check of these problems."""
        assert isinstance(self.optimizer, adam)
        part.finite.logical_or_(value.isfinite())
        if self.optimizer.patience and not (isinstance(likelihood_weight, float) and likelihood_weight < 1):
            part.record(
                value,
                self.optimizer.tolerance,
                likelihood_weight == 1 if isinstance(likelihood_weight, Tensor) else None,
            )

    def _nearby(self, x: Tensor, at: Sequence[int]) -> Tensor | None:
        """Displacements (samples, N or 1, images, C, H, W), uniform in the box; None if the radius is 0.

        Args:
            at: each problem's iteration, which decides its draws, so that packing changes nothing.
        """
        if not self.radius:
            return None
        drawn = {n: torch.rand(self.samples, *x.shape[1:], generator=_seeded(n)) for n in set(at)}
        boxes = [drawn[n] for n in (at if len(drawn) > 1 else at[:1])]
        return (self.radius * (2 * torch.stack(boxes, 1) - 1)).to(x)


def _seeded(iteration: int) -> torch.Generator:
    return torch.Generator().manual_seed(iteration)


def _refusal(known: Knowledge) -> str:
    for name, module in known.model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            return (
                f"layer {name!r} is dropout in train mode, and the attacker's differentiable update lacks its draws: set its p "
                "to 0"
            )
    return ""


def _doubled(wave: Wave, known: Knowledge) -> tuple[Wave, Knowledge]:
    def double(tensors: Update) -> Update:
        return {k: t.double() for k, t in tensors.items()}

    wave = replace(wave, params=double(wave.params), update=double(wave.update))
    loss = copy.deepcopy(known.loss).double() if isinstance(known.loss, torch.nn.Module) else known.loss
    try:
        model = copy.deepcopy(known.model)
    except Exception as error:  # whatever the model holds may refuse in its own words
        raise ValueError(
            f"the model cannot be copied ({type(error).__name__}: {error}), and float64 needs a copy: set double = false, "
            "or keep what cannot be copied out of the module"
        ) from error
    return wave, replace(known, model=model.double(), loss=loss)
