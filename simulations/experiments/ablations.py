"""Ablations: attacks with one part exchanged (Inverting Gradients, table 3)."""

from fedgauge.attacks.engine.distances import cosine, squared
from fedgauge.attacks.engine.optimizers import adam, lbfgs
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.priors import total_variation
from fedgauge.attacks.matching.recipes import CUTS


def without_cosine(tv: float = 0.01, rate: float = 0.1) -> GradientMatching:
    """Inverting Gradients with the squared distance."""
    return GradientMatching(squared(), (total_variation(tv),), adam(rate, signed=True, cuts=CUTS))


def without_adam(tv: float = 0.01) -> GradientMatching:
    """Inverting Gradients with L-BFGS."""
    return GradientMatching(cosine(), (total_variation(tv),), lbfgs(), box=False)
