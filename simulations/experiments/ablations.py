"""Ablations: attacks with one part exchanged (Inverting Gradients, table 3)."""

from dataclasses import replace

from fedgauge.attacks.engine.distances import squared
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.quasi_newton import LBFGSSearch
from fedgauge.attacks.matching.recipes import inverting_gradients


def without_cosine(tv: float = 0.01, rate: float = 0.1) -> GradientMatching:
    """Inverting Gradients with the squared distance."""
    return inverting_gradients(tv, rate).with_objective(likelihood=squared())


def without_adam(tv: float = 0.01) -> GradientMatching:
    """Inverting Gradients with L-BFGS."""
    return replace(inverting_gradients(tv), search=LBFGSSearch())
