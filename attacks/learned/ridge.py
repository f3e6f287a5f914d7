"""Ridge inversion: the best linear map from updates to images, in closed form.

The baseline for learned attacks, and often close to them. For additive noise of known size, ridge regression on noise-free
updates is the linear inverter of least expected error: its regulariser represents the noise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedgauge.attacks import label_restoration as labelling
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Streams, Wave, not_applicable
from fedgauge.attacks.engine.cache import digest
from fedgauge.attacks.learned.shadow_updates import ShadowDataset, ShadowTrainer, UpdateFeatures
from fedgauge.attacks.learned.trainer import TrainingRecord
from fedgauge.client.components import Count, Natural
from fedgauge.client.update import Batch, Update

BONDS = (0.0, 1.0, 10.0)
PILOT = 2048  # rows on which bond and kind of training data are chosen
STEP = 10**0.5  # factor of the regulariser's search
LOWEST, HIGHEST = 1e-12, 1e9  # limits of that search
PIXELS = 128  # evenly spaced pixels on which a regulariser is tried


@dataclass(frozen=True, eq=False)
class Ridge:
    """min |phi(x) W - (targets - base)|^2 + regulariser |W|^2; phi(x) is x, and sqrt(bond) x in the block of its label.

    Kept as W (the primal form) or, if there are fewer rows than phi has entries, by the rows that it was fitted to. Rows are
    batches of x (n, k) and the labels y (n,) on which the map depends where there is a bond.

    Args:
        weights: (entries of phi, d), or (n, d) over the rows.
        centre: (k,) mean row; base: (d,) mean target.
        regulariser: as a multiple of the mean squared length of phi; for noise of variance s^2 in n rows about n s^2.
        error: mean squared error on held-out rows, values clamped to [0, 1].
    """

    weights: Tensor
    rows: Batch | None
    centre: Tensor
    base: Tensor
    bond: float
    classes: int
    regulariser: float
    error: float = math.nan

    def __call__(self, new: Batch) -> Tensor:
        """Targets (m, d) in [0, 1]."""
        return (self.products(new) @ self.weights + self.base).clamp(0, 1)

    def products(self, new: Batch) -> Tensor:
        """phi of new rows, or its inner products with phi of the rows that the weights are over."""
        centred = Batch(new.x.double() - self.centre, new.y)
        if self.rows is not None:
            found = centred.x.new_zeros(len(centred.x), len(self.rows.x))
            for first in range(0, self.rows.x.shape[1], 2048):  # a float64 copy of all rows would double their size
                part = slice(first, first + 2048)
                found.addmm_(centred.x[:, part], (self.rows.x[:, part].double() - self.centre[part]).T)
            if self.bond:
                found *= 1 + self.bond * (centred.y[:, None] == self.rows.y[None])
            return found
        if not self.bond:
            return centred.x
        own = torch.nn.functional.one_hot(centred.y, self.classes).to(centred.x)
        return torch.cat([centred.x, self.bond**0.5 * (own[:, :, None] * centred.x[:, None]).flatten(1)], 1)


def fit(rows: Batch, targets: Tensor, held: Batch, truth: Tensor, bond: float, classes: int, start: float) -> Ridge:
    """The ridge with the regulariser that is best on held-out rows, searched downhill from a start.

    Args:
        targets: (n, d); truth: (m, d) of the held-out rows.
        bond: how much the map for one label differs from the others; 0: not at all.
        start: the first regulariser, as a multiple of the mean squared length of phi.
    """
    centre, base, count = rows.x.double().mean(0), targets.double().mean(0), len(rows.x)
    primal = rows.x.shape[1] * (1 + (classes if bond else 0)) < count
    empty = Ridge(targets, None if primal else rows, centre, base, bond, classes, start)
    beside, phi = empty.products(held), torch.empty(0)
    if primal:
        phi = empty.products(rows)
        gram = phi.T @ phi
    else:
        blocks = map(Batch, rows.x.split(1024), rows.y.split(1024))
        gram = torch.cat([empty.products(block) for block in blocks])
    size = float(gram.diagonal().sum() / count)
    some = torch.arange(0, targets.shape[1], max(1, targets.shape[1] // PIXELS))

    def solve(regulariser: float, wanted: Tensor) -> Tensor | None:
        """The weights; None if rounding leaves no positive definite matrix."""
        ridged = gram.clone()
        ridged.diagonal().add_(regulariser * size)
        factor, wrong = torch.linalg.cholesky_ex(ridged)
        return None if int(wrong) else torch.cholesky_solve(phi.T @ wanted if primal else wanted, factor)

    def error(regulariser: float) -> float:
        weights = solve(regulariser, targets[:, some].double() - base[some])
        if weights is None:
            return math.inf
        value = ((beside @ weights + base[some]).clamp(0, 1) - truth[:, some]).square().mean()
        return float(value.nan_to_num(torch.inf))

    best = minimise_on_grid(error, start)
    weights = solve(best, targets.double() - base)
    assert weights is not None  # the search has solved the same system
    found = replace(empty, weights=weights, regulariser=best)
    return replace(found, error=float((found(held) - truth).square().mean()))


def minimise_on_grid(error: Callable[[float], float], start: float) -> float:
    """The minimum of an error among start * STEP^i, searched in each direction while the error falls."""
    best, at = start, error(start)
    for factor in (STEP, 1 / STEP):
        while LOWEST <= best * factor <= HIGHEST and (there := error(best * factor)) < at:
            best, at = best * factor, there
    if at == float("inf"):
        raise ValueError("ridge regression has no solution for any regulariser: the simulated updates are not finite")
    return best


@dataclass(frozen=True)
class ridge_inversion(Attack):
    """Ridge regression of images on updates simulated with auxiliary images; one fit for all clients of a round.

    Held-out auxiliary images choose the regulariser, how much the map depends on the label, and whether it is fitted to
    updates without the chain's noise.

    Args:
        buckets: of signed feature hashing; 0: none.
        passes: how often each auxiliary image is grouped with others, for batches of several.
    """

    buckets: Natural = 0
    passes: Count = 1

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        try:
            labels = labelling.restore(wave, known).sort(1).values
            fitted = FittedRidge(self, ShadowTrainer(known, wave.params, self.view, self.passes))
            x, record = fitted.images(wave.update, labels), TrainingRecord(fitted.inverter.error)
        except ValueError as error:
            return not_applicable(wave, str(error))
        return [record.answer(x[k], labels[k]) for k in range(len(wave))]

    @property
    def view(self) -> UpdateFeatures:
        return UpdateFeatures(True, self.buckets)


@dataclass(frozen=True, eq=False)
class FittedRidge:
    attack: ridge_inversion
    shadow: ShadowTrainer

    @cached_property
    def inverter(self) -> Ridge:
        kept = self.shadow.cache.get(f"fitted-{digest(self.shadow.key, self.attack)}", self._fit)
        dual, quiet, bond, regulariser, error = kept["numbers"].tolist()
        rows = _inputs(self.shadow.shadow_data(False, quiet=bool(quiet))) if dual else None
        classes = self.shadow.known.classes
        return Ridge(kept["weights"], rows, kept["centre"], kept["base"], bond, classes, regulariser, error)

    def images(self, updates: Update, labels: Tensor) -> Tensor:
        """The most likely images (n, B, C, H, W) of updates (n, ...) with labels (n, B)."""
        inverter, known = self.inverter, self.shadow.known
        with torch.no_grad():
            found = inverter(Batch(self.shadow.view.rows(known, updates, labels), labels.flatten()))
        return found.to(self.shadow.auxiliary.x).view(*labels.shape, *known.shape)

    def _fit(self) -> dict[str, Tensor]:
        # noise-free training updates or not, bond and regulariser are chosen on a small sample
        chain, tried = self.shadow.known.chain, []
        for quiet in (False, True)[: 1 + (chain.mean != chain)]:
            few = self.shadow.shadow_data(False, quiet=quiet, most=max(1, PILOT // self.shadow.known.batch_size))
            for bond in BONDS:
                ridge = self._ridge(few, bond, 1e-2)
                tried.append((ridge.error, quiet, bond, ridge.regulariser))
        _, quiet, bond, start = min(tried)
        found = self._ridge(self.shadow.shadow_data(False, quiet=quiet), bond, start)
        numbers = (found.rows is not None, quiet, bond, found.regulariser, found.error)
        kept = {"weights": found.weights, "centre": found.centre, "base": found.base}
        return {**kept, "numbers": torch.tensor(numbers, dtype=torch.float64)}

    def _ridge(self, data: ShadowDataset, bond: float, start: float) -> Ridge:
        held, images = self.shadow.shadow_data(True), self.shadow.auxiliary.x
        targets, truth = (images[some.groups.flatten()].flatten(1) for some in (data, held))
        return fit(_inputs(data), targets, _inputs(held), truth, bond, self.shadow.known.classes, start)


def _inputs(data: ShadowDataset) -> Batch:
    return Batch(data.rows, data.labels.flatten())
