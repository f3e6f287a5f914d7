"""A generative prior searched layer by layer (GIFD: Fang et al., ICCV 2023): latents first, then a generator's inner features.

Features nearer to the image can make images that no latents can, also of a kind that the generator has not seen; so that they stay
images, each layer's search keeps to an l1 ball around what the layer before it found. The layer with the lowest objective wins.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks import labels as labelling
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.engine.cache import TensorCache
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.generative.gi_gip import best_restart
from fedgauge.attacks.learned.generators import Decoder, GeneratorTraining
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import total_variation
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.setting_checks import check_above_zero, check_at_least

LAYERS = 3  # latents and the decoder's two inner layers


@dataclass(frozen=True)
class gifd(Attack):
    """GIFD: Adam on the latents of a generator trained on auxiliary images, then on its inner features within l1 balls.

    Args:
        latent, width, training: of that generator: its latents, channels and Adam steps.
        rate: of Adam; a layer gets a third of the iterations.
        radius: of the first inner layer's ball, as a part of its features' l1 norm; the second one's is twice that.
        prior: weight of the latents' normal density, as a mean square; tv: of the total variation.
    """

    latent: int = 128
    width: int = 32
    training: int = 2000
    rate: float = 0.05
    radius: float = 0.5
    prior: float = 1e-4
    tv: float = 1e-4

    def __post_init__(self) -> None:
        check_at_least(self, 1, "latent", "width", "training")
        check_at_least(self, 0, "prior", "tv")
        check_above_zero(self, "rate", "radius")

    @property
    def trains_first(self) -> bool:
        return True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        started = time.perf_counter()
        like = next(iter(wave.params.values()))
        try:
            trained = GeneratorTraining(self.latent, self.width, self.training)
            decoder = trained.decoder(known, TensorCache.own()).to(like)
            labels = labelling.restore(wave, known)
            each = labels.repeat_interleave(budget.restarts, 0)
            objective = Objective(priors=(total_variation(self.tv),))
            problems = Problems(objective, wave, known, each, budget.restarts, like.dtype)
        except ValueError as error:
            return not_applicable(wave, str(error))
        size = (known.batch_size, self.latent)
        z = [torch.randn(size, generator=stream("latent", r)) for stream in streams for r in range(budget.restarts)]
        clock = Deadline(started, budget.seconds)
        images, objectives, spent = self._search(problems, decoder, torch.stack(z).to(like), budget.iterations, clock)
        seconds = (time.perf_counter() - started) / len(wave)
        return [
            best_restart(images[own], objectives[own], spent[own], labels[k], budget, seconds)
            for k, own in enumerate(torch.arange(problems.count).view(-1, budget.restarts))
        ]

    def _search(
        self, problems: Problems, decoder: Decoder, z: Tensor, iterations: int, clock: Deadline
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The images in [0, 1] of lowest objective, from latents z (P, B, latent); that objective, and iterations."""
        rows, many = torch.arange(len(z)), z.shape[:2]
        best, lowest, spent = decoder(z.flatten(0, 1)).unflatten(0, many), z.new_full((len(z),), torch.inf), 0
        kept, centre = z.flatten(0, 1), None
        for layer in range(LAYERS):
            if layer:
                kept = centre = decoder.inner(kept, layer - 1).detach()
            at, least = kept, z.new_full((len(z),), torch.inf)
            moving = at.clone().requires_grad_()
            adam = torch.optim.Adam([moving], lr=self.rate)
            for _ in range((iterations + LAYERS - 1 - layer) // LAYERS):
                if clock.over():
                    break
                with torch.enable_grad():
                    x = decoder.image(moving, layer).unflatten(0, many)
                    value, slopes = problems.value_and_slopes({"x": problems.known.normalise(x).detach()}, rows)
                    pull = (problems.known.normalise(x) * slopes["x"].nan_to_num(0.0, 0.0, 0.0)).sum()
                    if not layer:
                        pull = pull + 0.5 * self.prior * moving.unflatten(0, many).square().mean((1, 2)).sum()
                    (moving.grad,) = torch.autograd.grad(pull, [moving])
                better, nearer = value < lowest, value < least
                lowest, least = torch.where(better, value, lowest), torch.where(nearer, value, least)
                best = torch.where(better.view(-1, 1, 1, 1, 1), x.detach(), best)
                wins = nearer.repeat_interleave(many[1]).view(-1, *[1] * (at.ndim - 1))
                kept = torch.where(wins, moving.detach(), kept)
                adam.step()
                if centre is not None:
                    radius = self.radius * layer * centre.flatten(1).abs().sum(1)
                    moving.data = centre + l1_ball((moving.detach() - centre).flatten(1), radius).view_as(centre)
                spent += 1
        return best, lowest, torch.full((len(z),), spent)


def l1_ball(points: Tensor, radius: Tensor) -> Tensor:
    """The nearest points (n, d) of l1 norm at most radius (n,) (Duchi et al., 2008)."""
    sizes = points.abs()
    sorted_sizes = sizes.sort(1, descending=True).values
    count = torch.arange(1, points.shape[1] + 1).to(points)
    cuts = (sorted_sizes.cumsum(1) - radius[:, None]) / count
    last = (sorted_sizes > cuts).sum(1, keepdim=True).clamp(min=1)
    shrunk = points.sign() * (sizes - cuts.gather(1, last - 1).clamp(min=0)).clamp(min=0)
    return torch.where(sizes.sum(1, keepdim=True) > radius[:, None], shrunk, points)
