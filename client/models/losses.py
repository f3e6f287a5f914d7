"""Losses: what clients minimise, the mean over a batch of a function of logits and labels.

Attacks were built on the cross-entropy: where one reads more than the engine's matching does (labels off p - y), another
loss is refused there in words.
"""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.client.components import (
    Checked,
    ComponentKind,
    NotNegative,
    Positive,
    Proportion,
    SpecError,
    Table,
    call,
    check_arguments,
    own_line,
    resolve,
)
from fedgauge.client.label_kinds import Findings, LabelKind, Mask, NoLabel, Numbers, label_kind
from fedgauge.client.rng import generator
from fedgauge.client.update import Loss

Reduction = Literal["mean", "sum"]
FAR = 1e6  # an output so far off that a loss without a lower bound shows it
PROBES = 6  # examples on which a loss is tried
TOKENS = 3  # of each, where a loss is of tokens
IGNORED = -100  # the label of a token that nothing is learnt from
SAME = 1e-4  # relative difference up to which two values of a loss are one


class Criterion(Checked, ABC):
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
        weight: of each class, at least 0; the mean is weighted.
        reduction: mean, or sum over the examples.

    Raises:
        ValueError: a setting is out of its range.
    """

    label_smoothing: Proportion = 0.0
    weight: Sequence[float] | None = None
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight is not None and not (min(self.weight, default=-1) >= 0 and max(self.weight) > 0):
            raise ValueError(f"weight must be at least 0 for each class, and above 0 for some, got {self.weight}")

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        weight = None if self.weight is None else logits.new_tensor(self.weight)
        value = F.cross_entropy(logits, y, weight, label_smoothing=self.label_smoothing, reduction=self.reduction)
        if weight is None or self.reduction == "sum" or not y.is_floating_point():
            return value
        return value * len(y) / (y @ weight).sum()  # torch divides by the weights only for whole labels


@dataclass(frozen=True)
class focal(Criterion):
    """-(1 - p)^gamma log p of the label's probability p, averaged over examples (Lin et al., 2017).

    Args:
        gamma: at least 0; 0: the cross-entropy.
    """

    gamma: NotNegative = 2.0

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        log = logits.log_softmax(-1)
        return -(_target(logits, y) * (1 - log.exp()) ** self.gamma * log).sum(-1).mean()


@dataclass(frozen=True)
class mean_squared_error(Criterion):
    """(logits - y)^2 with y one-hot, averaged over classes and examples."""

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        # mse_loss has no forward derivative of its gradient
        return (logits - _target(logits, y)).square().mean()


@dataclass(frozen=True)
class mean_absolute_error(Criterion):
    """|logits - y| with y one-hot, averaged over classes and examples."""

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits - _target(logits, y)).abs().mean()


@dataclass(frozen=True)
class huber(Criterion):
    """(logits - y)^2 / 2 up to an error of delta, and linear beyond it, averaged over classes and examples.

    Args:
        delta: above 0.
    """

    delta: Positive = 1.0

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        off = (logits - _target(logits, y)).abs()
        near = off.clamp(max=self.delta)
        return (near * (off - near / 2)).mean()


@dataclass(frozen=True)
class binary_cross_entropy(Criterion):
    """-y log sigmoid(z) - (1 - y) log(1 - sigmoid(z)), averaged over logits and examples.

    The labels are multi-label (0 or 1 each), or classes 0 and 1 of a network with one output.

    Args:
        pos_weight: of y = 1, for all outputs or for each, at least 0.
        reduction: mean, or sum over logits and examples.
    """

    pos_weight: Sequence[float] = (1.0,)
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not min(self.pos_weight, default=-1) >= 0:
            raise ValueError(f"pos_weight must be at least 0 for each output, got {self.pos_weight}")

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        y = y.to(logits.dtype).view_as(logits)
        # binary_cross_entropy_with_logits lacks forward derivatives
        each = (1 - y) * F.softplus(logits) + logits.new_tensor(self.pos_weight) * y * F.softplus(-logits)
        return each.sum() if self.reduction == "sum" else each.mean()


@dataclass(frozen=True)
class reconstruction(Criterion):
    """The error of outputs against the network's own input, as autoencoders minimise it, averaged over all values.

    Args:
        measure: (output - x)^2, or for outputs and inputs in [0, 1] the binary cross-entropy.
    """

    measure: Literal["squared_error", "cross_entropy"] = "squared_error"

    def __call__(self, logits: Tensor, y: Tensor, x: Tensor | None = None) -> Tensor:
        assert x is not None  # a loss with a third parameter of this name gets the network's input
        if self.measure == "cross_entropy":
            return F.binary_cross_entropy(logits, x.clamp(0, 1).view_as(logits))  # a search starts from any values
        return (logits - x.view_as(logits)).square().mean()


@dataclass(frozen=True)
class next_token(Criterion):
    """-log softmax of each next word, averaged over a sentence's predicted words, then over sentences.

    The labels are the sentences themselves, -100 on padding; position t of the logits is compared with label t + 1.

    Args:
        mean: over a sentence's predicted words, then over sentences; or over all predicted words of the batch, as in the
            Trainer of the package transformers.
    """

    mean: Literal["sentences", "words"] = "sentences"

    tokens: ClassVar[bool] = True

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        log, y = logits[:, :-1].log_softmax(-1), y[:, 1:]
        if y.is_floating_point():  # probabilities (B, L, classes), all zero on padding
            nll, seen = -(y * log).sum(-1), y.sum(-1)
        else:
            seen = (y != IGNORED).to(log.dtype)
            nll = -log.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1) * seen
        if self.mean == "words":
            return nll.sum() / seen.sum().clamp(min=1)
        return (nll.sum(1) / seen.sum(1).clamp(min=1)).mean()


def _target(logits: Tensor, y: Tensor) -> Tensor:
    """Labels as floats in the logits' shape; classes are one-hot (one_hot does not work under vmap)."""
    classes = torch.arange(logits.shape[-1], device=logits.device)
    target = y if y.is_floating_point() else (y.unsqueeze(-1) == classes).to(logits.dtype)
    return target.view_as(logits)


def per_example_accuracy(logits: Tensor, y: Tensor, kind: LabelKind) -> Tensor:
    """The part of each example (B,) that the outputs predict correctly: its label, or its words."""
    if y.dim() == 1 or y.is_floating_point() or isinstance(kind, Mask):
        return kind.right(logits, y)
    guess, y = logits[:, :-1].argmax(-1), y[:, 1:]
    return (guess == y).double().sum(1) / (y != IGNORED).sum(1).clamp(min=1)


LOSS = ComponentKind("a loss", ("fedgauge.losses",), Criterion, False, (Criterion, nn.Module, Tensor), instances=True)
CROSS_ENTROPY: Table = {"use": "cross_entropy"}
WHERE = "[loss]"  # place of the table, for messages
Tried = tuple[Tensor, Tensor, Tensor]  # a network's outputs for a few examples, their labels and its inputs


def named_loss(table: Table) -> Loss:
    """The loss that the table [loss] names, untried; for the plain cross-entropy, torch's own function.

    A user's loss is a function (outputs, labels, ...) with further arguments from the table, or a class with instances that take
    outputs and labels, or such an instance. If its third parameter is called x, it also gets the network's input.

    Raises:
        SpecError: it does not exist, or has other arguments.
    """
    target = resolve(table, WHERE, LOSS)
    arguments = {k: v for k, v in table.items() if k != "use"}
    loss: Loss = target
    if inspect.isclass(target):
        loss = call(target, check_arguments(target, arguments, WHERE), WHERE)
    elif arguments and not inspect.isfunction(target):
        raise SpecError(
            f"{WHERE}: {table['use']!r} is built already, so it takes no argument {next(iter(arguments))!r}"
        )
    reads = list(inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters)
    reads_input = reads[2:3] == ["x"]
    if inspect.isfunction(target):
        given = reads[: 3 if reads_input else 2]
        settings = check_arguments(target, arguments, WHERE, dict.fromkeys(given))
        further = {k: v for k, v in settings.items() if k not in given}
        loss = partial(target, **further) if further else target
    if isinstance(loss, nn.Module):
        loss.requires_grad_(False)  # parameters of its own, such as class centers, are not uploaded
    if loss == cross_entropy():
        return F.cross_entropy  # same bits as the default, and attacks recognise it by identity
    return FittedLoss(loss, reads_input=True) if reads_input else loss


class FittedLoss(nn.Module):
    """A loss that also takes the network's input, or labels in another form than the data have.

    Args:
        loss: of outputs, labels and, if it reads the input, that.
        form: of the labels: as they are, as floats (B,), or as a column of floats (B, 1).
    """

    def __init__(self, loss: Loss, reads_input: bool, form: int = 0) -> None:
        super().__init__()
        self.loss, self.reads_input, self.form = loss, reads_input, form

    def forward(self, outputs: Tensor, y: Tensor, x: Tensor | None = None) -> Tensor:
        y = y.to(outputs.dtype) if self.form and not y.is_floating_point() else y
        y = y.unsqueeze(-1) if self.form == 2 else y
        value: Tensor = self.loss(outputs, y, x) if self.reads_input else self.loss(outputs, y)  # type: ignore[call-arg]
        return value


class Expected(FittedLoss):
    """A loss of whole classes as one of probabilities (B, classes): its mean over the classes of each example."""

    def forward(self, outputs: Tensor, y: Tensor, x: Tensor | None = None) -> Tensor:
        if not y.is_floating_point():
            return loss_of(self.loss, outputs, y, x)
        every, rows = torch.arange(y.shape[1], device=y.device), [slice(i, i + 1) for i in range(len(y))]
        each = [loss_of(self.loss, outputs[i], c[None], x if x is None else x[i]) for i in rows for c in every]
        return (torch.stack(each).view_as(y) * y).sum(1).mean()


def loss_of(loss: Loss, outputs: Tensor, y: Tensor, x: Tensor | None) -> Tensor:
    """The value of a loss, which gets the network's input x if it reads it."""
    value: Tensor = loss(outputs, y, x) if isinstance(loss, FittedLoss) else loss(outputs, y)
    return value


def fitted_loss(loss: Loss, table: Table, tried: Tried, public: Tensor, classes: int) -> tuple[Loss, LabelKind]:
    """The loss in the form that takes a network's outputs for a few public examples, and the kind of its labels.

    Args:
        public: labels of public examples.

    Raises:
        SpecError: it takes them in no form, or the labels are of another kind than the loss.
    """
    outputs, y, x = tried
    problem: Exception | None = None
    given = (loss.loss, True) if isinstance(loss, FittedLoss) else (loss, False)
    forms = [FittedLoss(*given, form) for form in range(3)]
    if outputs.shape == (*y.shape, 1):  # a loss that compares each output with each label is no mean of the examples'
        forms.sort(key=lambda form_of: not _is_mean(form_of, tried))
    for form_of in forms:
        try:
            _check_value(form_of, tried)
        except Exception as error:  # a user's function may raise anything
            problem = problem or error
            continue
        # one label for all: a shuffle does not change the sum of absolute errors
        other = next((each for each in public if not torch.equal(each, y[0])), (y[0] == 0).to(y)).expand_as(y)
        reads = bool((form_of(outputs, y, x) - form_of(outputs, other, x)).detach().abs() > 0)
        kind = label_kind(public, outputs, reads)
        _check_kind(form_of, kind, table, tried, public, classes)
        plain = form_of.form == 0 and not isinstance(loss, FittedLoss)
        return loss if plain else form_of, kind(public, (outputs.detach(), y, x), _threshold(form_of, kind, tried))
    raise SpecError(
        f"{WHERE}: {table['use']!r} must take the network's outputs {tuple(outputs.shape)} and labels {tuple(y.shape)} of "
        f"{str(y.dtype).removeprefix('torch.')}, and return their finite, differentiable mean: {_said(problem)}"
    ) from problem


def _said(error: Exception | None) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}{own_line(error) if error else ''}"


def _check_value(loss: Loss, tried: Tried) -> None:
    """Try a loss; ValueError if it returns no finite, differentiable scalar. Silent broadcasts of other sizes are errors."""
    with torch.enable_grad(), warnings.catch_warnings():  # the caller may have turned gradients off
        warnings.filterwarnings("error", "Using a target size")
        outputs, y, x = tried
        value = loss_of(loss, outputs.detach().requires_grad_(), y, x)
        if not isinstance(value, Tensor) or value.dim() or not value.isfinite() or not value.requires_grad:
            shaped = isinstance(value, Tensor) and value.dim()
            raise ValueError(f"it returned {f'a tensor of shape {tuple(value.shape)}' if shaped else value}")


def _threshold(loss: FittedLoss, kind: type[LabelKind], tried: Tried) -> float:
    """The output at which a prediction of 0 or 1 turns: 0 of logits, 0.5 of values that approach labels; NaN of other numbers."""
    outputs, y, x = tried
    unbounded = torch.nan if kind is Numbers else 0.0
    if outputs.numel() != y.numel():
        return unbounded
    labels = y.to(outputs).view_as(outputs)
    beyond = [labels / 2, labels * 2] if kind is Numbers else [labels + 10 * (2 * labels - 1)]
    try:
        lower = min(float(loss(at, y, x)) for at in beyond) < float(loss(labels, y, x))
    except Exception:  # a loss of probabilities may refuse other outputs
        lower = False
    return unbounded if lower else 0.5


def _check_kind(
    fitted: FittedLoss, kind: type[LabelKind], table: Table, tried: Tried, public: Tensor, classes: int
) -> None:
    """Refuse labels of one kind under a loss of another."""
    outputs, y, x = tried
    single = outputs[0].numel() == 1
    far = FAR * ((y > 1).float() - (y < 0).float())  # where a cross-entropy of two classes falls without bound
    numbers = kind is Numbers and not bool(((public >= 0) & (public <= 1)).all())
    if single and kind is not NoLabel and not public.is_floating_point() and classes > 2:
        why = f"the network has one output, and [data] has {classes} classes: let it return {classes}"
        why += ', or give the labels as numbers (of a table: target = "number")'
    elif is_cross_entropy(fitted.loss) or isinstance(fitted.loss, cross_entropy):
        kind = label_kind(public, outputs, True)
        distributions = public.dim() == 2 and bool(((public.sum(1) - 1).abs() < SAME).all())
        if not issubclass(kind, Findings | Numbers) or distributions:
            return
        other = "binary_cross_entropy" if kind is Findings else "mean_squared_error"
        why = f'{table["use"]} takes one class an example, and the labels are {kind.noun}: set use = "{other}"'
    elif numbers and y.numel() == outputs.numel() and fitted(far.view_as(outputs), y, x) < -SAME * FAR:
        why = f'{table["use"]} takes labels from 0 to 1, and the labels are numbers: set use = "mean_squared_error"'
    else:
        return
    raise SpecError(f"{WHERE}: {why}")


def takes_logits(loss: Loss, classes: int) -> bool:
    """Check that a loss takes any logits (B, classes), or those of every token, with one class each."""
    try:
        _check_value(loss, _probe(loss, classes))
    except Exception:  # a user's function may raise anything
        return False
    return True


def is_cross_entropy(loss: Loss) -> bool:
    """Check for plain cross-entropy: its derivative by the logits is softmax - one-hot."""
    return loss is F.cross_entropy


def is_mean(loss: Loss, classes: int, kind: LabelKind | None = None) -> bool:
    """Check that the loss of a batch is the mean of its examples' separate losses."""
    return is_cross_entropy(loss) or _is_mean(loss, _probe(loss, classes, kind))


def _is_mean(loss: Loss, parts: Tried) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            alone = torch.stack([loss_of(loss, *(t[i : i + 1] for t in parts)) for i in range(len(parts[0]))]).mean()
            return _same(loss_of(loss, *parts), alone)
    except Exception:  # a user's function may refuse a batch of one
        return False


def takes_probabilities(loss: Loss, classes: int, kind: LabelKind | None = None) -> bool:
    """Check that labels may be relaxed: probabilities (B, classes), with integer labels as one-hot vectors, or other floats."""
    if is_cross_entropy(loss):
        return True
    outputs, y, x = _probe(loss, classes, kind)
    try:
        soft = loss_of(loss, outputs, (kind or LabelKind()).soft(y, classes).to(outputs), x)
    except Exception:  # a user's function may raise anything for such labels
        return False
    return soft.dim() == 0 and _same(loss_of(loss, outputs, y, x), soft)


def logit_gradient(loss: Loss, logits: Tensor, y: Tensor) -> Tensor:
    """The derivative of each example's loss by its logits, (B, classes)."""
    at = logits.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(loss(at, y) * len(at), at)
    return found


def predicts_tokens(loss: Loss) -> bool:
    """Check that it takes the logits of every token, not those of a class."""
    return bool(getattr(loss, "tokens", False))


def _probe(loss: Loss, classes: int, kind: LabelKind | None = None) -> Tried:
    """Outputs, labels and inputs on which a loss is tried."""
    if kind is not None and kind.tried is not None:
        return kind.tried
    tokens = (TOKENS,) if predicts_tokens(loss) else ()
    rng = generator("loss probe", classes, *tokens)
    logits = torch.randn(PROBES, *tokens, classes, generator=rng)
    y = (torch.arange(logits[..., 0].numel()) % classes).view(PROBES, *tokens)
    if tokens:
        y[0, -1] = IGNORED  # sentences of one length hide a mean over all words
    return logits, y, logits


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs() <= SAME * (1e-6 + torch.maximum(a.abs(), b.abs())))
