"""Networks that gradient matching cannot attack, or that are used in a strange way: each with words of its sentence."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.layers import CLASSES, PIXELS, Lambda, Recurrent, flat, image, sequence


class Uncopyable(nn.Module):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.net = threading.Lock(), flat(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.net(x)


class ChangesItsInput(nn.Module):
    """Normalises its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = flat(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.net(x)


class NeedsMore(nn.Module):
    """Needs a second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.net = flat()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.net(x) * lengths


class Words(nn.Module):
    """Takes the numbers of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.EmbeddingBag(10, 6), nn.Linear(6, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.words(ids))


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


class Listed(nn.Module):
    """Keeps its parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(PIXELS, CLASSES)
        self.kept = [self.last.weight, self.last.bias]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(1), *self.kept)


class Remembering(nn.Module):
    """Makes a bias of its parameters in the first pass and keeps it, as LeViT's attention does in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.biases, self.net = nn.Parameter(torch.linspace(-1, 1, 3)), flat()
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "bias" not in self.kept:
            self.kept["bias"] = self.biases[torch.arange(CLASSES) % 3]
        return self.net(x) + self.kept["bias"]


class Holding(nn.Module):
    """Has a parameter of its own before those of a network, and does not use it."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.own, self.net = nn.Parameter(parameter, requires_grad=False), flat()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def not_finite() -> nn.Module:
    """Divides by zero."""
    return flat(Lambda(lambda x: x / 0.0))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], bool, str]] = {
    "cannot be copied": (Uncopyable, False, ""),
    "changes its input": (ChangesItsInput, False, ""),
    "ends in softmax": (lambda: nn.Sequential(flat(), nn.Softmax(1)), False, ""),
    "needs a second argument": (NeedsMore, False, "missing 1 required positional argument: 'lengths'"),
    "takes words": (Words, False, "the model fails on a batch of shape"),
    "returns a tuple": (lambda: nn.Sequential(flat(), Lambda(lambda x: (x, x))), False, "a tuple of 2"),
    "returns a dict": (lambda: nn.Sequential(flat(), Lambda(lambda x: {"logits": x})), False, "a dict with logits"),
    "returns one number": (lambda: nn.Sequential(flat(), Lambda(lambda x: x.mean())), False, "returns shape ()"),
    "other input size": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(100, CLASSES)), False, "the model fails on"),
    "not finite": (not_finite, False, "not finite"),
    "lazy": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES)), False, "no weights before its first batch"),
    "parameters in a list": (Listed, False, "takes parameter 'last.weight' from a list"),
    "keeps a bias": (Remembering, False, "layer '' (Remembering) keeps what it made of its parameters"),
    "whole numbers first": (lambda: Holding(torch.ones(3, dtype=torch.int64)), False, "parameter 'own' holds whole numbers"),
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
        lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.5), True, "lacks its draws",
    ),
    "randomised leaky relu": (lambda: image(nn.RReLU()), True, "lacks its draws"),
    "first derivative only": (lambda: flat(Lambda(Blend.apply)), False, ""),
    "no second derivative": (lambda: flat(Lambda(Unfinished.apply)), False, "layer '2' (Lambda) cannot be differentiated twice"),
}  # fmt: skip
