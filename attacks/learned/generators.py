"""Generators: networks that map latents to images, trained here on auxiliary images, or a user's own with its weights.

The one trained here is the decoder of a small variational autoencoder (Kingma & Welling, 2014).
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.cache import TensorCache, digest
from fedgauge.attacks.learned.trainer import perceptron, seeded
from fedgauge.client.components import Checked, ComponentKind, Count, Range, Table, build, check_arguments, resolve
from fedgauge.client.models.vision import Shape, check_images, load_weights
from fedgauge.client.rng import generator
from fedgauge.client.update import Params

GENERATOR = ComponentKind("a generator", ("fedgauge.generators",), nn.Module, annotated=False)
WHERE = "generator"  # the key that names one, in messages
VERSION = 1  # of the cached tensors
_OWN = ("weights", "latent", "range")  # keys of a generator's table other than its component's arguments
_PROBES = 64  # images with which a generator's range is checked
_SLACK = 1e-3  # of the range: rounding


@dataclass(frozen=True, eq=False)
class ImageGenerator:
    """A generator with the shapes of its latents and images.

    Args:
        network: in eval mode, frozen.
        latent: shape of one image's latents.
        shape: (C, H, W) of an image.
        low, high: the network's values for black and white.
    """

    network: nn.Module
    latent: tuple[int, ...]
    shape: Shape
    low: float = 0.0
    high: float = 1.0

    @property
    def numbers(self) -> int:
        return math.prod(self.latent)

    def __call__(self, z: Tensor, weights: Params | None = None) -> Tensor:
        """Latents (N, numbers) to images (N, C, H, W) in [0, 1]."""
        z = z.view(len(z), *self.latent)
        images: Tensor = self.network(z) if weights is None else functional_call(self.network, weights, (z,))
        return (images.reshape(len(z), *self.shape) - self.low) / (self.high - self.low)


def generator_of(table: Table | None, trained: "GeneratorTraining", known: Knowledge, like: Tensor) -> ImageGenerator:
    """A user's own generator if a table names one, else one trained on the auxiliary images; ValueError if neither fits."""
    check_images(known.shape)
    made = own(table, known.shape) if table else ImageGenerator(trained.decoder(known), (trained.latent,), known.shape)
    made.network.to(like)
    return made


class convolutional(nn.Module):
    """The same network as trained here, for weights from a longer training elsewhere.

    Latents (N, latent) to images (N, C, H, W) in [0, 1]: a linear layer, then two transposed convolutions of stride 2.
    """

    def __init__(self, shape: Shape, latent: int = 128, width: int = 32) -> None:
        super().__init__()
        self.shape, self.width = shape, width
        self.small = -(-shape[1] // 4), -(-shape[2] // 4)
        self.linear = nn.Linear(latent, 2 * width * math.prod(self.small))
        self.up1 = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.up2 = nn.ConvTranspose2d(width, shape[0], 4, 2, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.image(z, 0)

    def inner(self, at: Tensor, layer: int) -> Tensor:
        """The output of an inner layer: 0 for latents, 1 for the first features."""
        if layer == 0:
            return F.relu(self.linear(at)).view(-1, 2 * self.width, *self.small)
        return F.relu(self.up1(at))

    def image(self, at: Tensor, layer: int) -> Tensor:
        """Images from a layer's input: 0 latents, 1 the first features, 2 the second ones."""
        for k in range(layer, 2):
            at = self.inner(at, k)
        found: Tensor = torch.sigmoid(self.up2(at))
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
class GeneratorTraining:
    """The training of a generator on auxiliary images.

    Args:
        latent: latents of an image; width: channels of the last layer but one.
        steps, batch, rate: of Adam, on the evidence lower bound with noise of deviation `noise` in each pixel.
    """

    latent: int = 128
    width: int = 32
    steps: int = 2000
    batch: int = 64
    rate: float = 1e-3
    noise: float = 0.1

    def decoder(self, known: Knowledge) -> convolutional:
        """The decoder, trained now or cached; ValueError where there are no auxiliary images."""
        x = known.public.x
        name = digest("generator", VERSION, self, x)
        decoder = self._networks(known.shape, name)[0]
        decoder.load_state_dict(TensorCache.own().get(f"generator-{name}", lambda: self._train(x, name)))
        return decoder.requires_grad_(False)

    def _networks(self, shape: Shape, name: str) -> tuple[convolutional, Encoder]:
        size = (shape, self.latent, self.width)
        return seeded(lambda: (convolutional(*size), Encoder(*size)), "generator", name)

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
                adam.zero_grad()
                ((misfit + divergence) / self.batch).backward()
            adam.step()
        return {k: t.detach() for k, t in decoder.state_dict().items()}


def fully_connected(
    shape: Shape, latent: int, hidden: Sequence[int] = (256, 256), end: Literal["sigmoid", "tanh"] = "sigmoid"
) -> nn.Module:
    """Linear layers with ReLUs between, a sigmoid or tanh at the end; hidden: their widths."""
    return perceptron([latent, *hidden, math.prod(shape)], nn.Sigmoid() if end == "sigmoid" else nn.Tanh())


@dataclass(frozen=True)
class GeneratorFile(Checked):
    """The keys of a generator's table that are not its component's arguments.

    Args:
        weights: a file for `fedgauge.client.models.vision.load_weights`.
        latent: latents of an image; default: what the layers take.
        range: the generator's values for black and white.
    """

    weights: Path
    latent: Count | None = None
    range: Annotated[tuple[float, float], Range("black and white", lambda ends: ends[0] < ends[1])] = (0.0, 1.0)


def check(table: Table) -> tuple[Table, GeneratorFile]:
    """A generator's component and file, checked before the file is read; SpecError if something is missing or wrong."""
    target = resolve(table, WHERE, GENERATOR)
    shared = {"latent"} & inspect.signature(target).parameters.keys()
    component = {k: v for k, v in table.items() if k not in _OWN or k in shared}
    arguments = {k: v for k, v in component.items() if k != "use"}
    check_arguments(target, arguments, WHERE, {"shape": (1, 1, 1)}, _OWN)
    file = {k: v for k, v in table.items() if k in _OWN}
    return component, GeneratorFile(**check_arguments(GeneratorFile, file, WHERE))


def own(table: Table, shape: Shape) -> ImageGenerator:
    """A user's generator, from its name with its arguments and its file of weights (see GeneratorFile).

    Raises:
        ValueError: it is not allowed, its weights do not fit, or its images have another shape or range.
    """
    component, file = check(table)
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights, which the file replaces
        network: nn.Module = build(component, WHERE, GENERATOR, {"shape": shape}, _OWN)
    network = network.eval().requires_grad_(False)
    load_weights(network, file.weights)
    found = ImageGenerator(network, _latents(network, file.latent), shape, *file.range)
    try:
        images = found(torch.randn(_PROBES, found.numbers, generator=generator("probe")))
    except (RuntimeError, AttributeError) as error:
        raise ValueError(f"{WHERE}: expected images of the clients' shape {tuple(shape)}: {error}") from error
    if not (float(images.min()) >= -_SLACK and float(images.max()) <= 1 + _SLACK):
        remedy = "set range = [black, white], which is [-1, 1] after a tanh"
        raise ValueError(f"{WHERE}: expected values in [{found.low:g}, {found.high:g}]; {remedy}")
    return found


def with_absolute_paths(table: Table, base: Path) -> Table:
    """An attack's table with absolute paths to its generators' weights; relative paths start from base."""

    def place(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return with_absolute_paths(value, base)
        return str(base.absolute() / value) if key == "weights" and isinstance(value, str) else value

    return {key: place(key, value) for key, value in table.items()}


def _latents(network: nn.Module, latent: int | None) -> tuple[int, ...]:
    """The shape of one image's latents, of the given size or else of the first size that the network takes."""
    layers = [m for m in network.modules() if isinstance(m, nn.Linear | nn.ConvTranspose2d | nn.Conv2d)]
    widths = [m.in_features if isinstance(m, nn.Linear) else m.in_channels for m in layers]
    for shape in [(n, *ones) for n in ([latent] if latent else widths) for ones in ((), (1, 1))]:
        with suppress(Exception):  # a user's code may raise anything; trying it shows which latents it takes
            network(torch.zeros(2, *shape))
            return shape
    raise ValueError(f"{WHERE}: expected latents (N, n) or (N, n, 1, 1) of {latent or 'a layer size'}: set latent = n")
