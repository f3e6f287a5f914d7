"""A generative prior: optimise a generator's latents, then its weights (GI-GIP: Jeon et al., 2021)."""

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.func import vmap

from fedgauge.attacks import label_restoration as labelling
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Streams, Wave, not_applicable
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.engine.gradient_distances import likelihood
from fedgauge.attacks.learned.generators import GeneratorTraining, ImageGenerator, check, generator_of
from fedgauge.attacks.matching.gradient_matching import EveryRestart
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import Prior, gaussian, other_priors, total_variation
from fedgauge.attacks.matching.problems import Problems
from fedgauge.client.components import Count, NotNegative, Positive, Table
from fedgauge.client.update import Params

TOGETHER = 16  # problems at once, each with its own generator
# yields the variables, images (n, B, C, H, W) and latents (n, B, numbers) if they move; receives the objectives (n,)
Steps = Generator[tuple[list[Tensor], Tensor, Tensor | None], Tensor | None, None]


@dataclass(frozen=True)
class GeneratorSearch(Attack):
    """A search for a generator's image, from normal latents.

    Args:
        latent, width, training: of the generator trained on auxiliary images: its latents, channels and Adam steps.
        rate: of Adam on the latents.
        prior: weight of the latents' normal density, as a mean square; tv: of the total variation.
        normal: weight of normal densities around the class means, fitted to auxiliary images; 1 for noise of a known density.
    """

    latent: Count = 128
    width: Count = 32
    training: Count = 2000
    rate: Positive = 0.05
    prior: NotNegative = 1e-4
    tv: NotNegative = 1e-4
    normal: NotNegative = 0.0
    tunes: ClassVar[bool] = True

    @property
    def own_generator(self) -> Table | None:
        return None

    @property
    def trains_first(self) -> bool:
        return self.own_generator is None

    def variants(self, known: Knowledge) -> Mapping[str, Self]:
        """The priors that a search of pixels is tried with from the same total variation, on the generator's images."""
        density = likelihood(known.chain.update_distribution, known.batch_size).density

        def weight(priors: Sequence[Prior], kind: type[Prior]) -> float:
            return sum(p.weight for p in priors if isinstance(p, kind))

        others = other_priors((total_variation(self.tv),), known, density)
        return {
            words: replace(self, tv=weight(priors, total_variation), normal=weight(priors, gaussian))
            for words, priors in others.items()
        }

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        clock = Deadline(budget.seconds)
        like = next(iter(wave.params.values()))
        try:
            trained = GeneratorTraining(self.latent, self.width, self.training)
            generator = generator_of(self.own_generator, trained, known, like)
            labels = labelling.restore(wave, known)
            each = labels.repeat_interleave(budget.restarts, 0)
            objective = Objective(priors=(total_variation(self.tv), gaussian(self.normal, by_class=True)))
            problems = Problems(objective, wave, known, each, budget.restarts, like.dtype)
        except ValueError as error:
            return not_applicable(wave, str(error))
        size = (known.batch_size, generator.numbers)
        z = [torch.randn(size, generator=stream("latent", r)) for stream in streams for r in range(budget.restarts)]
        latents = torch.stack(z).to(like)
        parts = [
            self._search(problems, generator, rows, latents[rows].clone(), budget.iterations, clock)
            for rows in torch.arange(problems.count).split(TOGETHER)
        ]
        images, objectives, spent = (torch.cat(part) for part in zip(*parts, strict=True))
        found = EveryRestart(problems, images, each, objectives, spent, spent < budget.iterations)
        return found.best(budget, lambda x: x.clamp(0, 1).float())

    def _search(
        self, problems: Problems, generator: ImageGenerator, rows: Tensor, z: Tensor, iterations: int, clock: Deadline
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For some problems, from latents z: the images in [0, 1] of lowest objective, that objective, and iterations."""
        best, lowest, spent = made(generator, z, None), z.new_full((len(rows),), torch.inf), 0
        steps = self._steps(generator, z, iterations)
        value: Tensor | None = None
        while spent < iterations and not (spent and clock.over()):
            with torch.enable_grad():
                leaves, x, latents = steps.send(value)
                pixels = problems.known.normalise(x)
                value, slopes = problems.value_and_slopes({"x": pixels.detach()}, rows)
                total = (pixels * slopes["x"].nan_to_num(0.0, 0.0, 0.0)).sum()
                if latents is not None:
                    total = total + 0.5 * self.prior * latents.square().mean((1, 2)).sum()
                for leaf, slope in zip(leaves, torch.autograd.grad(total, leaves), strict=True):
                    leaf.grad = slope
            better = value < lowest
            lowest = torch.where(better, value, lowest)
            best = torch.where(better.view(-1, 1, 1, 1, 1), x.detach(), best)
            spent += 1
        return best, lowest, torch.full((len(rows),), spent)

    @abstractmethod
    def _steps(self, generator: ImageGenerator, z: Tensor, iterations: int) -> Steps:
        """Yield the variables, images and moved latents of each iteration; then move the variables by their gradients."""


@dataclass(frozen=True)
class gi_gip(GeneratorSearch):
    """Gradient Inversion with a Generative Image Prior: Adam on the latents, then on the weights, against the engine's likelihood.

    Args:
        generator: a user's own instead of one trained here (`fedgauge.attacks.learned.generators.own`), such as
            {use = "mynets:decoder", weights = "decoder.safetensors"}.
        share: of the iterations spent on the latents.
        weight_rate: of Adam on the weights.
    """

    share: NotNegative = 0.5
    weight_rate: Positive = 3e-3
    generator: dict | None = None  # type: ignore[type-arg]  # as TOML gives it; `check` looks at what is in it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator is not None:
            check(self.generator)

    @property
    def own_generator(self) -> Table | None:
        return self.generator

    def _steps(self, generator: ImageGenerator, z: Tensor, iterations: int) -> Steps:
        """Adam is elementwise, so one instance serves all problems."""
        first = round(self.share * iterations)
        adam = torch.optim.Adam([z.requires_grad_()], lr=self.rate)
        for _ in range(first):
            yield [z], made(generator, z, None), z
            adam.step()
        z.requires_grad_(False)
        own = {name: p.detach() for name, p in generator.network.named_parameters()}
        weights = {name: t.expand(len(z), *t.shape).clone().requires_grad_() for name, t in own.items()}
        moving = list(weights.values())
        adam = torch.optim.Adam(moving, lr=self.weight_rate, fused=True)  # unfused, it takes half of an iteration
        for _ in range(iterations - first):
            yield moving, made(generator, z, weights), None
            adam.step()


def made(generator: ImageGenerator, z: Tensor, weights: Params | None) -> Tensor:
    """Images (P, B, C, H, W) in [0, 1] from latents (P, B, numbers), with shared weights or each problem's own."""
    if weights is None:
        return generator(z.flatten(0, 1)).view(*z.shape[:2], *generator.shape)
    return vmap(lambda own, latents: generator(latents, own))(weights, z)
