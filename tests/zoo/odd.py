"""Networks that gradient matching cannot attack, or that are used in a strange way: each with words of its sentence."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.layers import CLASSES, PIXELS, Lambda, Net, flat, image, recurrent, sequence


class Blend(torch.autograd.Function):
    """A function whose author gave a first derivative only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return ctx.saved_tensors[0].cos() * g


class Unfinished(torch.autograd.Function):
    """A function that refuses a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Refusing.apply(g * ctx.saved_tensors[0].cos())


class Refusing(torch.autograd.Function):
    """The identity without a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise NotImplementedError("no derivative of this")


class NeedsMore(nn.Sequential):
    """Needs a second argument."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * lengths


def uncopyable() -> nn.Module:
    """Holds what cannot be copied."""
    net = flat(nn.Tanh())
    net.lock = threading.Lock()  # type: ignore[assignment]
    return net


def listed() -> nn.Module:
    """Keeps its parameters in a list."""
    net = Net(lambda m, x: F.linear(x.flatten(1), *m.kept), last=(last := nn.Linear(PIXELS, CLASSES)))
    net.kept = [last.weight, last.bias]  # type: ignore[assignment]
    return net


def remembering() -> nn.Module:
    """Makes a bias of its parameters in the first pass and keeps it, as LeViT's attention does in eval mode."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if "bias" not in m.kept:
            m.kept["bias"] = m.biases[torch.arange(CLASSES) % 3]
        return m.net(x) + m.kept["bias"]

    net = Net(forward, biases=nn.Parameter(torch.linspace(-1, 1, 3)), net=flat())
    net.kept = {}  # type: ignore[assignment]
    return net


def holding_numbers() -> nn.Module:
    """Has whole numbers as a parameter before those of a network, and does not use it."""
    numbers = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    return Net(lambda m, x: m.net(x), own=numbers, net=flat())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], bool, str]] = {
    "cannot be copied": (uncopyable, False, ""),
    "changes its input": (lambda: Net(lambda m, x: m.net(x.sub_(0.5)), net=flat(nn.Tanh())), False, ""),
    "ends in softmax": (lambda: nn.Sequential(flat(), nn.Softmax(1)), False, ""),
    "needs a second argument": (lambda: NeedsMore(flat()), False, "takes several inputs"),
    "takes words": (
        lambda: nn.Sequential(nn.EmbeddingBag(10, 6), nn.Linear(6, CLASSES)), False, "cannot take a batch of",
    ),
    "returns a tuple": (lambda: nn.Sequential(flat(), Lambda(lambda x: (x, x))), False, "a tuple, expected"),
    "returns a dict": (lambda: nn.Sequential(flat(), Lambda(lambda x: {"logits": x})), False, "a dict with logits"),
    "returns one number": (lambda: nn.Sequential(flat(), Lambda(lambda x: x.mean())), False, "of shape ()"),
    "other input size": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(100, CLASSES)), False, "cannot take a batch of"),
    "not finite": (lambda: flat(Lambda(lambda x: x / 0.0)), False, "not finite"),
    "lazy": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES)), False, "no weights before its first batch"),
    "parameters in a list": (listed, False, "parameter 'last.weight' is read from a list"),
    "keeps a bias": (remembering, False, "the model itself caches values computed from its parameters"),
    "whole numbers first": (holding_numbers, False, "parameter 'own' holds whole numbers"),
    "no parameters": (lambda: Lambda(lambda x: x.flatten(1)[:, :CLASSES]), False, "no parameters"),
    "TorchScript": (
        lambda: nn.Sequential(nn.Flatten(), torch.jit.script(nn.Linear(PIXELS, CLASSES))), False, "is TorchScript",
    ),
    "dropout": (lambda: flat(nn.Dropout(0.5)), True, "lacks its draws"),
    "dropout in a function": (lambda: flat(Lambda(lambda x: F.dropout(x, 0.5))), True, "lacks its draws"),
    "dropout in attention": (
        lambda: sequence(nn.TransformerEncoderLayer(24, 2, 16, 0.1, batch_first=True)), True, "lacks its draws",
    ),
    "dropout between recurrent layers": (
        lambda: recurrent(nn.LSTM, num_layers=2, dropout=0.5), True, "lacks its draws",
    ),
    "randomised leaky relu": (lambda: image(nn.RReLU()), True, "lacks its draws"),
    "first derivative only": (lambda: flat(Lambda(Blend.apply)), False, ""),
    "no second derivative": (lambda: flat(Lambda(Unfinished.apply)), False, "the model cannot be differentiated twice"),
}  # fmt: skip
