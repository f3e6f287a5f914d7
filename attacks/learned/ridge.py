"""Ridge inversion: the best linear map from updates to images, in closed form.

The baseline for learned attacks, and often close to them. For additive noise of known size, ridge regression on noise-free
updates is the linear inverter of least expected error, and its regulariser stands for the noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedgauge.attacks import labels as labelling
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.engine.cache import digest
from fedgauge.attacks.learned.shadow_updates import ShadowDataset, ShadowTrainer, UpdateFeatures
from fedgauge.attacks.learned.trainer import TrainingRecord
from fedgauge.client.components import check_at_least
from fedgauge.client.rng import generator

BONDS = (0.0, 1.0, 10.0)
PILOT = 2048  # rows on which bond and kind of training data are chosen
STEP = 10**0.5  # factor of the regulariser's search
LOWEST, HIGHEST = 1e-12, 1e9  # limits of that search
PIXELS = 128  # evenly spaced pixels on which a regulariser is tried


@dataclass(frozen=True, eq=False)
class RidgeInputs:
    """The inputs of a linear map: numbers (n, k), and labels (n,) if the map depends on them, else None."""

    x: Tensor
    labels: Tensor | None = None

    def of(self, part: slice) -> "RidgeInputs":
        return RidgeInputs(self.x[part], None if self.labels is None else self.labels[part])


@dataclass(frozen=True, eq=False)
class Ridge:
    """min |phi(x) W - (targets - base)|^2 + regulariser |W|^2; phi(x) is x, and sqrt(bond) x in the block of its label.

    Kept as W (the primal form) or, if there are fewer rows than phi has entries, by the rows that it was fitted to.

    Args:
        weights: (entries of phi, d), or (n, d) over the rows.
        centre: (k,) mean row; base: (d,) mean target.
        error: mean squared error on held-out rows, values clamped to [0, 1].
        regulariser: as a multiple of the mean squared length of phi; for noise of variance s^2 in n rows about n s^2.
    """

    weights: Tensor
    rows: RidgeInputs | None
    centre: Tensor
    base: Tensor
    bond: float
    classes: int
    regulariser: float
    error: float

    def __call__(self, new: RidgeInputs) -> Tensor:
        """Targets (m, d) in [0, 1]."""
        centred = RidgeInputs(new.x.double() - self.centre, new.labels)
        if self.rows is None:
            found = label_features(centred, self.bond, self.classes) @ self.weights
        else:
            found = kernel(centred, self.rows, self.centre, self.bond) @ self.weights
        return (found + self.base).clamp(0, 1)


def fit(
    rows: RidgeInputs, targets: Tensor, held: RidgeInputs, truth: Tensor, bond: float, classes: int, start: float
) -> Ridge:
    """The ridge with the regulariser that is best on held-out rows, searched downhill from a start.

    Args:
        targets: (n, d); truth: (m, d) of the held-out rows.
        bond: how much the map for one label differs from the others; 0: not at all.
        start: the first regulariser, as a multiple of the mean squared length of phi.
    """
    centre, base = rows.x.double().mean(0), targets.double().mean(0)
    system = _System(rows, held, centre, bond, classes)
    some = torch.arange(0, targets.shape[1], max(1, targets.shape[1] // PIXELS))

    def error(regulariser: float) -> float:
        return system.error(regulariser, targets[:, some].double() - base[some], base[some], truth[:, some])

    best = minimise_on_grid(error, start)
    weights = system.solve(best, targets.double() - base)
    found = Ridge(weights, system.kept, centre, base, bond, classes, best, float("nan"))
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


def label_features(rows: RidgeInputs, bond: float, classes: int) -> Tensor:
    """phi: (n, k), or (n, k * (1 + classes))."""
    if not bond or rows.labels is None:
        return rows.x
    own = torch.nn.functional.one_hot(rows.labels, classes).to(rows.x)
    return torch.cat([rows.x, bond**0.5 * (own[:, :, None] * rows.x[:, None]).flatten(1)], 1)


def kernel(new: RidgeInputs, rows: RidgeInputs, centre: Tensor, bond: float) -> Tensor:
    """Inner products (m, n) of phi of centred rows with phi of rows that are centred here."""
    found = new.x.new_zeros(len(new.x), len(rows.x))
    for first in range(0, rows.x.shape[1], 2048):  # a float64 copy of all rows would double their size
        part = slice(first, first + 2048)
        found.addmm_(new.x[:, part], (rows.x[:, part].double() - centre[part]).T)
    if bond and new.labels is not None and rows.labels is not None:
        found *= 1 + bond * (new.labels[:, None] == rows.labels[None])
    return found


class _System:
    """The normal equations of ridge regression: by the entries of phi, or by the rows if these are fewer.

    Attributes:
        kept: the rows, if the weights are over them.
    """

    def __init__(self, rows: RidgeInputs, held: RidgeInputs, centre: Tensor, bond: float, classes: int) -> None:
        beside = RidgeInputs(held.x.double() - centre, held.labels)
        self.kept: RidgeInputs | None = None
        self.phi: Tensor | None = None
        if rows.x.shape[1] * (1 + (classes if bond else 0)) < len(rows.x):
            self.phi = label_features(RidgeInputs(rows.x.double() - centre, rows.labels), bond, classes)
            self.beside = label_features(beside, bond, classes)
            self.gram = self.phi.T @ self.phi
            self.size = float(self.gram.diagonal().sum() / len(rows.x))
        else:
            self.kept = rows
            blocks = [rows.of(slice(i, i + 1024)) for i in range(0, len(rows.x), 1024)]
            own = [kernel(RidgeInputs(b.x.double() - centre, b.labels), rows, centre, bond) for b in blocks]
            self.gram = torch.cat(own)
            self.beside = kernel(beside, rows, centre, bond)
            self.size = float(self.gram.diagonal().mean())

    def _right(self, targets: Tensor) -> Tensor:
        return targets if self.phi is None else self.phi.T @ targets

    def solve(self, regulariser: float, targets: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(_ridged(self.gram, regulariser * self.size))
        return torch.cholesky_solve(self._right(targets), factor)

    def error(self, regulariser: float, targets: Tensor, base: Tensor, truth: Tensor) -> float:
        """The error on held-out rows; infinite if rounding leaves no positive definite matrix."""
        factor, wrong = torch.linalg.cholesky_ex(_ridged(self.gram, regulariser * self.size))
        if int(wrong):
            return float("inf")
        found = (self.beside @ torch.cholesky_solve(self._right(targets), factor) + base).clamp(0, 1)
        value = float((found - truth).square().mean())
        return value if value == value else float("inf")


def _ridged(gram: Tensor, ridge: float) -> Tensor:
    found = gram.clone()
    found.diagonal().add_(ridge)
    return found


def principal(rows: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Directions (k, count) in which rows (n, k) vary most, by random sums refined twice (Halko et al., 2011)."""
    centred = rows - rows.mean(0)
    sums = torch.randn(min(count + 16, *rows.shape), len(rows), generator=rng).to(rows)
    basis = torch.linalg.qr((sums @ centred).T).Q
    for _ in range(2):
        basis = torch.linalg.qr(centred.T @ torch.linalg.qr(centred @ basis).Q).Q
    _, _, turned = torch.linalg.svd(centred @ basis, full_matrices=False)
    directions: Tensor = basis @ turned.T
    return directions[:, :count]


# ---------------------------------------------------------------------------------------------------------- the attack


@dataclass(frozen=True)
class ridge_inversion(Attack):
    """Ridge regression of images on updates simulated with auxiliary images; one fit for all clients of a round.

    Held-out auxiliary images choose the regulariser, how much the map depends on the label, and whether it is fitted to
    updates without the chain's noise.

    Args:
        buckets: of signed feature hashing; 0: none.
        components: how many principal directions of the updates are used; 0: all.
        passes: how often each auxiliary image is grouped with others, for batches of several.
    """

    buckets: int = 0
    components: int = 0
    passes: int = 1

    def __post_init__(self) -> None:
        check_at_least(self, 0, "buckets", "components")
        check_at_least(self, 1, "passes")

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        try:
            labels = labelling.restore(wave, known).sort(1).values
            fitted = FittedRidge(
                self, ShadowTrainer(known, wave.params, UpdateFeatures(True, self.buckets), self.passes)
            )
            inverter, basis = fitted.inverter
        except ValueError as error:
            return not_applicable(wave, str(error))
        with torch.no_grad():
            x = inverter(fitted.read(fitted.shadow.view.rows(known, wave.update, labels), labels.flatten(), basis))
        x = x.to(known.auxiliary.x if known.auxiliary is not None else x).view(*labels.shape, *known.shape)
        return [TrainingRecord(inverter.error).answer(x[k], labels[k]) for k in range(len(wave))]


@dataclass(frozen=True, eq=False)
class FittedRidge:
    """The ridge of one attack under one threat model and model."""

    attack: ridge_inversion
    shadow: ShadowTrainer

    @cached_property
    def inverter(self) -> tuple[Ridge, Tensor | None]:
        """The ridge, and the principal directions that it uses."""
        shadow, name = self.shadow, f"ridge-{digest(self.shadow.key, self.attack)}"
        made = shadow.cache.get(name, self._fit)
        basis = made.get("basis")
        rows = None
        if int(made["dual"]):
            shadow_data = shadow.shadow_data(False, quiet=bool(made["quiet"]))
            rows = self._rows(shadow_data, basis)
        numbers = {k: float(made[k]) for k in ("bond", "regulariser", "error")}
        classes = shadow.known.classes
        return Ridge(made["weights"], rows, made["centre"], made["base"], classes=classes, **numbers), basis

    def read(self, rows: Tensor, labels: Tensor, basis: Tensor | None) -> RidgeInputs:
        return RidgeInputs(rows if basis is None else rows @ basis, labels)

    def _rows(self, shadow_data: ShadowDataset, basis: Tensor | None) -> RidgeInputs:
        return self.read(shadow_data.rows, shadow_data.labels.flatten(), basis)

    def _targets(self, shadow_data: ShadowDataset) -> Tensor:
        return self.shadow.auxiliary.x[shadow_data.groups.flatten()].flatten(1)

    def _fit(self) -> dict[str, Tensor]:
        quiet, bond, start = self._choice()
        shadow_data, held = self.shadow.shadow_data(False, quiet=quiet), self.shadow.shadow_data(True)
        found, basis = self._ridge(shadow_data, held, bond, start)
        numbers = {"bond": bond, "regulariser": found.regulariser, "error": found.error}
        kept = {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
        flags = {"dual": torch.tensor(int(found.rows is not None)), "quiet": torch.tensor(int(quiet))}
        tensors = {"weights": found.weights, "centre": found.centre, "base": found.base}
        return {**kept, **flags, **tensors, **({} if basis is None else {"basis": basis})}

    def _choice(self) -> tuple[bool, float, float]:
        """Whether to train on noise-free updates, bond and regulariser, as a small sample finds them best."""
        shadow, size = self.shadow, self.shadow.known.batch_size
        held = shadow.shadow_data(True)
        noisy = shadow.known.chain.mean != shadow.known.chain
        found = []
        for quiet in (False, True)[: 1 + noisy]:
            shadow_data = shadow.shadow_data(False, quiet=quiet, most=max(1, PILOT // size))
            for bond in BONDS:
                ridge, _ = self._ridge(shadow_data, held, bond, 1e-2)
                found.append((ridge.error, quiet, bond, ridge.regulariser))
        _, quiet, bond, regulariser = min(found)
        return quiet, bond, regulariser

    def _ridge(
        self, shadow_data: ShadowDataset, held: ShadowDataset, bond: float, start: float
    ) -> tuple[Ridge, Tensor | None]:
        basis = None
        if self.attack.components:
            basis = principal(shadow_data.rows, self.attack.components, generator("principal", self.shadow.key))
        rows, others = self._rows(shadow_data, basis), self._rows(held, basis)
        targets, truth = self._targets(shadow_data), self._targets(held)
        return fit(rows, targets, others, truth, bond, self.shadow.known.classes, start), basis
