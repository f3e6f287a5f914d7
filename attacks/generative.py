"""A generative prior: search the images that a generator can make, then the generator's weights (GI-GIP: Jeon et al., 2021).

The generator is the decoder of a small variational autoencoder (Kingma & Welling, 2014), trained on the auxiliary images.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from attacks import labels as labelling
from attacks.base import Attack, Budget, Knowledge, Reconstruction, Status, Stream, Wave, not_applicable
from attacks.matching import GradientMatching
from attacks.priors import total_variation
from attacks.problems import Problems
from attacks.shelf import Shelf, digest
from attacks.waves import Clock
from client.models import Shape
from client.rng import generator, seed_of

TOGETHER = 16  # problems, each with a generator of its own
VERSION = 1  # of what the shelf keeps


class Decoder(nn.Module):
    """Latents (N, latent) to images (N, C, H, W) in [0, 1]: a linear layer, then two transposed convolutions of stride 2."""

    def __init__(self, shape: Shape, latent: int, width: int) -> None:
        super().__init__()
        self.shape, self.width = shape, width
        self.small = -(-shape[1] // 4), -(-shape[2] // 4)
        self.linear = nn.Linear(latent, 2 * width * math.prod(self.small))
        self.up1 = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.up2 = nn.ConvTranspose2d(width, shape[0], 4, 2, 1)

    def forward(self, z: Tensor) -> Tensor:
        start = F.relu(self.linear(z)).view(-1, 2 * self.width, *self.small)
        found: Tensor = torch.sigmoid(self.up2(F.relu(self.up1(start))))
        return found[:, :, : self.shape[1], : self.shape[2]]


class Encoder(nn.Module):
    """Images to means and log-variances (N, latent) of latents."""

    def __init__(self, shape: Shape, latent: int, width: int) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(shape[0], width, 4, 2, 1)
        self.down2 = nn.Conv2d(width, 2 * width, 4, 2, 1)
        self.linear = nn.Linear(2 * width * (shape[1] // 4) * (shape[2] // 4), 2 * latent)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.linear(F.relu(self.down2(F.relu(self.down1(x)))).flatten(1))
        mean, logarithm = found.chunk(2, 1)
        return mean, logarithm


@dataclass(frozen=True)
class Generators:
    """How a generator is made of auxiliary images.

    Args:
        latent: numbers that an image is made of; width: channels of the last layer but one.
        steps, batch, rate: of Adam, on the evidence lower bound with noise of deviation `noise` in each pixel.
    """

    latent: int = 128
    width: int = 32
    steps: int = 2000
    batch: int = 64
    rate: float = 1e-3
    noise: float = 0.1

    def decoder(self, known: Knowledge, shelf: Shelf) -> Decoder:
        """Trained, or as it was once; ValueError where there are no images of the right shape."""
        if known.auxiliary is None:
            raise ValueError("a generator is trained on auxiliary images, and the attacker has none")
        x = known.auxiliary.x
        if tuple(x.shape[1:]) != tuple(known.shape):
            raise ValueError(
                f"expected auxiliary images of the clients' shape {tuple(known.shape)}, got {tuple(x.shape[1:])}"
            )
        if min(known.shape[1:]) < 4:
            raise ValueError(f"a generator needs images of at least 4 x 4 pixels, got {known.shape[1:]}")
        name = digest("generator", VERSION, self, x)
        weights = shelf.get(f"generator-{name}", lambda: self._train(x, name))
        decoder = self._networks(known.shape, name)[0]
        decoder.load_state_dict(weights)
        return decoder.requires_grad_(False)

    def _networks(self, shape: Shape, name: str) -> tuple[Decoder, Encoder]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of("generator", name))
            return Decoder(shape, self.latent, self.width), Encoder(shape, self.latent, self.width)

    def _train(self, x: Tensor, name: str) -> dict[str, Tensor]:
        c, h, w = x.shape[1:]
        decoder, encoder = (network.to(x) for network in self._networks((c, h, w), name))
        weights = [*decoder.parameters(), *encoder.parameters()]
        adam, rng = torch.optim.Adam(weights, lr=self.rate), generator("generator", name)
        for _ in range(self.steps):
            images = x[torch.randint(len(x), (self.batch,), generator=rng)]
            with torch.enable_grad():
                mean, logarithm = encoder(images)
                z = mean + (logarithm / 2).exp() * torch.randn(mean.shape, generator=rng).to(mean)
                misfit = (decoder(z) - images).square().sum() / (2 * self.noise**2)
                divergence = 0.5 * (mean.square() + logarithm.exp() - 1 - logarithm).sum()
                slopes = torch.autograd.grad((misfit + divergence) / self.batch, weights)
            for p, slope in zip(weights, slopes, strict=True):
                p.grad = slope
            adam.step()
        return {k: t.detach() for k, t in decoder.state_dict().items()}


@dataclass(frozen=True)
class gi_gip(Attack):
    """Gradient Inversion with a Generative Image Prior: Adam on the latents, then on the weights, against the engine's likelihood.

    Args:
        latent, width, training: of the generator, its latents, its channels, Adam's steps.
        share: of the iterations that are spent on the latents.
        rate, weight_rate: of Adam on latents and on weights.
        prior: weight of the latents' normal density, a mean square's.
        tv: of the total variation.
    """

    latent: int = 128
    width: int = 32
    training: int = 2000
    share: float = 0.5
    rate: float = 0.05
    weight_rate: float = 1e-3
    prior: float = 1e-4
    tv: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("latent", "width", "training"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must lie in 0..1, got {self.share}")
        for name in ("rate", "weight_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("prior", "tv"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        started = time.perf_counter()
        like = next(iter(wave.params.values()))
        try:
            decoder = Generators(self.latent, self.width, self.training).decoder(known, Shelf.own()).to(like)
            labels = labelling.restore(wave, known)
            matching = GradientMatching(priors=(total_variation(self.tv),))
            problems = Problems(
                matching, wave, known, labels.repeat_interleave(budget.restarts, 0), budget.restarts, like.dtype
            )
        except ValueError as error:
            return not_applicable(wave, str(error))
        draw = partial(torch.randn, (known.batch_size, self.latent))
        starts = [draw(generator=stream("latent", r)) for stream in streams for r in range(budget.restarts)]
        clock = Clock(started, budget.seconds)
        parts = [
            self._search(problems, decoder, rows, torch.stack(starts).to(like)[rows], budget, clock)
            for rows in torch.arange(problems.count).split(TOGETHER)
        ]
        images, objectives, spent = (torch.cat(part) for part in zip(*parts, strict=True))
        return [
            _best(images[own], objectives[own], spent[own], labels[k], budget)
            for k, own in enumerate(torch.arange(problems.count).view(-1, budget.restarts))
        ]

    def _search(
        self, problems: Problems, decoder: Decoder, rows: Tensor, z: Tensor, budget: Budget, clock: Clock
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of some problems the images in [0, 1] of the lowest objective, that objective, and iterations; from latents z."""
        weights = {k: t.expand(len(rows), *t.shape).clone() for k, t in decoder.state_dict().items()}
        best, lowest = _made(decoder, weights, z), z.new_full((len(rows),), torch.inf)
        spent = 0
        for moving, rate in self._phases(z, weights, budget.iterations):
            if clock.over():
                break
            leaves = [t.requires_grad_() for t in moving]
            with torch.enable_grad():
                x = _made(decoder, weights, z)
                value, slopes = problems.value_and_slopes({"x": problems.known.normalise(x).detach()}, rows)
                pull = (problems.known.normalise(x) * slopes["x"].nan_to_num(0.0, 0.0, 0.0)).sum()
                total = pull + 0.5 * self.prior * z.square().mean((1, 2)).sum()
                steps = torch.autograd.grad(total, leaves)
            better = value < lowest
            lowest = torch.where(better, value, lowest)
            best = torch.where(better.view(-1, 1, 1, 1, 1), x.detach(), best)
            for leaf, step in zip(leaves, steps, strict=True):
                leaf.grad = step
            rate.step()
            for t in moving:
                t.requires_grad_(False)
            spent += 1
        return best, lowest, torch.full((len(rows),), spent)

    def _phases(
        self, z: Tensor, weights: dict[str, Tensor], iterations: int
    ) -> Iterator[tuple[list[Tensor], torch.optim.Adam]]:
        """What moves in each iteration, and how; Adam works on each number alone, so one serves all problems."""
        first = round(self.share * iterations)
        for moving, rate, count in (
            ([z], self.rate, first),
            (list(weights.values()), self.weight_rate, iterations - first),
        ):
            adam = torch.optim.Adam(moving, lr=rate)
            for _ in range(count):
                yield moving, adam


def _made(decoder: Decoder, weights: dict[str, Tensor], z: Tensor) -> Tensor:
    """Images (P, B, C, H, W) in [0, 1], each problem's by weights of its own."""
    found: Tensor = vmap(lambda own, latents: functional_call(decoder, own, (latents,)))(weights, z)
    return found


def _best(x: Tensor, objectives: Tensor, spent: Tensor, labels: Tensor, budget: Budget) -> Reconstruction:
    """The restart of the lowest objective, of images (R, B, C, H, W)."""
    best, done = int(objectives.argmin()), int(spent.max())
    status: Status = "converged"
    reason = ""
    if done and not torch.isfinite(objectives[best]):
        status, reason = "diverged", "the objective is not finite"
    elif done < budget.iterations:
        status, reason = "out_of_budget", f"{done} of {budget.iterations} iterations in {budget.seconds} s"
    found = Reconstruction(x[best].clamp(0, 1), labels, float(objectives[best]), done, 0.0, status, reason)
    return replace(found, x=found.x.float() if found.x is not None else None)
