"""The networks of the papers, as plain torch modules built from an input shape and a number of classes."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.client.components import Count
from fedgauge.client.files import reading

Shape = tuple[int, ...]  # (C, H, W)
Norm = Literal["batch", "group", "none"]
Activation = Literal["relu", "sigmoid", "tanh", "leaky_relu", "gelu", "silu"]

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "leaky_relu": partial(nn.LeakyReLU, 0.2),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


def check_images(shape: Shape) -> None:
    """ValueError for examples that are not images."""
    if len(shape) != 3:
        raise ValueError(f"expected images (C, H, W), and the examples here have shape {tuple(shape)}")


def mlp(
    shape: tuple[int, ...], classes: int, hidden: Sequence[Count] = (256,), activation: Activation = "relu"
) -> nn.Module:
    """Fully connected layers with biases, for images or rows of tables; hidden: their widths."""
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(fan_in, fan_out), _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def lenet(shape: Shape, classes: int, stride: Count = 2, activation: Activation = "sigmoid") -> nn.Module:
    """The LeNet of DLG (Zhu et al., 2019): sigmoids, all weights and biases uniform in (-0.5, 0.5).

    Args:
        stride: of the first two convolutions; 1: every pixel keeps its place.
        activation: with another than sigmoid weights are torch's own. The slope of leaky_relu is .2.
    """
    channels, height, width = shape
    flat = 12 * -(-height // stride**2) * -(-width // stride**2)
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 12, 5, stride=stride, padding=2),
            act1=_ACTIVATIONS[activation](),
            conv2=nn.Conv2d(12, 12, 5, stride=stride, padding=2),
            act2=_ACTIVATIONS[activation](),
            conv3=nn.Conv2d(12, 12, 5, padding=2),
            act3=_ACTIVATIONS[activation](),
            flatten=nn.Flatten(),
            linear=nn.Linear(flat, classes),
        )
    )
    if activation == "sigmoid":
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def convnet(shape: Shape, classes: int, width: Count = 64, norm: Norm = "batch") -> nn.Module:
    """The ConvNet of Inverting Gradients: eight 3x3 convolutions, two 3x3 max-pools, one linear layer."""
    channels, height, wide = shape
    _poolable(height, wide, 9)
    pooled = (height // 3 // 3) * (wide // 3 // 3)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    fan_in = channels
    for i, factor in enumerate((1, 2, 2, 4, 4, 4, 4, 4)):
        fan_out = factor * width
        layers[f"conv{i}"] = nn.Conv2d(fan_in, fan_out, 3, padding=1)
        layers[f"norm{i}"] = _norm(norm, fan_out)
        layers[f"act{i}"] = nn.ReLU()
        if i in (5, 7):
            layers[f"pool{i}"] = nn.MaxPool2d(3)
        fan_in = fan_out
    layers["flatten"] = nn.Flatten()
    layers["linear"] = nn.Linear(fan_in * pooled, classes)
    return nn.Sequential(layers)


def resnet20(shape: Shape, classes: int, width: Count = 1, norm: Norm = "batch") -> nn.Module:
    """ResNet-20 for small images (He et al., 2016), parameter-free shortcuts; width multiplies 16, 32, 64 channels."""
    return _ResNet(shape[0], classes, 16 * width, (3, 3, 3), partial(_ResNetBlock, norm=norm), norm)


def resnet(
    shape: Shape, classes: int, depth: Literal[18, 20, 32, 34, 50] = 18, width: Count = 64, norm: Norm = "batch"
) -> nn.Module:
    """The ResNets of Inverting Gradients for small images: no stride or pool before the stages, 1x1 shortcuts.

    Args:
        depth: 20 and 32 have three stages, the others four; 50 has bottlenecks.
        width: channels of the first stage; every further stage has twice as many. ResNet20-4 is depth 20, width 64,
            ResNet32-10 depth 32, width 160.
    """
    blocks = {18: (2, 2, 2, 2), 20: (3, 3, 3), 32: (5, 5, 5), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}[depth]
    kind = _ResNetBottleneck if depth == 50 else partial(_ResNetBlock, project=True)
    model = _ResNet(shape[0], classes, width, blocks, partial(kind, norm=norm), norm)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class _ResNetBlock(nn.Module):
    """Two 3x3 convolutions round a shortcut that subsamples and pads with zero channels (option A), or projects (B)."""

    expansion = 1

    def __init__(self, fan_in: int, width: int, stride: int, norm: Norm, project: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = _norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = _norm(norm, width)
        self.shortcut = _projection(fan_in, width, stride, norm) if project else _Pad((width - fan_in) // 2, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class _ResNetBottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions round a projecting shortcut; the last widens four times."""

    expansion = 4

    def __init__(self, fan_in: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        fan_out = width * self.expansion
        self.conv1 = nn.Conv2d(fan_in, width, 1, bias=False)
        self.bn1 = _norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = _norm(norm, width)
        self.conv3 = nn.Conv2d(width, fan_out, 1, bias=False)
        self.bn3 = _norm(norm, fan_out)
        self.shortcut = _projection(fan_in, fan_out, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


def _projection(fan_in: int, fan_out: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and fan_in == fan_out:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False), _norm(norm, fan_out))


class _Pad(nn.Module):
    """Every stride-th pixel, with zero channels on both sides: a shortcut without parameters."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.channels = channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.channels, self.channels)) if self.channels else x


class _ResNet(nn.Module):
    """Stages of blocks (fan_in, width, stride) of base, 2 base, 4 base ... channels, then the mean over pixels."""

    def __init__(
        self, channels: int, classes: int, base: int, blocks: Sequence[int], block: Callable[..., nn.Module], norm: Norm
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, base, 3, padding=1, bias=False)
        self.bn1 = _norm(norm, base)
        self.stages = [f"layer{i}" for i in range(1, len(blocks) + 1)]
        fan_in = base
        for i, (name, count) in enumerate(zip(self.stages, blocks, strict=True)):
            stage, width = nn.Sequential(), base * 2**i
            for j in range(count):
                stage.append(block(fan_in, width, 2 if i > 0 and j == 0 else 1))
                fan_in = width * int(stage[-1].expansion)  # type: ignore[arg-type]  # torch types every attribute alike
            self.add_module(name, stage)
        self.linear = nn.Linear(fan_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        for name in self.stages:
            out = self.get_submodule(name)(out)
        logits: Tensor = self.linear(out.mean((2, 3)))
        return logits


def convsmall(shape: Shape, classes: int) -> nn.Module:
    """The small convolutional net of Balunovic et al. (2022), with LeCun normal initialisation.

    The scale of the weights is part of their setting: noise of a fixed size hides smaller gradients better.
    """
    model = _two_convolutions(shape, 3, (100, classes))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.zeros_(parameter)
        else:  # Flax's default: a normal cut at two standard deviations, of variance 1 / fan_in after the cut
            std = 1 / math.sqrt(parameter[0].numel()) / 0.87962566103423978
            nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
    return model


def convbig(shape: Shape, classes: int) -> nn.Module:
    """The ConvBig of Balunovic et al. (2022): two convolutions, three fully connected layers."""
    return _two_convolutions(shape, 1, (2000, 1000, classes))


def _two_convolutions(shape: Shape, kernel: int, widths: Sequence[int]) -> nn.Module:
    """Convolutions of 3 x 3 and of this kernel, each with ReLU and mean pool, then linear layers of these widths."""
    channels, height, width = shape
    _poolable(height, width, 4)
    fan_in = 64 * ((height // 2 + 3 - kernel) // 2) * ((width // 2 + 3 - kernel) // 2)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 32, 3, padding=1),
        act1=nn.ReLU(),
        pool1=nn.AvgPool2d(2),
        conv2=nn.Conv2d(32, 64, kernel, padding=1),
        act2=nn.ReLU(),
        pool2=nn.AvgPool2d(2),
        flatten=nn.Flatten(),
    )
    for i, fan_out in enumerate(widths, 1):
        layers[f"linear{i}"] = nn.Linear(fan_in, fan_out)
        if i < len(widths):
            layers[f"act{i + 2}"] = nn.ReLU()
        fan_in = fan_out
    return nn.Sequential(layers)


def _poolable(height: int, width: int, least: int) -> None:
    if min(height, width) < least:
        raise ValueError(f"this network needs images of at least {least} x {least} pixels, got {height} x {width}")


def _norm(norm: Norm, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(8, channels), channels) if norm == "group" else nn.Identity()


def detached_params(model: nn.Module) -> dict[str, Tensor]:
    """The model's named parameters, detached copies: what a federation calls the global weights."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point buffers that travel (BatchNorm's running statistics), detached copies.

    Those outside the state_dict, such as an adapted network's frozen weights, are known on both sides.
    """
    own = model.state_dict().keys()
    found = {name: b for name, b in model.named_buffers() if name in own and torch.is_floating_point(b)}
    return {name: b.detach().clone() for name, b in found.items()}


def into_buffers(model: nn.Module, frozen: Set[int], persistent: bool) -> None:
    """Make the parameters of these ids buffers in every module that shares them; persistent: they are in the state_dict."""
    made: dict[int, Tensor] = {}
    for module in list(model.modules()):
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in frozen:
                delattr(module, leaf)
                module.register_buffer(leaf, made.setdefault(id(parameter), parameter.detach()), persistent)


def load_weights(model: nn.Module, path: Path) -> None:
    """Set a model's parameters and buffers to a safetensors file's; nothing is unpickled.

    The file must have every parameter and every floating-point buffer, of the same shape and dtype, and nothing else; of
    whole-number buffers (BatchNorm's counters, which its statistics in eval mode do not depend on) it may have any.

    Raises:
        ValueError: the file is not to be read, or its names, shapes, dtypes or values do not fit; the model is unchanged.
    """
    stored, own = read_weights(path), model.state_dict()
    needed = detached_params(model).keys() | floating_buffers(model).keys()  # tied ones under one name
    copy_weights(own, stored, needed, path)


def copy_weights(own: dict[str, Tensor], stored: dict[str, Tensor], needed: Iterable[str], path: Path) -> None:
    """Copy a file's tensors; ValueError, before any is copied, unless all needed ones are there, fit, and are finite."""
    for name in (*needed, *stored):
        expected, came = (f"{tuple(t[name].shape)} of {t[name].dtype}" if name in t else "none" for t in (own, stored))
        if expected != came or not torch.isfinite(stored[name]).all():
            raise ValueError(f"{path} does not fit the model: expected finite {name!r}, {expected}, got {came}")
    with torch.no_grad():
        for name, t in stored.items():
            own[name].copy_(t)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file.

    Raises:
        ValueError: it cannot be read.
    """
    from safetensors.torch import load_file

    with reading(path, f"a file of safetensors (from {Path.cwd()})"):
        stored: dict[str, Tensor] = load_file(path)
    return stored
