"""Losses: what clients minimise, the mean over a batch of a function of logits and labels.

Attacks were built on the cross-entropy: where one reads more than the engine's matching does (labels off p - y), another
loss is refused there in words.
"""

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.client.components import ComponentKind, SpecError, Table, call, check_arguments, own_line, resolve
from fedgauge.client.rng import generator
from fedgauge.client.update import Loss

PROBES = 6  # examples on which a loss is tried
TOKENS = 3  # of each, where a loss is of tokens
IGNORED = -100  # the label of a token that nothing is learnt from
SAME = 1e-4  # relative difference up to which two values of a loss are one


class Criterion(ABC):
    """A loss that a scenario can name: a frozen dataclass with its arguments as fields.

    Attributes:
        tokens: whether it takes every token's logits (B, L, classes) and labels (B, L), which are -100 where none counts.
    """

    tokens: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean, a scalar, over logits (B, classes) and labels y: (B,) int64, or (B, classes) probabilities."""


@dataclass(frozen=True)
class cross_entropy(Criterion):
    """-sum over classes of y log softmax(logits), averaged over examples.

    Args:
        label_smoothing: the part of the labels that is spread evenly over the classes, in [0, 1].
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be in [0, 1], got {self.label_smoothing}")

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class mean_squared_error(Criterion):
    """(logits - y)^2 with y one-hot, averaged over classes and examples."""

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        # one_hot does not work under vmap, and mse_loss has no forward derivative of its gradient
        classes = torch.arange(logits.shape[-1], device=logits.device)
        target = y if y.is_floating_point() else (y.unsqueeze(-1) == classes).to(logits.dtype)
        return (logits - target).square().mean()


@dataclass(frozen=True)
class next_token(Criterion):
    """-log softmax of each next word, averaged over a sentence's predicted words, then over sentences.

    The labels are the sentences themselves, -100 on padding; position t of the logits is compared with label t + 1.
    """

    tokens: ClassVar[bool] = True

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        log, y = logits[:, :-1].log_softmax(-1), y[:, 1:]
        if y.is_floating_point():  # probabilities (B, L, classes), all zero on padding
            nll, seen = -(y * log).sum(-1), y.sum(-1)
        else:
            seen = (y != IGNORED).to(log.dtype)
            nll = -log.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1) * seen
        return (nll.sum(1) / seen.sum(1).clamp(min=1)).mean()


def per_example_accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """The part of each example (B,) that the largest logit predicts correctly: its label, or its words."""
    if y.dim() == 1:
        return (logits.argmax(1) == y).double()
    guess, y = logits[:, :-1].argmax(-1), y[:, 1:]
    return (guess == y).double().sum(1) / (y != IGNORED).sum(1).clamp(min=1)


LOSS = ComponentKind("a loss", ("fedgauge.losses",), Criterion, annotated=False, outside=(Criterion, nn.Module, Tensor))
CROSS_ENTROPY: Table = {"use": "cross_entropy"}


def build_loss(table: Table, where: str, classes: int) -> Loss:
    """The loss that a table names, tested on random logits; for the plain cross-entropy, torch's own function.

    A user's loss is a function (logits, labels, ...) with further arguments from the table, or a class with instances that take
    logits and labels.

    Raises:
        SpecError: it does not exist, has another signature, or returns no finite, differentiable scalar.
    """
    target = resolve(table, where, LOSS)
    arguments = {k: v for k, v in table.items() if k != "use"}
    if inspect.isclass(target):
        loss: Loss = call(target, check_arguments(target, arguments, where), where)
    else:
        both = list(inspect.signature(target).parameters)[:2]
        settings = check_arguments(target, arguments, where, dict.fromkeys(both))
        further = {k: v for k, v in settings.items() if k not in both}
        loss = partial(target, **further) if further else target
    if loss == cross_entropy():
        return F.cross_entropy  # same bits as the default, and attacks recognise it by identity
    logits, y = _probe(loss, classes)
    try:
        with torch.enable_grad():  # the caller may have turned gradients off
            value = loss(logits.requires_grad_(), y)
            if value.dim() or not value.isfinite() or not value.requires_grad:
                raise ValueError(f"it returned {value}")
    except Exception as error:  # a user's function may raise anything
        first = (str(error).splitlines() or [""])[0]
        raise SpecError(
            f"{where}: {table['use']!r} must take logits (B, classes) of any sign and labels (B,) of int64, and return their "
            f"finite, differentiable mean: {type(error).__name__}: {first}{own_line(error)}"
            f"{_takes_instead(loss, logits.detach(), y)}"
        ) from error
    return loss


def is_cross_entropy(loss: Loss) -> bool:
    """Check for plain cross-entropy: its derivative by the logits is softmax - one-hot."""
    return loss is F.cross_entropy


def is_mean(loss: Loss, classes: int) -> bool:
    """Check that the loss of a batch is the mean of its examples' separate losses."""
    if is_cross_entropy(loss):
        return True
    logits, y = _probe(loss, classes)
    try:
        alone = torch.stack([loss(logits[i : i + 1], y[i : i + 1]) for i in range(PROBES)]).mean()
    except Exception:  # a user's function may refuse a batch of one
        return False
    return _same(loss(logits, y), alone)


def takes_probabilities(loss: Loss, classes: int) -> bool:
    """Check that labels may be probabilities (B, classes), with integer labels as one-hot vectors."""
    if is_cross_entropy(loss):
        return True
    logits, y = _probe(loss, classes)
    try:
        soft = loss(logits, F.one_hot(y, classes).to(logits))
    except Exception:  # a user's function may raise anything for such labels
        return False
    return soft.dim() == 0 and _same(loss(logits, y), soft)


def logit_gradient(loss: Loss, logits: Tensor, y: Tensor) -> Tensor:
    """The derivative of each example's loss by its logits, (B, classes)."""
    at = logits.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(loss(at, y) * len(at), at)
    return found


def predicts_tokens(loss: Loss) -> bool:
    """Check that it takes the logits of every token, not those of a class."""
    return bool(getattr(loss, "tokens", False))


def _probe(loss: Loss, classes: int) -> tuple[Tensor, Tensor]:
    tokens = (TOKENS,) if predicts_tokens(loss) else ()
    rng = generator("loss probe", classes, *tokens)
    logits = torch.randn(PROBES, *tokens, classes, generator=rng)
    return logits, (torch.arange(logits[..., 0].numel()) % classes).view(PROBES, *tokens)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs() <= SAME * (1e-6 + torch.maximum(a.abs(), b.abs())))


def _takes_instead(loss: Loss, logits: Tensor, y: Tensor) -> str:
    """Return what to change where a loss does not take logits, judged by the other forms that it takes; empty if by none."""
    to_logits = "let the network return logits, without its last sigmoid or softmax, and use a loss of logits"
    to_classes = (
        "let the network return one logit for each class, torch.cat([torch.zeros_like(z), z], -1) of its logit z (without a "
        "sigmoid), and leave [loss] out: the cross-entropy is then the same loss"
    )
    forms = [(logits.softmax(-1), f"; it takes probabilities: {to_logits}, such as the cross-entropy")]
    if logits.shape[-1] == 2:
        forms += [(logits[..., :1], f"; it takes one logit: {to_classes}")]
        forms += [(logits[..., :1].sigmoid(), f"; it takes one probability: {to_classes}")]
    for form, change in forms:
        try:
            loss(form, y)
        except Exception:  # a user's function may raise anything for a form that it does not take
            continue
        return change
    return ""
