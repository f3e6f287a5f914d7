"""A generative prior searched layer by layer (GIFD: Fang et al., ICCV 2023): latents first, then a generator's inner features.

Features nearer to the image can make images that no latents can, even of a kind that the generator has not seen. An l1 ball around
the previous layer's result limits each layer's search, so that its results stay images. The lowest objective wins.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.base import Budget
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.generative.gi_gip import GeneratorSearch
from fedgauge.attacks.learned.generators import Decoder, ImageGenerator
from fedgauge.attacks.matching.problems import Problems
from fedgauge.client.components import check_above_zero

LAYERS = 3  # latents and the decoder's two inner layers


@dataclass(frozen=True)
class gifd(GeneratorSearch):
    """GIFD: Adam on the latents of a generator trained on auxiliary images, then on its inner features within l1 balls.

    Each layer gets a third of the iterations.

    Args:
        radius: of the first inner layer's ball, as a part of its features' l1 norm; the second one's is twice that.
    """

    radius: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(self, "radius")

    def _search(
        self, problems: Problems, generator: ImageGenerator, z: Tensor, budget: Budget, started: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        decoder, clock = generator.network, Deadline(started, budget.seconds)
        assert isinstance(decoder, Decoder)
        rows, many = torch.arange(len(z)), z.shape[:2]
        best, lowest, spent = decoder(z.flatten(0, 1)).unflatten(0, many), z.new_full((len(z),), torch.inf), 0
        kept, centre = z.flatten(0, 1), None
        for layer in range(LAYERS):
            if layer:
                kept = centre = decoder.inner(kept, layer - 1).detach()
            at, least = kept, z.new_full((len(z),), torch.inf)
            moving = at.clone().requires_grad_()
            adam = torch.optim.Adam([moving], lr=self.rate)
            for _ in range((budget.iterations + LAYERS - 1 - layer) // LAYERS):
                if clock.over():
                    break
                with torch.enable_grad():
                    x = decoder.image(moving, layer).unflatten(0, many)
                    value = self.pull(problems, rows, x, None if layer else moving.unflatten(0, many), [moving])
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
