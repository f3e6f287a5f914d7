"""Priors on images: -log p(x) up to a constant, on normalised images x (B, C, H, W) of one observation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.computation import layer_inputs
from fedgauge.attacks.gaussian_prior import GaussianPrior, class_means, deviations
from fedgauge.attacks.learned.generators import GeneratorTraining, check, generator_of
from fedgauge.client.components import Checked, ComponentKind, Count, NotNegative, Positive
from fedgauge.client.update import Params

ESTIMATED = 64  # batches of auxiliary images from which BatchNorm's statistics are estimated
Energy = Callable[[Tensor], Tensor]  # x (B, C, H, W) -> a scalar


@dataclass(frozen=True, eq=False)
class PairedEnergy:
    """The energy of images together with their labels, or with latents that are optimised with them.

    Args:
        energy: x (B, C, H, W), and y (B,) int64 or probabilities (B, classes), or latents (B, numbers) -> a scalar.
        numbers: latents of one image, which start at 0; 0: the energy takes labels.
        likeliest: labels (N, B) int64 -> the normalised images (N, B, C, H, W) of the lowest energy, near which the search starts.
    """

    energy: Callable[[Tensor, Tensor], Tensor]
    numbers: int = 0
    likeliest: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor, given: Tensor) -> Tensor:
        return self.energy(x, given)


class Prior(Checked, ABC):
    """A frozen dataclass; its weight is the prior's share of the objective."""

    weight: NotNegative

    @property
    def trains_first(self) -> bool:
        """True if `bind` trains a network on auxiliary images."""
        return False

    @abstractmethod
    def bind(self, known: Knowledge, params: Params) -> Energy | PairedEnergy:
        """The prior's value as a function of images; does the work that is needed only once.

        Raises:
            ValueError: the attacker lacks what the prior needs.
        """


PRIOR = ComponentKind("a prior", ("fedgauge.priors",), Prior)


@dataclass(frozen=True)
class total_variation(Prior):
    """Differences between neighbours along each axis of an image, a window or a volume.

    Args:
        power: 1: the means of |dx| and |dy| (Inverting Gradients, eq. 4); 2: the sums of their squares over the pixels, as
            in GradInversion; the weights of the two differ by the number of pixels.
    """

    weight: NotNegative
    power: Literal[1, 2] = 1

    def bind(self, known: Knowledge, params: Params) -> Energy:
        return self._energy

    def _energy(self, x: Tensor) -> Tensor:
        steps = [x.diff(dim=axis) for axis in range(x.dim() - 1, 1, -1)]  # the last axis first: x, then y
        parts = [d.square().sum() if self.power == 2 else _mean(d.abs()) for d in steps]
        return reduce(torch.add, parts) if parts else x.new_zeros(())


def _mean(differences: Tensor) -> Tensor:
    """Their mean; 0 where there are none, as across an image that is one pixel high."""
    return differences.mean() if differences.numel() else differences.sum()


@dataclass(frozen=True)
class magnitude(Prior):
    """The mean square of normalised pixels (the L2 term of DeepInversion)."""

    weight: NotNegative

    def bind(self, known: Knowledge, params: Params) -> Energy:
        return lambda x: x.square().mean()


@dataclass(frozen=True)
class batch_statistics(Prior):
    """The distance of the batch's statistics at every BatchNorm's input to known ones (DeepInversion; GradInversion).

    The sum over layers of |mean - known mean| + |variance - known variance|, with Euclidean norms over the channels; 0
    for a model without running statistics.

    Args:
        of: "running": the running statistics; in train mode those of the client's own batch, computed from the buffers that it
            returns (GIA Running). "auxiliary": the mean over batches of auxiliary images (GIA Estimate).
    """

    weight: NotNegative
    of: Literal["running", "auxiliary"] = "running"

    def bind(self, known: Knowledge, params: Params) -> Energy:
        norms = [m for m in known.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        layers = [m for m in norms if m.running_mean is not None]
        if not layers:
            return lambda x: x.new_zeros(())
        estimated = _estimated(known, params, layers) if self.of == "auxiliary" else None

        def energy(x: Tensor) -> Tensor:
            distances: list[Tensor] = []
            for k, (module, values) in enumerate(layer_inputs(known.model, params, layers, x)):
                running = cast(tuple[Tensor, Tensor], (module.running_mean, module.running_var))
                mean, variance = running if estimated is None else estimated[k]
                found = _moments(values)
                distances.append((found[0] - mean).square().sum().add(1e-12).sqrt())
                distances.append((found[1] - variance).square().sum().add(1e-12).sqrt())
            return torch.stack(distances).sum()

        return energy


def _estimated(known: Knowledge, params: Params, layers: Sequence[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """The mean, over batches of auxiliary images, of a batch's mean and variance at each use of these layers."""
    public = known.enough(known.batch_size, 'raise [data] auxiliary, or set of = "running"')
    batches = [some for some in public.x.split(known.batch_size)[:ESTIMATED] if len(some) == known.batch_size]
    with torch.no_grad():
        uses = zip(*(layer_inputs(known.model, params, layers, known.normalise(some)) for some in batches), strict=True)
        found = [zip(*(_moments(values) for _, values in use), strict=True) for use in uses]
        return [(torch.stack(means).mean(0), torch.stack(variances).mean(0)) for means, variances in found]


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    by_channel = values.transpose(0, 1).flatten(1)
    return by_channel.mean(1), by_channel.var(1, correction=0)


@dataclass(frozen=True)
class gaussian(Prior):
    """A normal distribution over an example's pixels: half the squared Mahalanobis distance.

    It is fitted to the attacker's auxiliary images.

    Args:
        weight: 1 next to a true log-likelihood, such as that of noise; much smaller next to a cosine distance.
        by_class: each image has its class's mean, and all have the covariance within classes; labels are restored or given.
    """

    weight: NotNegative = 1.0
    by_class: bool = False

    def bind(self, known: Knowledge, params: Params) -> Energy | PairedEnergy:
        fitted = GaussianPrior.fit(deviations(known.public) if self.by_class else known.public.x)
        if not self.by_class:
            return partial(mahalanobis, known, fitted.mean, fitted)
        every = torch.arange(known.classes, device=known.public.y.device)
        means = class_means(known.public, every).flatten(1).double()

        def energy(x: Tensor, y: Tensor) -> Tensor:
            weights = y if y.is_floating_point() else nn.functional.one_hot(y, known.classes)
            return mahalanobis(known, weights.to(means) @ means, fitted, x)

        return PairedEnergy(energy, likeliest=lambda y: known.normalise(means[y].view(*y.shape, *known.shape)))


def mahalanobis(known: Knowledge, mean: Tensor, fitted: GaussianPrior, x: Tensor) -> Tensor:
    """Half the squared distance of images x (B, C, H, W) from means (d,) or (B, d), summed, by the covariance's axes."""
    centred = known.pixels(x).flatten(1) - mean.to(x)
    along = centred @ fitted.axes.to(x).T
    more = (1 / fitted.variances - 1 / fitted.rest).to(x)
    return 0.5 * (centred.square().sum() / fitted.rest + (along.square() * more).sum())


STRONGER = 10.0  # how much more total variation is tried
# shares of the objective for a Gaussian prior, if the distance is no density
SHARES = (1e-3, 1e-2, 1e-1, 1.0)
DENSITIES = (0.3, 1.0, 3.0)  # its weights, if the distance is a density
PART = 0.3  # of both, where a Gaussian and total variation are tried together


def other_priors(own: Sequence[Prior], known: Knowledge, density: bool) -> dict[str, tuple[Prior, ...]]:
    """Priors to try in place of an attack's total variation, in words; other priors stay.

    Beside a density, total variation is also tried at the scale that fits the auxiliary images best, and a Gaussian at weights
    around 1. Beside another distance, which is about 1 where nothing fits, a Gaussian is tried at several shares of it.

    Args:
        density: whether the likelihood is -log p(seen | x).
    """
    if known.auxiliary is None or not known.mean:
        return {}
    smooth = [p for p in own if isinstance(p, total_variation)]
    others = _without_total_variation(own)
    found: dict[str, tuple[Prior, ...]] = {}
    weights = [fitted_total_variation(known)] if density else [STRONGER * p.weight for p in smooth if p.weight]
    for weight in weights:
        first = replace(smooth[0], weight=weight) if smooth else total_variation(weight)
        found[f"total variation at {weight:.3g}"] = (*others, first)
    pixels = known.batch_size * known.auxiliary.x[0].numel()
    found |= dict(gaussian_by_class(own, w) for w in (DENSITIES if density else [2 * s / pixels for s in SHARES]))
    if density:  # both see what the other overlooks: pixels that vary in all images, and edges
        both = (total_variation(PART * weights[0]), gaussian(PART, by_class=True))
        found[f"a Gaussian prior by class and total variation, each at {PART} of its weight"] = (*others, *both)
    return found


def gaussian_by_class(own: Sequence[Prior], weight: float) -> tuple[str, tuple[Prior, ...]]:
    return f"a Gaussian prior by class at {weight:.3g}", (
        *_without_total_variation(own),
        gaussian(weight, by_class=True),
    )


def _without_total_variation(own: Sequence[Prior]) -> tuple[Prior, ...]:
    return tuple(p for p in own if not isinstance(p, total_variation))


def fitted_total_variation(known: Knowledge) -> float:
    """The weight at which exp(-weight * total_variation) fits auxiliary batches best, by maximum likelihood.

    The term is homogeneous of degree 1, so the density's constant is weight^n for n pixels of a batch, and the best weight is
    n / its mean.
    """
    x = known.normalise(known.public.x)
    mean = float(total_variation(1.0).bind(known, {})(x))
    return known.batch_size * x[0].numel() / max(mean, 1e-12)


@dataclass(frozen=True)
class laplacian(Prior):
    """Independent Laplace distributions of pixels in [0, 1]: the sum of |x - mean| / scale."""

    weight: NotNegative
    mean: float
    scale: float

    def bind(self, known: Knowledge, params: Params) -> Energy:
        return lambda x: (known.pixels(x) - self.mean).abs().sum() / self.scale


@dataclass(frozen=True)
class generator_prior(Prior):
    """A generator's images of normal latents, with normal noise in each pixel.

    |x - G(z)|^2 / (2 deviation^2) + |z|^2 / 2, summed over examples and pixels in [0, 1]: the density of an image and its
    latents under a variational autoencoder trained on auxiliary images.

    Args:
        weight: 1 next to a true log-likelihood, such as that of noise; much smaller next to a cosine distance.
        generator: a user's own (`fedgauge.attacks.learned.generators.own`); default: trained on the auxiliary images.
        latent, width, training: for the trained generator: latents, channels and Adam steps.
        deviation: of the noise.
    """

    weight: NotNegative = 1.0
    generator: dict | None = None  # type: ignore[type-arg]  # as TOML gives it; `check` looks at what is in it
    latent: Count = 128
    width: Count = 32
    training: Count = 2000
    deviation: Positive = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator is not None:
            check(self.generator)

    @property
    def trains_first(self) -> bool:
        return self.generator is None

    def bind(self, known: Knowledge, params: Params) -> PairedEnergy:
        trained = GeneratorTraining(self.latent, self.width, self.training)
        made = generator_of(self.generator, trained, known, next(iter(params.values())))

        def energy(x: Tensor, z: Tensor) -> Tensor:
            apart = (known.pixels(x) - made(z)).square().sum() / (2 * self.deviation**2)
            return apart + 0.5 * z.square().sum()

        return PairedEnergy(energy, made.numbers)
