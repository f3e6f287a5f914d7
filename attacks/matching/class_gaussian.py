"""The mean of several searches under the classes' Gaussian prior, which has less of their own noise than any one of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave
from fedgauge.attacks.engine.gradient_distances import each, likelihood, rounding_likelihood, squared
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import gaussian
from fedgauge.attacks.matching.recipes import CUTS
from fedgauge.attacks.matching.search import AdamSearch, LBFGSSearch, Search
from fedgauge.client.components import Count, Positive
from fedgauge.client.psnr import match


@dataclass(frozen=True)
class class_gaussian(Attack):
    """The mean of several short searches of pixels under a Gaussian prior by class, fitted to auxiliary images.

    The likelihood is the chain's own where its noise or rounding has a density, else the cosine.

    Args:
        share: of the prior in the objective with a cosine; with a density its weight is 1.
        searches: from different starts, which share the iterations.
        rate: of Adam.
        second_order: L-BFGS by each tensor's squared distance instead, for smooth networks without a defense.
    """

    share: Positive = 0.01
    searches: Count = 4
    rate: Positive = 0.3
    second_order: bool = False

    needs_derivative = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        levels = known.chain.levels_in_norm
        distance = (
            rounding_likelihood(levels) if levels else likelihood(known.chain.update_distribution, known.batch_size)
        )
        if self.second_order:
            distance = each(squared())
        density = distance.density
        weight = 1.0 if density else 2 * self.share / (known.batch_size * prod(known.shape))
        search: Search = AdamSearch(self.rate, signed=not density, cuts=CUTS)
        if self.second_order:
            search = LBFGSSearch(history=50)
        engine = GradientMatching(Objective(distance, (gaussian(weight, by_class=True),)), search)
        count = min(self.searches, budget.iterations)
        part = replace(budget, iterations=budget.iterations // count, seconds=budget.seconds and budget.seconds / count)
        runs = [engine.reconstruct(wave, known, part, [partial(s, "search", i) for s in streams]) for i in range(count)]
        return [_mean(results) for results in zip(*runs, strict=True)]


def _mean(results: Sequence[Reconstruction]) -> Reconstruction:
    """The mean of one observation's reconstructions, each in the order of the first one's examples."""
    first = min(results, key=lambda r: r.objective)
    made = [r.x for r in results if r.x is not None]
    if first.x is None or len(made) < len(results):
        return next((r for r in results if r.x is None), first)
    x = torch.stack([x[match(first.x, x)] for x in made]).mean(0)
    spent, seconds = sum(r.iterations for r in results), sum(r.seconds for r in results)
    return replace(first, x=x, iterations=spent, seconds=seconds)
