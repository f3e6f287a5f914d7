"""The mean of several searches under the classes' Gaussian prior, which has less of their own noise than any one of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave
from fedgauge.attacks.engine.gradient_distances import each, kept_by_size, likelihood, rounding_likelihood, squared
from fedgauge.attacks.matching.class_normals import class_normals
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.search import AdamSearch, LBFGSSearch, Search
from fedgauge.client.components import Count, Positive
from fedgauge.client.psnr import match

ERROR = 0.01  # of an update without noise, relative to it, for one example
ROUNDED = 2.0  # the prior's weight beside a normal distribution in place of rounding, whose errors depend on the entry
FALL = 0.03  # of the rate over a search


@dataclass(frozen=True)
class class_gaussian(Attack):
    """Search of examples under each class's normal distribution, fitted to auxiliary images, in its own coordinates.

    The likelihood is the chain's own where its noise or rounding has a density, and the result then the mean of several short
    searches. Else errors of 1 % are taken as normal, and entries that a client dropped as smaller than those it kept.

    Args:
        share: of the prior in the objective with a distance that is no density; with a density its weight is 1.
        searches: from different starts, which share the iterations, where the update has noise.
        rate: of Adam, which falls to 3 % of it.
        second_order: L-BFGS by each tensor's squared distance instead, for smooth networks without a defense.
    """

    share: Positive = 1e-4
    searches: Count = 4
    rate: Positive = 0.2
    second_order: bool = False

    needs_derivative = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        noise, levels, weight = known.chain.update_distribution, known.chain.levels_in_norm, 1.0
        distance = likelihood(noise, known.batch_size)
        if levels:
            distance, weight = rounding_likelihood(levels), ROUNDED
        exact = not distance.density and not (noise and noise.signed)
        if self.second_order:
            distance = each(squared())
        elif exact:
            distance = kept_by_size(ERROR / known.batch_size**0.5)
        if not distance.density:
            weight = 2 * self.share / (known.batch_size * prod(known.shape))
        count = 1 if exact or self.second_order else min(self.searches, budget.iterations)
        part = replace(budget, iterations=budget.iterations // count, seconds=budget.seconds and budget.seconds / count)
        decay = FALL ** (1 / part.iterations)
        search: Search = AdamSearch(self.rate, signed=not distance.density, decay=decay, box=False)
        if self.second_order:
            search = LBFGSSearch(history=50)
        engine = GradientMatching(Objective(distance, parametrisation=class_normals(weight)), search)
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
