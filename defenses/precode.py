"""PRECODE: a variational bottleneck before the last layer makes every gradient behind it random (Scheliga et al., WACV 2022)."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.client.components import Count, NotNegative
from fedgauge.client.gradient import StochasticLayer
from fedgauge.client.models.language import LanguageModel


def precode(model: nn.Module, latent: Count = 256, beta: NotNegative = 1e-3, before: str | None = None) -> nn.Module:
    """A copy of the model with a new variational bottleneck in front of the layer `before`.

    In the copy that layer is called `before.layer`, the bottleneck `before.bottleneck`.

    Args:
        latent: size of the code, >= 1.
        beta: weight of the code's Kullback-Leibler divergence (in bits) from the standard normal one in the loss, >= 0.
        before: name of a fully connected layer; default: the last one.

    Example:
        >>> defended = precode(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), latent=8)
        >>> defended(torch.rand(1, 4)).shape
        torch.Size([1, 2])

    Raises:
        ValueError: the model has no such layer.
    """
    if isinstance(model, LanguageModel):
        raise ValueError("precode is for networks of images, and this is a language model: remove it")
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name}
    name = before or next(reversed(linears), "")
    if name not in linears:
        raise ValueError(f"the model lacks the fully connected layer {name} (it has: {', '.join(linears)})")
    defended = copy.deepcopy(model)
    layer = defended.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    guarded = nn.Sequential()
    guarded.add_module("bottleneck", _VariationalBottleneck(layer.in_features, latent, beta).to(layer.weight))
    guarded.add_module("layer", layer)
    defended.set_submodule(name, guarded)
    return defended


class _VariationalBottleneck(StochasticLayer):
    """Features (B, k) -> code z = mu + sigma * noise (B, latent) -> features (B, k)."""

    def __init__(self, width: int, latent: int, beta: float) -> None:
        super().__init__()
        self.beta, self.drawn = beta, latent
        self.encoder = nn.Linear(width, 2 * latent)
        self.decoder = nn.Linear(latent, width)

    def forward(self, features: Tensor) -> Tensor:
        mu, spread = self.encoder(features).chunk(2, -1)
        sigma = F.softplus(spread)
        nats = 0.5 * (mu.square() + sigma.square() - 1) - sigma.log()  # KL(N(mu, sigma^2) || N(0, 1)), here in bits
        self.penalty = self.beta * (nats.sum(-1).mean() / math.log(2))
        noise = self.noise
        if noise is None and self.rng is not None:
            noise = torch.randn(mu.shape, generator=self.rng, dtype=mu.dtype).to(mu.device)
        found: Tensor = self.decoder(mu if noise is None else mu + sigma * noise)
        return found
