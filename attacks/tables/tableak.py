"""TabLeak (Vero et al., ICML 2023): rows of a table from an update, by an ensemble of searches that vote cell by cell.

Numbers and categories are searched for together, categories as a softmax (`relaxed_rows`). Where restarts agree a cell is
likely right: the result is their median, and the entropy of their mean is each cell's confidence.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.engine.gradient_distances import cosine
from fedgauge.attacks.matching.gradient_matching import EveryRestart, GradientMatching
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.problems import SearchFails
from fedgauge.attacks.matching.search import AdamSearch
from fedgauge.client.components import Positive
from fedgauge.client.models.columns import Columns
from fedgauge.client.psnr import assigned

OTHER_LABEL = 2.0  # a pair's cost, above that of a pair in which every cell differs
TIE = 1e-6  # weight of the rows' distance among pairs that differ in as many cells


@dataclass(frozen=True)
class tableak(Attack):
    """TabLeak (Vero et al., ICML 2023): rows by gradient matching; the budget's restarts (30 in the paper) are pooled.

    Cosine distance and Adam by the gradient's sign, 1,500 iterations in the paper.

    Args:
        rate: step size, in units of scaled entries.
        softmax: search categories as a softmax; otherwise their entries are free.
        pool: the median over restarts; otherwise the restart with the lowest objective.
    """

    rate: Positive = 0.06
    softmax: bool = True
    pool: bool = True

    needs_derivative = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        objective = Objective(cosine(), parametrisation=relaxed_rows(self.softmax))
        matching = GradientMatching(objective, AdamSearch(self.rate, signed=True, box=False))
        try:
            found = matching.search_all(wave, known, budget, streams)
        except SearchFails as error:
            return not_applicable(wave, str(error))
        return [self._pooled(found, k, best) for k, best in enumerate(found.best(budget, lambda rows: rows))]

    def _pooled(self, found: EveryRestart, k: int, best: Reconstruction) -> Reconstruction:
        """The vote of one observation's restarts, whose rows are put into the order of the best one's."""
        if best.x is None or best.y is None or best.status == "diverged":
            return replace(best, x=None)
        columns = found.problems.known.columns
        assert columns is not None
        own = slice(k * found.problems.restarts, (k + 1) * found.problems.restarts)
        rows, labels = found.images[own], found.labels[own]
        ended = found.objectives[k].isfinite() & rows.flatten(1).isfinite().all(1)
        voters = aligned(columns, rows[ended], labels[ended], best.x, best.y)
        pooled = columns.scaled(columns.natural(voters).median(0).values) if self.pool else best.x
        return replace(best, x=columns.rows(columns.cells(pooled)), confidence=confidence(columns, voters))


def aligned(columns: Columns, rows: Tensor, labels: Tensor, to: Tensor, its_labels: Tensor) -> Tensor:
    """Each restart's rows (R, B, D) in the order in which they resemble one restart's rows (B, D) most, label by label."""
    wanted, found = columns.cells(to), columns.cells(rows)
    differ = 1 - columns.right(wanted[:, None], found[:, None]).double().mean(-1)
    apart = (to[:, None] - rows[:, None]).double().square().mean(-1)
    differs = its_labels[:, None] != labels[:, None]
    other = differs.reshape(*differs.shape[:3], -1).any(3).double()
    costs = differ + TIE * apart / apart.amax().clamp_min(TIE) + OTHER_LABEL * other
    return torch.stack([own[assigned(cost)] for own, cost in zip(rows, costs, strict=True)])


def confidence(columns: Columns, rows: Tensor) -> Tensor:
    """Return the agreement of an ensemble's rows (R, B, D), cell by cell: (B, F) in [0, 1].

    Of a category 1 - H / log n, where H is the entropy of the members' mean. Of a number 1 / (1 + s), where s is its standard
    deviation among them in units of its column's; both order cells as the paper's entropies do.
    """
    natural, found = columns.natural(rows.double()), []
    for column, part in zip(columns, columns.slices, strict=True):
        if column.numeric:
            spread = natural[..., part.start].std(0, correction=0) / column.std
            found.append(1 / (1 + spread))
            continue
        mean = natural[..., part].mean(0).clamp_min(0)
        mean = mean / mean.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        entropy = torch.special.entr(mean).sum(-1)
        found.append((1 - entropy / torch.tensor(max(column.entries, 2)).log()).clamp(0, 1))
    return torch.stack(found, -1).float()


@dataclass(frozen=True)
class relaxed_rows:
    """Rows (..., D) as the network takes them, from free numbers (..., D) (TabLeak: Vero et al., ICML 2023, section 4.1).

    A sigmoid keeps numbers within their columns' bounds.

    Args:
        softmax: the entries of a category are positive and sum to 1; otherwise they are free.
    """

    softmax: bool = True
    weight: ClassVar[float] = 0.0

    def bind(self, known: Knowledge) -> Callable[[Tensor, Tensor], Tensor]:
        """The rows of free numbers.

        Raises:
            ValueError: the examples are no rows.
        """
        if known.columns is None:
            raise ValueError("it reconstructs rows of a table, and the examples here have no columns")
        return partial(self._rows, known.columns)

    def starts(self, normal: Tensor) -> Tensor:
        """The paper's starts, uniform in [-1, 1], from standard normal numbers."""
        return torch.erf(normal / math.sqrt(2))

    def _rows(self, columns: Columns, z: Tensor, y: Tensor) -> Tensor:
        natural, parts = columns.natural(z), []
        for column, part in zip(columns, columns.slices, strict=True):
            own = natural[..., part]
            if not column.numeric:
                parts.append(own.softmax(-1) if self.softmax else own)
                continue
            low, high = column.bounds
            parts.append(low + (high - low) * z[..., part.start : part.start + 1].sigmoid())
            if column.optional:  # whether the number is missing
                parts.append(own[..., 1:].sigmoid() if self.softmax else own[..., 1:])
        return columns.scaled(torch.cat(parts, -1))
