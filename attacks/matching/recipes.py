"""Recipes of gradient matching: one function for each paper, which chooses likelihood, priors and optimiser."""

from typing import Literal

from fedgauge.attacks.engine.gradient_distances import cosine, each, largest, squared
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective, surrogate_gradient, tied_epochs, unrolled
from fedgauge.attacks.matching.priors import PRIOR, Prior, batch_statistics, magnitude, total_variation
from fedgauge.attacks.matching.search import AdamSearch, LBFGSSearch
from fedgauge.client.components import NotNegative, Table, build

CUTS = (3 / 8, 5 / 8, 7 / 8)


def _with(prior: Table | None, *others: Prior) -> tuple[Prior, ...]:
    return others if prior is None else (*others, build(prior, "prior", PRIOR))


def inverting_gradients(
    tv: NotNegative = 0.01,
    rate: float = 0.1,
    compile: bool = False,
    prior: dict | None = None,  # type: ignore[type-arg]  # as TOML gives it; `build` checks what is in it
    by_tensor: bool = False,
) -> GradientMatching:
    """Inverting Gradients (Geiping et al., NeurIPS 2020): cosine, total variation, signed Adam, three cuts of the rate.

    Args:
        compile: compile the whole step; see AdamSearch.
        by_tensor: the mean of each tensor's cosine, for deep networks such as a U-Net.
        prior: an additional prior, such as {use = "generator_prior", weight = 1e-5}.
    """
    search = AdamSearch(rate, signed=True, cuts=CUTS, compile=compile)
    distance = each(cosine()) if by_tensor else cosine()
    return GradientMatching(Objective(distance, _with(prior, total_variation(tv))), search)


def dlg(
    restart_above: float = 1e-6, tolerance: float = 1e-9, double: bool = True, by_tensor: bool = False
) -> GradientMatching:
    """Deep Leakage from Gradients (Zhu et al., NeurIPS 2019): squared distance, images and soft labels optimised together.

    By L-BFGS as in the paper, but with a line search.

    Args:
        restart_above: a search that ends above this relative squared distance starts again, within the budget.
        tolerance: the distance at which a search stops.
        double: in float64; float32 ends at a squared distance of about 1e-6, short of a sharp colour image.
        by_tensor: the mean of each tensor's distance, for recurrent networks.
    """
    search = LBFGSSearch(history=100, restart_above=restart_above, tolerance=tolerance, double=double)
    return GradientMatching(Objective(each(squared()) if by_tensor else squared(), labels="optimised"), search)


def idlg(restart_above: float = 1e-6, tolerance: float = 1e-9, double: bool = True) -> GradientMatching:
    """iDLG (Zhao et al., 2020): DLG with the labels restored before matching."""
    return GradientMatching(Objective(squared()), dlg(restart_above, tolerance, double).search)


def bayes(
    conditional: Literal["known", "squared", "cosine"] = "known",
    tv: NotNegative = 1e-2,
    rate: float = 0.1,
    decay: float = 1.0,
    anneal: float = 1.0,
    prior: dict | None = None,  # type: ignore[type-arg]  # as TOML gives it; `build` checks what is in it
) -> GradientMatching:
    """The Bayesian framework's attack (Balunović et al., ICLR 2022, Algorithm 1): the chain's own likelihood, total variation.

    Args:
        conditional: "known": of the chain's noise and masks; the two others are the paper's baselines.
        tv: the prior's weight beta, relative to the likelihood's own scale.
        decay: of the rate at each iteration; anneal: the likelihood's weight at the start.
        prior: an additional prior, such as {use = "generator_prior"}; with tv = 0 it is the only one.
    """
    chosen = {"known": None, "squared": squared(), "cosine": cosine()}[conditional]
    search = AdamSearch(rate, decay=decay, anneal=anneal)
    return GradientMatching(Objective(chosen, _with(prior, total_variation(tv))), search)


def grad_inversion(
    tv: NotNegative = 1e-4, l2: float = 1e-6, bn: float = 0.1, group: float = 0.01, rate: float = 0.1
) -> GradientMatching:
    """See through Gradients (Yin et al., CVPR 2021): squared distance, image and BatchNorm priors, coupled restarts.

    The restarts of an observation are pulled towards their mean pixel by pixel; the paper registers them first.

    Args:
        bn: weight of the BatchNorm statistics, if the model keeps any.
    """
    priors = (total_variation(tv, power=2), magnitude(l2), batch_statistics(bn))
    return GradientMatching(Objective(squared(), priors), AdamSearch(rate, cuts=CUTS, group=group))


def partial_matching(
    keep: float = 0.5, flat: float = 0.1, reach: float = 1e-2, tv: NotNegative = 0.01, rate: float = 0.1
) -> GradientMatching:
    """Partial gradient matching with a gradient penalty, after Fan et al. (USENIX Security 2025).

    The length of the objective's gradient is penalised, so that the search ends where the objective is flat. The rest is
    Inverting Gradients. The choice of entries and both weights are ours, not the paper's.

    Args:
        keep: the share of each tensor's entries that is matched, the largest ones.
        flat: the penalty's weight; each iteration then evaluates two gradients. reach: of the difference that gives its slope.
    """
    matched = cosine() if keep == 1 else largest(cosine(), keep)
    search = AdamSearch(rate, signed=True, cuts=CUTS, flat=flat, reach=reach)
    return GradientMatching(Objective(matched, (total_variation(tv),)), search)


def surrogate(tv: NotNegative = 0.01, rate: float = 0.1) -> GradientMatching:
    """Surrogate model extension (Zhu et al., ICLR 2023): one gradient between the end points replaces several local steps.

    A cheap alternative to unrolling the steps, as inverting_gradients does.
    """
    return inverting_gradients(tv, rate).with_objective(training=surrogate_gradient())


def federated_averaging(tied: float = 1.0, tv: NotNegative = 1e-3, rate: float = 0.1) -> GradientMatching:
    """Data leakage in federated averaging (Dimitrov et al., TMLR 2022): local steps over slices of unknown order.

    The steps are unrolled over a copy of the images for every epoch, and an order-invariant term ties the copies. Restarts
    try different assignments of labels to slices. At the end the copies are paired and averaged. Signed Adam reconstructs
    more here than the paper's Adam.

    Args:
        tied: the term's weight; it compares the epochs' mean images, as in the paper's tables.
    """
    return inverting_gradients(tv, rate).with_objective(training=tied_epochs(tied) if tied else unrolled())
