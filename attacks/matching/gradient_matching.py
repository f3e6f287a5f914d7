"""Gradient matching: find the images whose update is the one that was seen, under a prior; recipes name the papers.

reconstruct argmin_x  likelihood(seen, forward(x)) + sum of weight * prior(x)  for K observations x R restarts together.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedgauge.attacks import labels as labelling
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Status, Stream, Wave, not_applicable
from fedgauge.attacks.engine.batch_limiter import BatchLimiter, largest_batch
from fedgauge.attacks.engine.distances import Distance, cosine, squared
from fedgauge.attacks.engine.optimizers import Optimizer, adam, lbfgs, per_iteration_count
from fedgauge.attacks.engine.scheduler import Deadline, OptimizationResult, OptimizerState, Variables, advance
from fedgauge.attacks.engine.trace import Tracer, check_snapshots
from fedgauge.attacks.matching import local_steps
from fedgauge.attacks.matching.priors import PRIOR, Prior, batch_statistics, magnitude, total_variation
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.quasi_newton import QuasiNewton
from fedgauge.client.components import Table, build
from fedgauge.client.models.losses import takes_probabilities
from fedgauge.client.update import Update

CUTS = (3 / 8, 5 / 8, 7 / 8)
Step = Callable[[Variables, Tensor, Tensor | float, Tensor | None], tuple[Tensor, Variables]]


@dataclass(frozen=True)
class GradientMatching(Attack):
    """The engine; its fields make the recipe.

    Args:
        likelihood: of the seen update; None: what the chain's own noise makes it, as far as the attacker knows the chain.
        priors: on the images; group: pulls an observation's restarts towards their mean (GradInversion).
        optimizer: adam or lbfgs; for lbfgs the budget's iterations are evaluations of a problem, restarts included.
        box: keep pixels in [0, 1] after each step (adam).
        labels: "restored" before matching (or given by the threat model), or "optimised" beside the image as in DLG.
        anneal: the likelihood's weight at the start; it grows geometrically to 1 over the first half of the iterations.
        samples, radius: average the objective over images drawn uniformly from a box of this half-width round the guess.
        surrogate: for several local steps: match one gradient, at a point between the weights before and after them that
            is found too (SME: Zhu et al., 2023), instead of unrolling the steps.
        latent: for a model whose layers draw noise: find that too, under its normal density of this weight (of a mean
            number's square / 2); None: by their mean.
        draws: average the objective over so many of the attacker's own draws of what has no noise-free form (expectation
            over transformation); 0: none is drawn.
        double: in float64, for attacks that are exact.
        tied: where local steps take slices of the batch in an order that is not known, in every epoch another: the weight of
            the term that ties the epochs' copies of the images (fedgauge.attacks.matching.local_steps); 0: the order is known.
        aggregate: of an epoch's images, which is tied.
        compile: the whole step by torch.compile, once for a wave of this size; needs a C++ compiler, without which the attack
            is not applicable. LeNet on a CPU thread: 1.5 to 3 times faster, after 60 to 85 CPU seconds of compiling, which
            pays from 3,000 iterations (K = 64) or 8,000 (K = 8).
        trace: about so many snapshots are kept of each problem on its way; 0: none.
    """

    likelihood: Distance | None = None
    priors: tuple[Prior, ...] = ()
    optimizer: Optimizer = field(default_factory=adam)
    box: bool = True
    labels: Literal["restored", "optimised"] = "restored"
    group: float = 0.0
    anneal: float = 1.0
    samples: int = 1
    radius: float = 0.0
    surrogate: bool = False
    latent: float | None = None
    draws: int = 0
    double: bool = False
    tied: float = 0.0
    aggregate: local_steps.Aggregate = "mean"
    compile: bool = False
    trace: int = 0

    def __post_init__(self) -> None:
        weights = {"group": self.group, "radius": self.radius, "tied": self.tied, "latent": self.latent or 0.0}
        for name, value in {**weights, "draws": self.draws}.items():
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        for prior in self.priors:
            if not prior.weight >= 0:
                raise ValueError(f"the weight of {type(prior).__name__} must not be negative, got {prior.weight}")
        if not 0 < self.anneal <= 1:
            raise ValueError(f"anneal must be above 0 and at most 1, got {self.anneal}")
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        if self.trace:
            check_snapshots(self.trace)
        if self.latent is not None and (self.tied or self.surrogate):
            raise ValueError("latent needs local steps whose examples are known: it goes without tied and surrogate")
        if self.draws and (self.surrogate or self.compile):
            raise ValueError(
                "draws needs the whole chain, and what it draws is not compiled: without surrogate and compile"
            )
        if self.tied and self.surrogate:
            raise ValueError("surrogate takes no local steps whose order could be unknown: it goes without tied")
        if isinstance(self.optimizer, lbfgs):
            if self.group or self.radius or self.anneal < 1 or self.surrogate:
                raise ValueError(
                    "lbfgs needs one smooth objective a problem: without group, anneal, radius and surrogate"
                )
            if self.compile:
                raise ValueError(
                    "lbfgs advances fewer problems from step to step, and each number is compiled anew: adam"
                )

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
        """`reconstruct` from given images (K, B, C, H, W) in [0, 1] instead of noise; restarts still draw theirs."""
        started = time.perf_counter()
        if reason := _refusal(known):
            return not_applicable(wave, reason)
        soft = self.labels == "optimised" and known.labels is None
        if soft and not takes_probabilities(known.loss, known.classes):
            return not_applicable(
                wave, "the loss takes whole labels only, so that they cannot be optimised beside the images"
            )
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
        if isinstance(self.optimizer, lbfgs):
            settings = self.optimizer
            outcome = QuasiNewton(settings, problems, draw, budget.iterations, limiter, clock, tracer).descend(
                variables
            )
        else:
            outcome = self._adam(problems, variables, budget, limiter, clock, tracer, step)
        found = problems.joined(variables["x"], rows)
        tracer.keep(rows, outcome.spent, outcome.objectives, found)
        labels = problems.joined_labels(variables, rows)
        return self._answers(found, labels, outcome, problems, tracer, budget, time.perf_counter() - started)

    def _labels(self, wave: Wave, known: Knowledge, restarts: int, streams: Sequence[Stream], epochs: int) -> Tensor:
        """Labels (P, images) of each problem; where steps, or clients of a sum, take a part, restarts try which."""
        y = labelling.restore(wave, known)
        size = known.chain.slice_of(known.batch_size)
        if size >= known.batch_size or (known.labels is not None and not self.tied):
            return y.repeat_interleave(restarts, 0)
        drawn = [stream("assignments", 0) for stream in streams]
        orders = [labelling.assignments(y[k], size, restarts, rng, epochs) for k, rng in enumerate(drawn)]
        return torch.cat([order[torch.arange(restarts) % len(order)] for order in orders])

    def _batch_limiter(self, problems: Problems, variables: Variables) -> BatchLimiter:
        """For as many problems as fit into the free memory beside what the optimiser remembers of all of them."""
        x, units = variables["x"], problems.units

        def dry(count: int) -> None:
            rows = units[:count].flatten()
            part = {name: t[rows] for name, t in variables.items()}
            problems.value_and_slopes(part, rows, 1.0, self._nearby(part["x"], [0]))

        held = self.optimizer.state_per_variable * sum(t.numel() * t.element_size() for t in variables.values())
        return BatchLimiter(largest_batch(dry, len(units), x.device, held))

    def _step(self, problems: Problems, limiter: BatchLimiter) -> Step:
        if not self.compile:
            return problems.value_and_slopes
        from fedgauge.attacks.matching.compiled_step import CompiledStep

        return CompiledStep(problems, limiter).value_and_slopes

    def _answers(
        self,
        found: Tensor,
        labels: Tensor,
        outcome: OptimizationResult,
        problems: Problems,
        tracer: Tracer,
        budget: Budget,
        seconds: float,
    ) -> list[Reconstruction]:
        """Each observation's restart of the lowest objective, of images (P, B, C, H, W) and labels (P, B)."""
        restarts, known = problems.restarts, problems.known
        objectives = outcome.objectives
        objectives = torch.where(objectives.isfinite(), objectives, torch.inf).view(-1, restarts)
        answers = []
        for k, best in enumerate(objectives.argmin(1).tolist()):
            row, own = k * restarts + best, slice(k * restarts, (k + 1) * restarts)
            x = known.pixels(found[row]).clamp(0, 1).to(problems.dtype)
            done = int(outcome.spent[own].max())
            status: Status = "converged"
            reason = ""
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
            variables[name] = torch.zeros(len(owners), *latent.shape).to(like)  # where it is likeliest
        for name, (_, explained) in problems.explained.items():
            variables[name] = torch.zeros(len(owners), images, explained.numbers).to(like)
        return variables

    # ------------------------------------------------------------------------------------------------ Adam's kin

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
        """What the next look at these problems is to know of their objectives."""
        assert isinstance(self.optimizer, adam)
        part.finite.logical_or_(value.isfinite())
        if self.optimizer.patience and not (isinstance(likelihood_weight, float) and likelihood_weight < 1):
            part.record(
                value,
                self.optimizer.tolerance,
                likelihood_weight == 1 if isinstance(likelihood_weight, Tensor) else None,
            )

    def _nearby(self, x: Tensor, at: Sequence[int]) -> Tensor | None:
        """Displacements (samples, N or 1, images, C, H, W), uniform in the box; None where there is nothing to sample.

        Args:
            at: each problem's iteration: the same box for all at the same one, so that packing changes nothing.
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
            return f"layer {name!r} is dropout in train mode: its draws are not in the update's differentiable form"
    return ""


def _doubled(wave: Wave, known: Knowledge) -> tuple[Wave, Knowledge]:
    def double(tensors: Update) -> Update:
        return {k: t.double() for k, t in tensors.items()}

    wave = replace(wave, params=double(wave.params), update=double(wave.update))
    loss = copy.deepcopy(known.loss).double() if isinstance(known.loss, torch.nn.Module) else known.loss
    return wave, replace(known, model=copy.deepcopy(known.model).double(), loss=loss)


# ------------------------------------------------------------------------------------------------------------- recipes


def _with(prior: Table | None, *others: Prior) -> tuple[Prior, ...]:
    """Priors with one more that a table names (fedgauge.attacks.matching.priors); those of no weight are left out."""
    if prior is None:
        return others
    named = build(prior, "prior", PRIOR)
    assert isinstance(named, Prior)
    return tuple(p for p in (*others, named) if p.weight)


def inverting_gradients(
    tv: float = 0.01,
    rate: float = 0.1,
    patience: int = 0,
    compile: bool = False,
    prior: dict | None = None,  # type: ignore[type-arg]  # as TOML gives it; `build` checks what is in it
) -> GradientMatching:
    """Inverting Gradients (Geiping et al., NeurIPS 2020): cosine, total variation, signed Adam, three cuts of the rate.

    Args:
        patience: iterations without a fall after which a problem ends; 0: the paper's whole schedule.
        compile: the whole step; see GradientMatching.
        prior: one more: {use = "generator_prior", weight = 1e-5}.
    """
    descent = adam(rate, signed=True, cuts=CUTS, patience=patience)
    return GradientMatching(cosine(), _with(prior, total_variation(tv)), descent, compile=compile)


def dlg(restart_above: float = 1e-6, tolerance: float = 1e-9, double: bool = True) -> GradientMatching:
    """Deep Leakage from Gradients (Zhu et al., NeurIPS 2019): squared distance, images and soft labels found together.

    By L-BFGS, as in the paper, but with a line search.

    Args:
        restart_above: a relative squared distance above which a search that has ended starts again, within the budget.
        tolerance: where it stops.
        double: in float64; in float32 the search ends at a squared distance of 1e-6 or so, short of a sharp image in colour.
    """
    return GradientMatching(
        squared(),
        (),
        lbfgs(history=100, restart_above=restart_above, tolerance=tolerance),
        box=False,
        labels="optimised",
        double=double,
    )


def idlg(restart_above: float = 1e-6, tolerance: float = 1e-9, double: bool = True) -> GradientMatching:
    """iDLG (Zhao et al., 2020): DLG with the labels restored before matching."""
    return GradientMatching(
        squared(), (), lbfgs(history=100, restart_above=restart_above, tolerance=tolerance), box=False, double=double
    )


def bayes(
    conditional: Literal["known", "squared", "cosine"] = "known",
    tv: float = 1e-2,
    rate: float = 0.1,
    decay: float = 1.0,
    anneal: float = 1.0,
    samples: int = 1,
    radius: float = 0.0,
    box: bool = True,
    prior: dict | None = None,  # type: ignore[type-arg]  # as TOML gives it; `build` checks what is in it
) -> GradientMatching:
    """The Bayesian framework's attack (Balunović et al., ICLR 2022, Algorithm 1): the chain's own likelihood, total variation.

    Args:
        conditional: "known": that of the chain's noise and masks; the two others are the paper's baselines.
        tv: the prior's weight beta, relative to the likelihood's own scale.
        decay: of the rate at each iteration; anneal: the likelihood's weight at the start.
        samples, radius: k and delta; at the centre where radius is 0, as in the paper's tables.
        prior: one more: {use = "generator_prior"}; tv = 0 leaves it alone.
    """
    chosen = {"known": None, "squared": squared(), "cosine": cosine()}[conditional]
    priors = _with(prior, total_variation(tv))
    return GradientMatching(chosen, priors, adam(rate, decay=decay), box, anneal=anneal, samples=samples, radius=radius)


def grad_inversion(
    tv: float = 1e-4, l2: float = 1e-6, bn: float = 0.1, group: float = 0.01, rate: float = 0.1
) -> GradientMatching:
    """See through Gradients (Yin et al., CVPR 2021): squared distance, image and BatchNorm priors, restarts held together.

    The restarts of an observation are pulled towards their mean pixel by pixel; the paper registers them first.

    Args:
        bn: weight of the BatchNorm statistics, where the model keeps any.
    """
    priors = (total_variation(tv, power=2), magnitude(l2), batch_statistics(bn))
    return GradientMatching(squared(), tuple(p for p in priors if p.weight), adam(rate, cuts=CUTS), group=group)


def surrogate(tv: float = 0.01, rate: float = 0.1) -> GradientMatching:
    """Surrogate model extension (Zhu et al., ICLR 2023): several local steps matched by one gradient between their ends.

    The cheap alternative to unrolling them, which inverting_gradients does.
    """
    return GradientMatching(cosine(), (total_variation(tv),), adam(rate, signed=True, cuts=CUTS), surrogate=True)


def federated_averaging(
    tied: float = 1.0, aggregate: local_steps.Aggregate = "mean", tv: float = 1e-3, rate: float = 0.1
) -> GradientMatching:
    """Data leakage in federated averaging (Dimitrov et al., TMLR 2022): local steps over slices whose order is not known.

    The steps are unrolled over copies of the images for every epoch, which an order-invariant term ties; restarts try which
    slice of which epoch holds which label. At the end copies are paired and averaged. By signed Adam, which finds more here
    than the paper's Adam.

    Args:
        tied: the term's weight.
        aggregate: of an epoch's images, which is compared between epochs: their mean, as in the paper's tables, or maximum.
    """
    descent = adam(rate, signed=True, cuts=CUTS)
    return GradientMatching(cosine(), (total_variation(tv),), descent, tied=tied, aggregate=aggregate)
