"""Refinement: improves the linear inverter's answer until its update through the clients' chain matches the observed one.

It seeks the most likely image under two densities learned from auxiliary images. They are a normal density of images, and a density
of the distance between an update and that of the linear answer. Adam descends in coordinates in which the auxiliary images
are white, so few steps suffice: they are long in directions in which images vary and short in others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedgauge.attacks import label_restoration as labelling
from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Wave, not_applicable
from fedgauge.attacks.engine.cache import digest
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.attacks.learned.ridge import FittedRidge, ridge_inversion
from fedgauge.attacks.learned.shadow_updates import ShadowTrainer, aligned_orders
from fedgauge.attacks.learned.trainer import TrainingRecord
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Params, Update

RATE = 0.03  # of Adam, decaying to zero along a cosine
MOMENTS = (0.9, 0.98)
TRUST = (1.0, 10.0)  # factors by which the likelihood may count more than the linear answers' misfit suggests
TRIED = 48  # held-out auxiliary images on which the factor is chosen
TOGETHER = 64  # images at once: LeNet's windows and updates of so many are 30 MB
TINY = 1e-20  # least variance: for a tensor whose updates are always the same
SHRINK = 0.02  # of the covariance towards a multiple of the identity: fewer images than pixels leave it singular


@dataclass(frozen=True, eq=False)
class WhitenedPrior:
    """A normal density of images: x = mean + z @ factor.T with z white.

    Args:
        mean: (d,); factor: (d, d); back: (d, d), its inverse.
    """

    mean: Tensor
    factor: Tensor
    back: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "WhitenedPrior":
        """The density of images (n, C, H, W)."""
        flat = x.flatten(1).double()
        covariance = torch.cov(flat.T, correction=0).reshape(flat.shape[1], -1)
        size = float(covariance.diagonal().mean())
        covariance = (1 - SHRINK) * covariance
        covariance.diagonal().add_(SHRINK * size + 1e-9)
        values, vectors = torch.linalg.eigh(covariance)
        factor, back = vectors * values.sqrt(), (vectors / values.sqrt()).T
        return cls(*(t.to(x) for t in (flat.mean(0), factor, back)))

    def images(self, z: Tensor) -> Tensor:
        """Images (..., d) from white coordinates (..., d)."""
        return self.mean + z @ self.factor.T

    def coordinates(self, x: Tensor) -> Tensor:
        """The inverse of `images`."""
        return (x - self.mean) @ self.back.T


# of each tensor's entries, as a + b times the mean square of the observed ones. Noise has one size, but the error of a guess's
# update grows with the update, and updates of one model differ by orders of magnitude.
Variances = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, eq=False)
class UpdateLikelihood:
    """-log p(seen | images) up to a constant: normal around the chain's noise-free form, with a variance for each tensor."""

    known: Knowledge
    params: Params

    @cached_property
    def simulator(self) -> Simulator:
        """Simulates the updates to compare; if entries were dropped, as they would be without that."""
        chain = self.known.chain.visible if self.sparse else self.known.chain
        return Simulator(replace(self.known, chain=chain), self.params, quiet=True)

    @property
    def sparse(self) -> bool:
        """True if entries were dropped and are exactly zero."""
        noise = self.known.chain.update_distribution
        return noise is not None and noise.sparse

    def squares(self, x: Tensor, y: Tensor, seen: Update) -> Update:
        """Squared distances (n, entries) to each observed tensor (n, ...), for batches x (n, B, C, H, W) in [0, 1], labels y."""
        squares = {}
        for k, t in self.simulator.differentiable(x, y).items():
            if k not in self.known.chain.hidden:
                found = (seen[k] - t).square()
                squares[k] = (torch.where(seen[k] != 0, found, 0.0) if self.sparse else found).flatten(1)
        return squares

    def mean(self, seen: Tensor, squares: Tensor) -> Tensor:
        """Means (n,) of squares (n, entries) over the entries that were not dropped."""
        count = (seen != 0).flatten(1).sum(1).clamp(min=1) if self.sparse else squares.shape[1]
        return squares.sum(1) / count

    def size(self, seen: Tensor) -> Tensor:
        """Mean squares (n,) of observed tensors (n, ...)."""
        return self.mean(seen, seen.flatten(1).square())

    def slopes(self, x: Tensor, y: Tensor, seen: Update, variances: Variances) -> Tensor:
        """Its gradients by batches x (n, B, C, H, W)."""
        with torch.enable_grad():
            leaf, parts = x.detach().requires_grad_(), []
            for k, t in self.squares(leaf, y, seen).items():
                a, b = variances[k]
                parts.append(t.sum(1) / (2 * (a + b * self.size(seen[k]) + TINY)))
            (found,) = torch.autograd.grad(torch.stack(parts).sum(), leaf)
        return found.nan_to_num(0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Refinement:
    """Refines the answers of one linear inverter under one threat model and model.

    Args:
        steps: of Adam.
    """

    linear: FittedRidge
    steps: int

    @cached_property
    def shadow(self) -> ShadowTrainer:
        return self.linear.shadow

    @cached_property
    def prior(self) -> WhitenedPrior:
        x = self.shadow.auxiliary.x
        kept = self.shadow.cache.get(f"white-{digest(x, SHRINK)}", lambda: vars(WhitenedPrior.of(x)).copy())
        return WhitenedPrior(**{k: t.to(x) for k, t in kept.items()})

    @cached_property
    def misfit(self) -> UpdateLikelihood:
        return UpdateLikelihood(self.shadow.known, self.shadow.params)

    @cached_property
    def variances(self) -> Variances:
        """The distance of held-out images' updates to those of the linear answers."""
        (updates, batches, start), misfit = self.held, self.misfit
        found = misfit.squares(start.view_as(batches.x), batches.y, updates)
        return {k: _line(misfit.size(updates[k]), misfit.mean(updates[k], t.detach())) for k, t in found.items()}

    @cached_property
    def trust(self) -> tuple[float, float]:
        """The best of TRUST on held-out auxiliary images, or 0 for the plain linear answer; and its error."""

        def choose() -> dict[str, Tensor]:
            updates, batches, start = self.held
            truth, clock = batches.x.view_as(start), Deadline()
            tried = {0.0: start} | {t: self.descend(updates, batches.y, start, t, clock)[0] for t in TRUST}
            best = min((float((x - truth).square().mean()), trust) for trust, x in tried.items())
            return {"trust": torch.tensor(best, dtype=torch.float64)}

        name = f"refinement-{digest(self.shadow.key, self.linear.attack, self.steps)}"
        error, trust = self.shadow.cache.get(name, choose)["trust"].tolist()
        return trust, error

    @cached_property
    def held(self) -> tuple[Update, Batch, Tensor]:
        """A few held-out batches' updates, the batches with the labels that the attacker uses, and linear answers (n, B, d)."""
        shadow = self.shadow
        groups = shadow.groups(True)[: max(1, TRIED // shadow.known.batch_size)]
        x, y = shadow.auxiliary.x[groups], shadow.auxiliary.y[groups]
        rng = generator("refined", shadow.key)
        parts = list(Simulator(shadow.known, shadow.params).updates(x, y, rng))
        updates = {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
        labels = shadow.labels_as_restored(updates, y)
        batches = Batch(shadow.auxiliary.x[aligned_orders(groups, y, labels)], labels)
        return updates, batches, self.linear.images(updates, labels).flatten(2)

    def descend(
        self, updates: Update, labels: Tensor, start: Tensor, trust: float, clock: Deadline
    ) -> tuple[Tensor, int]:
        """Images (n, B, d) in [0, 1], from a start (n, B, d), and the number of steps."""
        variances = {k: (a / trust, b / trust) for k, (a, b) in self.variances.items()}
        found = []
        for rows in torch.arange(len(labels)).split(max(1, TOGETHER // labels.shape[1])):
            seen, y, done = {k: t[rows] for k, t in updates.items()}, labels[rows], 0
            z = self.prior.coordinates(start[rows])
            adam = torch.optim.Adam([z], lr=RATE, betas=MOMENTS)
            schedule = torch.optim.lr_scheduler.LambdaLR(
                adam, lambda done: 0.5 + 0.5 * math.cos(math.pi * done / self.steps)
            )
            while done < self.steps and not clock.over():
                x = self.prior.images(z).view(*y.shape, *self.shadow.known.shape)
                z.grad = self.misfit.slopes(x, y, seen, variances).flatten(2) @ self.prior.factor + z
                adam.step()
                schedule.step()
                done += 1
            found.append((self.prior.images(z).clamp(0, 1) if done else start[rows], done))
        images, spent = zip(*found, strict=True)
        return torch.cat(images), min(spent)


def _line(sizes: Tensor, squares: Tensor) -> tuple[float, float]:
    """a, b >= 0 with squares ~ a + b * sizes, with least relative error."""
    from scipy.optimize import nnls

    x, y = (t.double() for t in (sizes, squares))
    weights = 1 / (x + TINY)
    (a, b), _ = nnls(torch.stack([weights, x * weights], 1).numpy(), (y * weights).numpy())
    return float(a), float(b)


def refine(wave: Wave, known: Knowledge, budget: Budget, linear: ridge_inversion) -> list[Reconstruction]:
    """Refined reconstructions of each observation; the budget's iterations are Adam's steps from the linear answer."""
    clock = Deadline(budget.seconds)
    try:
        labels = labelling.restore(wave, known).sort(1).values
        shadow = ShadowTrainer(known, wave.params, linear.view, linear.passes)
        refined = Refinement(FittedRidge(linear, shadow), budget.iterations)
        start = refined.linear.images(wave.update, labels).flatten(2)
        trust, error = refined.trust
    except ValueError as problem:
        return not_applicable(wave, str(problem))
    x, spent = start, 0
    if trust:
        x, spent = refined.descend(wave.update, labels, start, trust, clock)
    x = x.view(*labels.shape, *known.shape)
    record = TrainingRecord(error, spent, budget.iterations, bool(trust) and spent < budget.iterations)
    return [record.answer(x[k], labels[k]) for k in range(len(wave))]
