"""Simple attacks that enter the challenge: fedgauge reproduce challenge --allow tests --attack tests.challenge:nearest."""

from dataclasses import dataclass
from math import prod

import torch
from torch.func import jvp, vmap

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave
from fedgauge.attacks.engine.gradient_distances import each, squared
from fedgauge.attacks.gaussian_prior import GaussianPrior, class_means, deviations
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import gaussian
from fedgauge.attacks.matching.recipes import inverting_gradients
from fedgauge.attacks.matching.search import LBFGSSearch
from fedgauge.client.update import Batch, Update


def _row(update: Update) -> torch.Tensor:
    return torch.cat([t.flatten() for t in update.values()])


@dataclass(frozen=True)
class nearest(Attack):
    """Auxiliary images of the right classes, chosen one after another so that their gradients' sum points along the update."""

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: list[Stream]) -> list[Reconstruction]:
        x, y = known.public.x, known.public.y
        rows = torch.stack(
            [_row(known.forward(wave.params, Batch(x[i : i + 1], y[i : i + 1]), None)) for i in range(len(y))]
        )
        results = []
        for k in range(len(wave)):
            assert known.labels is not None
            seen, total, chosen = _row(wave.alone(k)), torch.zeros_like(rows[0]), []
            for label in known.labels[k]:
                fit = torch.cosine_similarity(total + rows, seen[None]).where(y == label, -2.0)
                chosen.append(int(fit.argmax()))
                total = total + rows[chosen[-1]]
            results.append(Reconstruction(x[chosen].clone(), known.labels[k], 0.0, 1, 0.0, "converged"))
        return results


@dataclass(frozen=True)
class gauss_newton(Attack):
    """Least squares of the linearised update, in the leading axes of the covariance within classes."""

    axes: int = 40
    steps: int = 4
    noise: float = 0.1

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: list[Stream]) -> list[Reconstruction]:
        prior = GaussianPrior.fit(deviations(known.public))
        top = prior.variances.argsort(descending=True)[: self.axes]
        scaled = (prior.axes[top] * prior.variances[top].sqrt()[:, None]).float()
        means = class_means(known.public, torch.arange(known.classes))
        size = known.batch_size
        directions = torch.einsum("be,ad->baed", torch.eye(size), scaled).reshape(size * len(top), size, *known.shape)
        results = []
        for k in range(len(wave)):
            assert known.labels is not None
            y, seen = known.labels[k], _row(wave.alone(k))
            kept = seen != 0
            start = means[y].float()
            z, best = torch.zeros(len(directions)), (2.0, start)
            for _ in range(self.steps):
                x = start + torch.einsum("n,n...->...", z, directions)

                def update(x: torch.Tensor, y: torch.Tensor = y) -> torch.Tensor:
                    return _row(known.forward(wave.params, Batch(x, y), None))

                now = update(x)
                moves = vmap(lambda v, x=x: jvp(update, (x,), (v,))[1], chunk_size=32)(directions)[:, kept]
                weight = 1 / (self.noise * float(seen.norm())) ** 2 * len(directions)
                system = weight * moves @ moves.T + torch.eye(len(z))
                z = torch.linalg.solve(system, weight * moves @ (seen - now)[kept] + (system - torch.eye(len(z))) @ z)
                x = (start + torch.einsum("n,n...->...", z, directions)).clamp(0, 1)
                off = 1 - float(torch.cosine_similarity(update(x)[kept], seen[kept], dim=0))
                best = min(best, (off, x), key=lambda pair: pair[0])
            results.append(Reconstruction(best[1].detach(), y, best[0], self.steps, 0.0, "converged"))
        return results


@dataclass(frozen=True)
class from_class_means(Attack):
    """Inverting Gradients from the classes' mean images instead of noise, in smaller steps."""

    needs_derivative = True

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: list[Stream]) -> list[Reconstruction]:
        assert known.labels is not None
        means = class_means(known.public, torch.arange(known.classes)).float()
        engine = inverting_gradients(rate=0.05)
        return engine.continued(wave, known, budget, streams, means[known.labels])


@dataclass(frozen=True)
class second_order(Attack):
    """iDLG's search under a Gaussian prior by class: L-BFGS, and the distance of each tensor by itself."""

    share: float = 1e-3
    needs_derivative = True

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: list[Stream]) -> list[Reconstruction]:
        prior = gaussian(2 * self.share / (known.batch_size * prod(known.shape)), by_class=True)
        engine = GradientMatching(Objective(each(squared()), (prior,)), LBFGSSearch(history=50))
        return engine.reconstruct(wave, known, budget, streams)
