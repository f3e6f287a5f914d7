"""Networks and defenses as somebody might bring them: each is wrong in one way."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor, nn

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


class Locked(Good):
    """Cannot be copied."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.lock = threading.Lock()


class Kept(Good):
    """Cannot be copied: it keeps a tensor with a graph."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.doubled = self.head.weight * 2


class Fewer(Good):
    """Returns another shape."""

    def __init__(self) -> None:
        super().__init__(7)


class Overwriting(Good):
    """Changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return super().forward(x)


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


class Larger(Good):
    """Was written for larger images: the last layer does not fit."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.head = nn.Linear(4 * 64, classes)


# ------------------------------------------------------------------------------------------------------------- defenses


@dataclass(frozen=True)
class scaled_by_a_float(UpdateTransform):
    """Clips by a Python number."""

    max_norm: float = 1.0

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return _each(update, lambda t: t * min(1.0, self.max_norm / float(norm(update))))


@dataclass(frozen=True)
class branching(UpdateTransform):
    """Decides by a value."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return update if norm(update) < 1e-3 else _each(update, lambda t: t / norm(update))


@dataclass(frozen=True)
class by_numpy(UpdateTransform):
    """Computes outside torch."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return _each(update, lambda t: torch.from_numpy(np.tanh(t.detach().numpy())))


@dataclass(frozen=True)
class drawing_by_itself(UpdateTransform):
    """Draws noise from nowhere."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return _each(update, lambda t: t + 0.1 * torch.randn_like(t))


@dataclass(frozen=True)
class undeclared_noise(UpdateTransform):
    """Draws noise with the generator, and does not say what is left without it."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return _each(update, lambda t: t + 0.1 * torch.randn(t.shape, generator=rng))


@dataclass(frozen=True)
class detached(UpdateTransform):
    """Has values, but no derivative."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return _each(update, lambda t: t.detach() * 0.5)


@dataclass(frozen=True)
class half_detached(UpdateTransform):
    """Has another derivative than that of its values."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return _each(update, lambda t: t + t.detach())


@dataclass(frozen=True)
class overwriting(UpdateTransform):
    """Changes the update that it is given."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return _each(update, lambda t: t.mul_(0.5))


@dataclass(frozen=True)
class dropping(UpdateTransform):
    """Leaves a parameter out."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return dict(list(update.items())[1:])


@dataclass(frozen=True)
class doubled(UpdateTransform):
    """Changes the number type."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return _each(update, Tensor.double)


@dataclass(frozen=True)
class dividing(UpdateTransform):
    """Divides by zero."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return _each(update, lambda t: t / (t - t))


@dataclass(frozen=True)
class failing(UpdateTransform):
    """Fails."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        raise KeyError("momentum")


@dataclass(frozen=True)
class halving(UpdateTransform):
    """Has nothing wrong."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return _each(update, lambda t: torch.where(t.abs() > t.abs().mean(), t, 0.5 * t))


def _each(update: Update, change: Callable[[Tensor], Tensor]) -> Update:
    return {name: change(t) for name, t in update.items()}


@dataclass(frozen=True)
class undeclared_if_given(UpdateTransform):
    """Noise from the generator only where there is one."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        if rng is None:
            return {k: t.clone() for k, t in update.items()}
        return {k: t + 0.01 * torch.randn(t.shape, generator=rng) for k, t in update.items()}


@dataclass(frozen=True)
class seeded_by_itself(UpdateTransform):
    """Noise from a generator of its own, always the same."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        own = Generator().manual_seed(0)
        return {k: t + 0.01 * torch.randn(t.shape, generator=own) for k, t in update.items()}


_calls = [0]


@dataclass(frozen=True)
class counting(UpdateTransform):
    """Grows with the number of calls."""

    def apply(self, update: Update, rng: Generator | None) -> Update:
        _calls[0] += 1
        return {k: t * (1 + _calls[0] // 50) for k, t in update.items()}


class Listed(Good):
    """Keeps its parameters in a list."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.kept = [self.head.weight, self.head.bias]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.sigmoid(self.conv(x)).flatten(1), *self.kept)
