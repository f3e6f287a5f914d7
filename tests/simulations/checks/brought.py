"""Networks and defenses as somebody might bring them: each is wrong in one way."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedgauge.client.transforms import UpdateTransform
from fedgauge.client.update import Update, norm


class Good(nn.Module):
    """A network that has nothing wrong."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, stride=4), nn.Linear(4 * 49, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.sigmoid(self.conv(x)).flatten(1))
        return logits


class Fewer(Good):
    """Returns another shape."""

    def __init__(self) -> None:
        super().__init__(7)


class Masked(Good):
    """Needs a second argument."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]  # as somebody brings it
        return super().forward(x * mask)


class Lazy(nn.Sequential):
    """Has no weights before its first pass."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.LazyLinear(classes))


class Softmax(Good):
    """Ends in a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class LogSoftmax(Good):
    """Ends in a logarithmic softmax, which changes nothing for the cross-entropy."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(1)


class NotANumber(Good):
    """Is not finite at the start."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        nn.init.constant_(self.head.weight, float("nan"))


class Overflowing(Good):
    """Gives numbers that are not finite, though its weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1e30 * 1e30)


class Colour(nn.Module):
    """Was written for colour images of 32 x 32 pixels."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.Sigmoid())
        self.head = nn.Linear(4 * 64, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).flatten(1))
        return logits


class Listed(Good):
    """Keeps its parameters in a list."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.kept = [self.head.weight, self.head.bias]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.sigmoid(self.conv(x)).flatten(1), *self.kept)


class Checkpointed(Good):
    """Computes a layer again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.sigmoid(checkpoint(self.conv, x, use_reentrant=False)).flatten(1))
        return logits


# ------------------------------------------------------------------------------------------------------------- defenses


@dataclass(frozen=True)
class Each(UpdateTransform):
    """Changes each tensor of an update, given the whole update and the generator."""

    change: Callable[[Tensor, Update, Generator | None], Tensor]

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {name: self.change(t, update, rng) for name, t in update.items()}


def scaled_by_a_float() -> UpdateTransform:
    """Clips by a Python number."""
    return Each(lambda t, update, _: t * min(1.0, 1.0 / float(norm(update))))


def drawing_by_itself() -> UpdateTransform:
    """Draws noise from nowhere."""
    return Each(lambda t, *_: t + 0.1 * torch.randn_like(t))


def undeclared_noise() -> UpdateTransform:
    """Draws noise with the generator, and does not say what is left without it."""
    return Each(lambda t, _, rng: t + 0.1 * torch.randn(t.shape, generator=rng))


def undeclared_if_given() -> UpdateTransform:
    """Noise from the generator only where there is one."""
    return Each(lambda t, _, rng: t + (0.0 if rng is None else 0.01 * torch.randn(t.shape, generator=rng)))


def detached() -> UpdateTransform:
    """Has values, but no derivative."""
    return Each(lambda t, *_: t.detach() * 0.5)


def overwriting() -> UpdateTransform:
    """Changes the update that it is given."""
    return Each(lambda t, *_: t.mul_(0.5))


@dataclass(frozen=True)
class dropping(UpdateTransform):
    """Leaves a parameter out."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return dict(list(update.items())[1:])


def doubled() -> UpdateTransform:
    """Changes the number type."""
    return Each(lambda t, *_: t.double())


def dividing() -> UpdateTransform:
    """Divides by zero."""
    return Each(lambda t, *_: t / (t - t))


@dataclass(frozen=True)
class failing(UpdateTransform):
    """Fails."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        raise KeyError("momentum")


def halving() -> UpdateTransform:
    """Has nothing wrong."""
    return Each(lambda t, *_: torch.where(t.abs() > t.abs().mean(), t, 0.5 * t))
