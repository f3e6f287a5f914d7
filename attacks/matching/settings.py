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
    """What a search by gradient matching minimises, and how: the fields make a recipe.

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
