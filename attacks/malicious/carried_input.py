"""Networks that carry the input to the classifier, so that its weight gradient contains it (Geiping et al., 2020, appendix A).

Identity convolutions carry it by weights only; two architectures feed the image next to the features, or use reversible blocks.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.engine.computation import (
    ACTIVATIONS,
    InputLayer,
    LayerCall,
    activation_between,
    classifier,
    input_layers,
)
from fedgauge.attacks.exact.closed_form import ClosedForm, Reader
from fedgauge.attacks.malicious.decoding import ClassifierInputs, check_readable, on_grid, snap_to_grid
from fedgauge.attacks.malicious.server_attack import ServerAttack, with_zero_classifier
from fedgauge.client.components import Table
from fedgauge.client.models.vision import Shape, check_images
from fedgauge.client.update import Batch, Params, relative_error

PROVEN = 1e-4  # relative error of the images' update, below which they are the client's
BLOCKS, WIDTH = 3, 16  # of the reversible network, and channels between the convolutions of one
REACH = 2.0  # largest input of a sigmoid or tanh: beyond it, rounding of the output weighs more


class CarriedInputNetwork(nn.Module):
    """A network with a classifier that reads the features and then the image."""

    def __init__(self, features: nn.Module, width: int, pixels: int, classes: int) -> None:
        super().__init__()
        self.features = features
        self.classifier = nn.Linear(width + pixels, classes)
        self.pixels = pixels

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.cat([self.features(x), x.flatten(1)], 1))
        return logits

    def image(self, inputs: Tensor, params: Params) -> Tensor:
        """The network's input (n, pixels), from the classifier's inputs."""
        return inputs[:, -self.pixels :]


def carried(model: nn.Module, shape: Shape, classes: int) -> CarriedInputNetwork:
    """The model with a new classifier that reads the image next to the features, in place of the last fully connected layer."""
    check_images(shape)
    name, body = classifier(model, shape), copy.deepcopy(model).eval()
    layer = body.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    body.set_submodule(name, nn.Identity())
    with torch.no_grad():
        features = body(torch.zeros(2, *shape))
    if layer.out_features != classes or features.shape != (2, layer.in_features):
        raise ValueError(f"the last fully connected layer, {name!r}, is not the classifier of {classes} classes")
    return CarriedInputNetwork(body, layer.in_features, shape[0] * shape[1] * shape[2], classes)


class ReversibleNetwork(nn.Module):
    """Blocks of additive coupling on the phases of an image, then the classifier: the features hold the whole image."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        half = 2 * shape[0]
        self.small = 2 * half, shape[1] // 2, shape[2] // 2
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(half, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv2d(WIDTH, half, 3, padding=1))
            for _ in range(BLOCKS)
        )
        self.classifier = nn.Linear(4 * shape[0] * self.small[1] * self.small[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        still, moved = F.pixel_unshuffle(x, 2).chunk(2, 1)
        for block in self.blocks:
            still, moved = moved + block(still), still
        logits: Tensor = self.classifier(torch.cat([still, moved], 1).flatten(1))
        return logits

    def image(self, inputs: Tensor, params: Params) -> Tensor:
        """The network's input (n, pixels), from the classifier's inputs: each block's sum is undone."""
        still, moved = inputs.view(-1, *self.small).chunk(2, 1)
        for i in reversed(range(len(self.blocks))):
            prefix = f"blocks.{i}."
            own = {k.removeprefix(prefix): t.to(inputs) for k, t in params.items() if k.startswith(prefix)}
            still, moved = moved, still - functional_call(self.blocks[i], own, (moved,))
        return F.pixel_shuffle(torch.cat([still, moved], 1), 2).flatten(1)


def reversible(shape: Shape, classes: int) -> ReversibleNetwork:
    """A network of reversible blocks in place of the agreed one."""
    check_images(shape)
    return ReversibleNetwork(shape, classes)


@dataclass(frozen=True)
class _ByArchitecture(ServerAttack):
    zero: bool = False
    use: ClassVar[str]
    network: ClassVar[type[nn.Module]]

    @property
    def architecture(self) -> Table:
        return {"use": self.use}

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        if not isinstance(known.model, self.network):
            raise ValueError(f"the model needs the architecture {self.use}")
        return with_zero_classifier(dict(sent), known, self.zero)


@dataclass(frozen=True)
class carried_input(_ByArchitecture):
    """Feeds the classifier the image next to the features; zero: also send a zero classifier."""

    use = "carried"
    network = CarriedInputNetwork


@dataclass(frozen=True)
class reversible_blocks(_ByArchitecture):
    """Replaces the network by reversible blocks; zero: also send a zero classifier."""

    use = "reversible"
    network = ReversibleNetwork


@dataclass(frozen=True)
class identity_convolutions(ServerAttack):
    """Makes the first channels of every convolution pass the image on; the other channels stay.

    zero: send a classifier of zeros, which separates batches.
    """

    zero: bool = False

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        made, colours, path = dict(sent), known.shape[0], _Path.of(known)
        images = (known.normalise(torch.full(known.shape, v).double()) for v in (0.0, 1.0))
        low, high = (path.reads.read(image)[:, 0, 0] for image in images)
        for conv, activation in path.stages:
            start, end = (0.0, 1.0) if activation in ("relu", "identity") else (-REACH, REACH)
            gain = (end - start) / (high - low)
            weight, bias = made[conv.weight].clone(), made[conv.bias].clone()
            weight[:colours] = 0
            middle = weight.shape[2] // 2
            weight[range(colours), range(colours), middle, middle] = gain.to(weight)
            bias[:colours] = (start - gain * low).to(bias)
            made |= {conv.weight: weight, conv.bias: bias}
            low, high = (ACTIVATIONS[activation](torch.full((colours,), v).double()) for v in (start, end))
        return with_zero_classifier(made, known, self.zero)


@dataclass(frozen=True, eq=False)
class _Path:
    """The convolutions between image and classifier, each with the name of the activation behind it.

    Args:
        reads: the first of them, which reads the image.
        shape: of an image.
    """

    reads: InputLayer
    stages: tuple[tuple[LayerCall, str], ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, known: Knowledge) -> "_Path":
        """ValueError names what an image cannot pass."""
        layers = input_layers(known.model, known.shape)
        if not layers or layers[0].dense:
            raise ValueError("no convolution reads the image itself")
        calls = pairwise([layers[0], *layers[0].follows])
        stages = [(conv, activation_between(conv, above)) for conv, above in calls]
        for conv, _ in stages:
            rows, columns, *kernel = known.model.get_parameter(conv.weight).shape
            keeps = not conv.dense and kernel[0] % 2 and conv.output.shape[2:] == conv.input.shape[2:]
            if not (keeps and conv.bias and min(rows, columns) >= known.shape[0] and columns == conv.input.shape[1]):
                needs = f"keeps the image's size, with a bias and at least {known.shape[0]} channels, ungrouped"
                raise ValueError(f"layer {conv.name!r} is no convolution that {needs}")
        return cls(layers[0], tuple(stages), known.shape)

    def image(self, inputs: Tensor, params: Params) -> Tensor:
        """The network's input (n, pixels), from the classifier's inputs.

        Raises:
            ValueError: a convolution mixes colours.
        """
        colours, height, width = self.shape
        image = inputs.view(len(inputs), -1, height * width)[:, :colours]
        for conv, activation in reversed(self.stages):
            weight = params[conv.weight][:colours].double()
            middle = weight.shape[2] // 2
            gain = weight[range(colours), range(colours), middle, middle]
            if not bool(gain.all()) or int((weight != 0).sum()) != colours:
                raise ValueError(f"convolution {conv.name!r} does not pass the image on unchanged")
            bias = params[conv.bias][:colours].double()
            image = (_backward(activation, image) - bias[:, None]) / gain[:, None]
        return self.reads.example(image.view(-1, *self.shape)).flatten(1)


def _backward(activation: str, y: Tensor) -> Tensor:
    """The activation's input, from its output."""
    tiny = 1e-12
    if activation == "sigmoid":
        return y.clamp(tiny, 1 - tiny).logit()
    return y.clamp(tiny - 1, 1 - tiny).atanh() if activation == "tanh" else y


@dataclass(frozen=True)
class read_carried(ClosedForm):
    """Reads images off the classifier's inputs: one example, or a batch if the classifier is zero.

    For examples that share a label it reads the mean of their inputs, which is none of them even where it reproduces the update.
    Images with a unique label count as proven if they are on the 8-bit grid, or if all images together give the update.
    """

    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        check_readable(known, wave.params)
        if isinstance(known.model, CarriedInputNetwork | ReversibleNetwork):
            return partial(_carried, known.model)
        return partial(_carried, _Path.of(known))


def _carried(carrier: CarriedInputNetwork | ReversibleNetwork | _Path, alone: Wave, known: Knowledge) -> Reconstruction:
    update, params = alone.alone(0), alone.params
    decoded = ClassifierInputs.from_update(update, params, known)
    inputs, y = carrier.image(decoded.inputs, params).view(-1, *known.shape), decoded.y
    x = known.pixels(inputs)
    exact, off = on_grid(x), float("nan")
    x = torch.where(exact[:, None, None, None], snap_to_grid(x), x.float()).clamp(0, 1)
    if not bool(exact.all()):
        off = relative_error(known.forward(params, Batch(x, y), None), update)
    proven = int((decoded.single & (exact | (off < PROVEN))).sum())
    words = f"{proven} of {known.batch_size} images proven exact (on the 8-bit grid, or by reproducing the update)"
    return Reconstruction(x, y, 1 - proven / known.batch_size, 1, 0.0, "converged", words)
