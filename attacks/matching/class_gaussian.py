"""Gradient matching under each class's normal distribution, fitted to auxiliary examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave
from fedgauge.attacks.engine.gradient_distances import each, kept_by_size, likelihood, rounding_likelihood, squared
from fedgauge.attacks.matching.class_normals import class_normals
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.search import AdamSearch, LBFGSSearch, Search
from fedgauge.client.components import Positive

ERROR = 0.01  # of each entry of an update without noise, relative to the update's norm, for one example
ROUNDED = 2.0  # the prior's weight with a normal distribution in place of rounding: real errors depend on the entry
FALL = 0.03  # of Adam's rate over a search


@dataclass(frozen=True)
class class_gaussian(Attack):
    """Search under each class's normal distribution, fitted to auxiliary examples, in that distribution's coordinates.

    The likelihood is the chain's own where its noise or rounding has a density. Without noise a small normal error takes its
    place, and entries that pruning dropped are known to be small. Else it is a distance such as the cosine.

    Args:
        share: of the prior in the objective with a distance; with a likelihood the prior has its own density.
        rate: of Adam, which falls to 3 % of it.
        second_order: L-BFGS by each tensor's squared distance instead, for smooth networks without a defense.
    """

    share: Positive = 1e-4
    rate: Positive = 0.05
    second_order: bool = False

    needs_derivative = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        noise, levels = known.chain.update_distribution, known.chain.levels_in_norm
        distance = rounding_likelihood(levels) if levels else likelihood(noise, known.batch_size)
        if self.second_order:
            distance = each(squared())
        elif not distance.density and noise is not None and not noise.signed and noise.shrink == 1:
            distance = kept_by_size(ERROR / known.batch_size**0.5)
        weight = ROUNDED if levels else 1.0
        if not distance.density:
            weight = 2 * self.share / (known.batch_size * prod(known.shape))
        decay = FALL ** (1 / budget.iterations)
        search: Search = AdamSearch(self.rate, signed=not distance.density, decay=decay, box=False)
        if self.second_order:
            search = LBFGSSearch(history=50)
        engine = GradientMatching(Objective(distance, parametrisation=class_normals(weight)), search)
        return engine.reconstruct(wave, known, budget, streams)
