"""A generative prior searched layer by layer (GIFD: Fang et al., ICCV 2023): latents first, then a generator's inner features.

Inner features can represent images that no latents can. An l1 ball around the previous layer's result limits each layer's search.
The lowest objective wins.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.generative.gi_gip import GeneratorSearch, Steps
from fedgauge.attacks.learned.generators import ImageGenerator, convolutional
from fedgauge.client.components import Positive

LAYERS = 3  # latents and the decoder's two inner layers


@dataclass(frozen=True)
class gifd(GeneratorSearch):
    """GIFD: Adam on the latents of a generator trained on auxiliary images, then on its inner features within l1 balls.

    Each layer gets a third of the iterations.

    Args:
        radius: of the first inner layer's ball, as a part of its features' l1 norm; the second one's is twice that.
    """

    radius: Positive = 0.5

    def _steps(self, generator: ImageGenerator, z: Tensor, iterations: int) -> Steps:
        decoder, many = generator.network, z.shape[:2]
        assert isinstance(decoder, convolutional)
        kept, centre = z.flatten(0, 1), None
        for layer in range(LAYERS):
            if layer:
                kept = centre = decoder.inner(kept, layer - 1).detach()
            moving, least = kept.clone().requires_grad_(), z.new_full((len(z),), torch.inf)
            adam = torch.optim.Adam([moving], lr=self.rate)
            for _ in range((iterations + LAYERS - 1 - layer) // LAYERS):
                images = decoder.image(moving, layer).unflatten(0, many)
                value = yield [moving], images, None if layer else moving.unflatten(0, many)
                assert value is not None
                nearer = value < least
                least = torch.where(nearer, value, least)
                wins = nearer.repeat_interleave(many[1]).view(-1, *[1] * (kept.ndim - 1))
                kept = torch.where(wins, moving.detach(), kept)
                adam.step()
                if centre is not None:
                    radius = self.radius * layer * centre.flatten(1).abs().sum(1)
                    moving.data = centre + l1_ball((moving.detach() - centre).flatten(1), radius).view_as(centre)


def l1_ball(points: Tensor, radius: Tensor) -> Tensor:
    """The nearest points (n, d) of l1 norm at most radius (n,) (Duchi et al., 2008)."""
    sizes = points.abs()
    sorted_sizes = sizes.sort(1, descending=True).values
    count = torch.arange(1, points.shape[1] + 1).to(points)
    cuts = (sorted_sizes.cumsum(1) - radius[:, None]) / count
    last = (sorted_sizes > cuts).sum(1, keepdim=True).clamp(min=1)
    shrunk = points.sign() * (sizes - cuts.gather(1, last - 1).clamp(min=0)).clamp(min=0)
    return torch.where(sizes.sum(1, keepdim=True) > radius[:, None], shrunk, points)
