"""Networks that carry the input to the classifier, whose weight gradient then holds it (Geiping et al., 2020, appendix A).

decoding.py reads it, for one example and for several. There are three ways to carry it: identity convolutions (weights only),
and two architectures, the image beside the features and reversible blocks.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.malicious.decoding import (
    ClassifierInputs,
    ClosedForm,
    Reader,
    check_readable,
    on_grid,
    snap_to_grid,
)
from fedgauge.attacks.malicious.server_attack import ServerAttack, with_zero_classifier
from fedgauge.client.components import Table, check_at_least
from fedgauge.client.models.vision import Shape, last_linear
from fedgauge.client.update import Batch, Params, relative_error

PROVEN = 1e-4  # relative error of the images' update, below which they are the client's
REACH = 2.0  # largest input of a sigmoid or tanh: beyond it, rounding of the output weighs more


# ------------------------------------------------------------------------------------------------------- architectures


class CarriedInputNetwork(nn.Module):
    """A network whose classifier reads the image behind the features."""

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
    """The model with a new classifier that reads the image beside the features, in place of the last fully connected layer."""
    check_images(shape)
    name, body = last_linear(model), copy.deepcopy(model).eval()
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

    def __init__(self, shape: Shape, classes: int, blocks: int, width: int) -> None:
        super().__init__()
        half = 2 * shape[0]
        self.small = 2 * half, shape[1] // 2, shape[2] // 2
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(half, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, half, 3, padding=1))
            for _ in range(blocks)
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


def reversible(shape: Shape, classes: int, blocks: int = 3, width: int = 16) -> ReversibleNetwork:
    """A network of reversible blocks in place of the agreed one; each of the blocks has two 3x3 convolutions with width between."""
    check_images(shape)
    if shape[1] % 2 or shape[2] % 2:
        raise ValueError(f"reversible blocks take images of even height and width, got {shape[1]} x {shape[2]}")
    return ReversibleNetwork(shape, classes, blocks, width)


def check_images(shape: Shape) -> None:
    """ValueError for examples that are not images."""
    if len(shape) != 3:
        raise ValueError(f"expected images (C, H, W), and the examples here have shape {tuple(shape)}")


# ------------------------------------------------------------------------------------------------------- server attacks


@dataclass(frozen=True)
class carried_input(ServerAttack):
    """Feeds the classifier the image beside the features; zero: send a classifier of zeros, which separates batches."""

    zero: bool = False

    @property
    def architecture(self) -> Table:
        return {"use": "carried"}

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        return _as_agreed(CarriedInputNetwork, "carried", sent, known, self.zero)


@dataclass(frozen=True)
class reversible_blocks(ServerAttack):
    """Replaces the network by reversible blocks.

    Args:
        blocks, width: as of `reversible`.
        zero: send a classifier of zeros, which separates batches.
    """

    blocks: int = 3
    width: int = 16
    zero: bool = False

    def __post_init__(self) -> None:
        check_at_least(self, 1, "blocks", "width")

    @property
    def architecture(self) -> Table:
        return {"use": "reversible", "blocks": self.blocks, "width": self.width}

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        return _as_agreed(ReversibleNetwork, "reversible", sent, known, self.zero)


def _as_agreed(kind: type[nn.Module], architecture: str, sent: Params, known: Knowledge, zero: bool) -> Params:
    if not isinstance(known.model, kind):
        raise ValueError(f"the model needs the architecture {architecture}")
    return with_zero_classifier(dict(sent), known, zero)


@dataclass(frozen=True)
class identity_convolutions(ServerAttack):
    """Makes the first channels of every convolution pass the image on; the other channels stay.

    zero: send a classifier of zeros, which separates batches.
    """

    zero: bool = False

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        made, colours = dict(sent), known.shape[0]
        low, high = (known.normalise(torch.full(known.shape, v).double())[:, 0, 0] for v in (0.0, 1.0))
        for name, conv, activation in _stages(known.model, colours):
            start, end = (0.0, 1.0) if isinstance(activation, nn.ReLU | nn.Identity) else (-REACH, REACH)
            gain = (end - start) / (high - low)
            made |= _identity(name, conv, sent, gain, start - gain * low)
            low, high = (activation(torch.full((colours,), v).double()) for v in (start, end))
        return with_zero_classifier(made, known, self.zero)


def _identity(name: str, conv: nn.Conv2d, sent: Params, gain: Tensor, bias: Tensor) -> Params:
    weight, offset = sent[f"{name}.weight"].clone(), sent[f"{name}.bias"].clone()
    colours, middle = len(gain), conv.kernel_size[0] // 2
    weight[:colours] = 0
    weight[range(colours), range(colours), middle, middle] = gain.to(weight)
    offset[:colours] = bias.to(offset)
    return {f"{name}.weight": weight, f"{name}.bias": offset}


def _stages(model: nn.Module, colours: int) -> Iterator[tuple[str, nn.Conv2d, nn.Module]]:
    """The convolutions between image and classifier, each with the layer behind it; ValueError names an obstacle."""
    leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
    *body, (last, classifier) = leaves
    if not isinstance(model, nn.Sequential) or not isinstance(classifier, nn.Linear):
        raise ValueError("the network is not a plain sequence of convolutions and a classifier")
    body = [(name, m) for name, m in body if not isinstance(m, nn.Flatten | nn.Identity)]
    count = 0
    for i, (name, module) in enumerate(body):
        if isinstance(module, nn.Conv2d):
            _check_conv(name, module, colours)
            follows = body[i + 1][1] if i + 1 < len(body) else nn.Identity()
            yield name, module, nn.Identity() if isinstance(follows, nn.Conv2d) else follows
            count += 1
        elif not (isinstance(module, nn.Sigmoid | nn.Tanh | nn.ReLU) and i and isinstance(body[i - 1][1], nn.Conv2d)):
            raise ValueError(f"layer {name!r} ({type(module).__name__}) carries no image")
    if not count:
        raise ValueError(f"no convolution stands before the classifier {last!r}")


def _check_conv(name: str, conv: nn.Conv2d, colours: int) -> None:
    kernel, plain = conv.kernel_size[0], conv.groups == 1 and conv.dilation == conv.stride == (1, 1)
    if not plain or kernel % 2 == 0 or conv.kernel_size != (kernel, kernel) or conv.padding != (kernel // 2,) * 2:
        raise ValueError(f"convolution {name!r} does not keep the image's size, or has a stride, groups or dilation")
    if conv.bias is None or min(conv.in_channels, conv.out_channels) < colours:
        raise ValueError(f"convolution {name!r} needs a bias and at least {colours} channels")


def _backward(activation: nn.Module, y: Tensor) -> Tensor:
    """The activation's input, from its output."""
    tiny = 1e-12
    if isinstance(activation, nn.Sigmoid):
        return y.clamp(tiny, 1 - tiny).logit()
    return y.clamp(tiny - 1, 1 - tiny).atanh() if isinstance(activation, nn.Tanh) else y


# ------------------------------------------------------------------------------------------------------------- decoder


@dataclass(frozen=True)
class read_carried(ClosedForm):
    """Reads images off the classifier's inputs: one example, or a batch where the classifier was sent as zeros.

    For examples that share a label it reads the mean of their inputs, which is none of them even where it reproduces the update.
    Images whose label is unique count as proven if they are on the 8-bit grid, or if all images together give the update.
    """

    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        _check(known, wave.params)
        return partial(_carried, known)


def _check(known: Knowledge, params: Params) -> None:
    """ValueError where nothing was carried, or where a batch cannot be separated."""
    if not isinstance(known.model, CarriedInputNetwork | ReversibleNetwork):
        for name, conv, _ in _stages(known.model, known.shape[0]):
            _taps(name, conv, params, known.shape[0])
    check_readable(known, params)


def _taps(name: str, conv: nn.Conv2d, params: Params, colours: int) -> tuple[Tensor, Tensor]:
    """Gain and bias (C,) with which a convolution passes colours on; ValueError where it mixes them."""
    weight, middle = params[f"{name}.weight"][:colours].double(), conv.kernel_size[0] // 2
    gain = weight[range(colours), range(colours), middle, middle]
    if not bool(gain.all()) or int((weight != 0).sum()) != colours:
        raise ValueError(f"convolution {name!r} does not pass the image on unchanged")
    return gain, params[f"{name}.bias"][:colours].double()


def _carried(known: Knowledge, alone: Wave) -> Reconstruction:
    update, params = alone.alone(0), alone.params
    decoded = ClassifierInputs.from_update(update, params, known)
    inputs, y = _image(decoded.inputs, params, known).view(-1, *known.shape), decoded.y
    if not bool(torch.isfinite(inputs).all()):
        raise ValueError("the classifier's inputs hold no finite image")
    x = known.pixels(inputs)
    exact, off = on_grid(x), float("nan")
    x = torch.where(exact[:, None, None, None], snap_to_grid(x), x.float()).clamp(0, 1)
    if not bool(exact.all()):
        off = relative_error(known.forward(params, Batch(x, y), None), update)
    proven = int((decoded.single & (exact | (off < PROVEN))).sum())
    words = f"{proven} of {known.batch_size} images proven exact (on the 8-bit grid, or by reproducing the update)"
    return Reconstruction(x, y, 1 - proven / known.batch_size, 1, 0.0, "converged", words)


def _image(inputs: Tensor, params: Params, known: Knowledge) -> Tensor:
    """The network's input, from the classifier's inputs."""
    if isinstance(known.model, CarriedInputNetwork | ReversibleNetwork):
        return known.model.image(inputs, params)
    colours, height, width = known.shape
    image = inputs.view(len(inputs), -1, height * width)[:, :colours]
    for name, conv, activation in reversed(list(_stages(known.model, colours))):
        gain, bias = _taps(name, conv, params, colours)
        image = (_backward(activation, image) - bias[:, None]) / gain[:, None]
    return image
