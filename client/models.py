"""The networks of the papers, as plain torch modules built from an input shape and a number of classes."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[int, int, int]
Norm = Literal["batch", "group", "none"]
Activation = Literal["relu", "sigmoid", "tanh"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


def mlp(shape: Shape, classes: int, hidden: Sequence[int] = (256,), activation: Activation = "relu") -> nn.Module:
    """Fully connected layers with biases; hidden: their widths."""
    if any(width < 1 for width in hidden):
        raise ValueError(f"hidden widths must be at least 1, got {list(hidden)}")
    widths = [shape[0] * shape[1] * shape[2], *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(fan_in, fan_out), _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def lenet(shape: Shape, classes: int) -> nn.Module:
    """The LeNet of DLG (Zhu et al., 2019): sigmoids, strides, all weights and biases uniform in (-0.5, 0.5)."""
    channels, height, width = shape
    flat = 12 * -(-height // 4) * -(-width // 4)
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 12, 5, stride=2, padding=2),
            act1=nn.Sigmoid(),
            conv2=nn.Conv2d(12, 12, 5, stride=2, padding=2),
            act2=nn.Sigmoid(),
            conv3=nn.Conv2d(12, 12, 5, padding=2),
            act3=nn.Sigmoid(),
            flatten=nn.Flatten(),
            linear=nn.Linear(flat, classes),
        )
    )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def convnet(shape: Shape, classes: int, width: int = 64, norm: Norm = "batch") -> nn.Module:
    """The ConvNet of Inverting Gradients: eight 3x3 convolutions, two 3x3 max-pools, one linear layer."""
    _at_least_one("width", width)
    channels, height, wide = shape
    pooled = (height // 3 // 3) * (wide // 3 // 3)
    if pooled == 0:
        raise ValueError(f"convnet needs images of at least 9 x 9 pixels, got {height} x {wide}")
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


def resnet20(shape: Shape, classes: int, width: int = 1, norm: Norm = "batch") -> nn.Module:
    """ResNet-20 for small images (He et al., 2016), parameter-free shortcuts; width multiplies 16, 32, 64 channels."""
    _at_least_one("width", width)
    return _ResNet(shape[0], classes, width, norm)


class _Block(nn.Module):
    """Two 3x3 convolutions round a shortcut that subsamples and pads with zero channels (option A)."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = _norm(norm, fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.bn2 = _norm(norm, fan_out)
        self.stride = stride
        self.padding = (fan_out - fan_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.padding:
            x = F.pad(x, (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(out + x)


class _ResNet(nn.Module):
    def __init__(self, channels: int, classes: int, width: int, norm: Norm) -> None:
        super().__init__()
        base = 16 * width
        self.conv1 = nn.Conv2d(channels, base, 3, padding=1, bias=False)
        self.bn1 = _norm(norm, base)
        self.layer1 = self._stage(base, base, 1, norm)
        self.layer2 = self._stage(base, 2 * base, 2, norm)
        self.layer3 = self._stage(2 * base, 4 * base, 2, norm)
        self.linear = nn.Linear(4 * base, classes)

    @staticmethod
    def _stage(fan_in: int, fan_out: int, stride: int, norm: Norm) -> nn.Module:
        rest = [_Block(fan_out, fan_out, 1, norm) for _ in range(2)]
        return nn.Sequential(_Block(fan_in, fan_out, stride, norm), *rest)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        logits: Tensor = self.linear(out.mean((2, 3)))
        return logits


def _norm(norm: Norm, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(8, channels), channels) if norm == "group" else nn.Identity()


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def last_linear(model: nn.Module) -> str:
    """The name of the classifier: the last nn.Linear of the model; ValueError when there is none."""
    names: list[str] = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise ValueError("the model has no fully connected layer, which label restoration reads")
    return names[-1]


def detached_params(model: nn.Module) -> dict[str, Tensor]:
    """The model's named parameters, detached copies: what a federation calls the global weights."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The model's floating-point buffers (BatchNorm's running statistics), detached copies."""
    return {name: b.detach().clone() for name, b in model.named_buffers() if torch.is_floating_point(b)}
