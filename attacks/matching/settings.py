"""The settings of gradient matching: likelihood, priors, optimiser and what is searched for."""

from dataclasses import dataclass, field
from typing import Literal

from fedgauge.attacks.engine.distances import Distance
from fedgauge.attacks.engine.optimizers import Optimizer, adam, lbfgs
from fedgauge.attacks.engine.trace import check_snapshots
from fedgauge.attacks.matching import local_steps
from fedgauge.attacks.matching.priors import Prior


@dataclass(frozen=True)
class MatchingSettings:
    """What gradient matching minimises, and how; the values make a recipe.

    Args:
        likelihood: of the observed update; None: the one of the chain's own noise, as far as the attacker knows the chain.
        priors: on the images; group: pulls an observation's restarts towards their mean (GradInversion).
        optimizer: adam or lbfgs; for lbfgs the budget's iterations count evaluations of a problem, restarts included.
        box: keep pixels in [0, 1] after each step (adam).
        labels: "restored" before matching (or given by the threat model), or "optimised" with the image as in DLG.
        anneal: the likelihood's weight at the start; it grows geometrically to 1 over the first half of the iterations.
        samples, radius: average the objective over images drawn uniformly from a box of this half-width around the guess.
        surrogate: for several local steps: instead of unrolling them, match one gradient at a point between the weights
            before and after them; the point is optimised too (SME: Zhu et al., 2023).
        latent: for a model whose layers draw noise: optimise the noise too, with its normal density at this weight (times
            half the mean square); None: use the layers' mean.
        draws: average the objective over this many draws of what has no noise-free form (expectation over
            transformation); 0: nothing is drawn.
        double: compute in float64, for exact attacks.
        tied: for local steps over slices of the batch in an unknown order that changes every epoch: the weight of the term
            that ties the epochs' copies of the images (fedgauge.attacks.matching.local_steps); 0: the order is known.
        aggregate: the statistic of an epoch's images that is tied.
        compile: compile the whole step by torch.compile, once for each wave size. Needs a C++ compiler; without one the
            attack is not applicable. LeNet on a CPU thread: 1.5 to 3 times faster after 60 to 85 CPU seconds of compiling,
            which pays off from 3,000 iterations (K = 64) or 8,000 (K = 8).
        trace: keep about this many snapshots of each problem in progress; 0: none.
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
            raise ValueError("latent needs local steps with known examples; leave out tied and surrogate")
        if self.draws and (self.surrogate or self.compile):
            raise ValueError(
                "draws needs the whole chain, and random draws cannot be compiled; leave out surrogate and compile"
            )
        if self.tied and self.surrogate:
            raise ValueError("surrogate does not unroll local steps, so there is no order to tie; leave out tied")
        if isinstance(self.optimizer, lbfgs):
            if self.group or self.radius or self.anneal < 1 or self.surrogate:
                raise ValueError(
                    "lbfgs needs one smooth objective for each problem; leave out group, anneal, radius and surrogate"
                )
            if self.compile:
                raise ValueError(
                    "compile needs a fixed number of problems, and lbfgs advances fewer from step to step; use adam"
                )
