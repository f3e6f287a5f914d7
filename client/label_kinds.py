"""The kinds of labels: one class, multi-label, numbers, a mask, or none. All other modules ask here and do not branch on a kind.

A label is a tensor: one class (N,) int64; multi-label, K findings of 0 or 1, (N, K) float; numbers (N,) or (N, K) float; a mask,
a class for each pixel (N, H, W) int64, or 0 and 1 as floats (N, K, H, W); for a loss that reads no label, any tensor.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgauge.client.psnr import assigned

STEPS = 20  # of Newton's method, which ends after one for a squared error
EXACT = 1e-9  # relative error at which Newton's method ends
MOST = 1024  # numbers of a label up to which Newton's method solves for it
SAME = 1e-3  # relative error up to which a label explains a derivative

Slope = Callable[[Tensor], Tensor]  # a label of one example -> the loss's derivative by the classifier's outputs


@dataclass(frozen=True, eq=False)
class LabelKind:
    """One class of several: y (B,) int64, or at an attacker probabilities (B, classes). The base of the other kinds."""

    noun: ClassVar[str] = "one class"
    metric: ClassVar[str] = "label_accuracy"  # of restored labels
    restored: ClassVar[str] = "{} of the labels are restored by {}"  # with a value of the metric and an attack's name
    utility: ClassVar[str] = "accuracy"  # of the trained network
    few: ClassVar[bool] = True  # so that all labels of an example can be tried

    # labels (N, ...) of the attacker's public examples, which only this base works without
    public: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    tried: tuple[Tensor, Tensor, Tensor] | None = None  # outputs, labels, inputs of a few; None: logits (B, classes)
    threshold: float = 0.0  # the output at which a prediction turns; NaN: outputs are no labels, such as logarithms

    def width(self, classes: int) -> int:
        """Count the free numbers of a label that is optimised."""
        return classes

    def relaxed(self, free: Tensor) -> Tensor:
        """Labels of free numbers (..., width), as the loss takes them."""
        return free.softmax(-1)

    def decided(self, y: Tensor) -> Tensor:
        """Labels that an attacker claims, from relaxed ones."""
        return y.argmax(-1)

    def soft(self, y: Tensor, classes: int) -> Tensor:
        """Labels as relaxed ones; -100, the label of padding, as zeros."""
        return y if y.is_floating_point() else F.one_hot(y.clamp(min=0), classes) * (y >= 0)[..., None]

    def trial(self, count: int, classes: int) -> Tensor:
        """Labels (count, ...) on which a model is tried."""
        if self.tried is None:
            return torch.arange(count) % classes
        return self.tried[1][torch.arange(count) % len(self.tried[1])]

    def candidates(self, classes: int) -> Tensor:
        """Labels (n, 1, ...) of one example among which the loss's derivative decides; empty: they are computed."""
        return torch.arange(classes)[:, None] if self.few else torch.empty(0)

    def solved(self, slope: Slope, seen: Tensor, exact: bool, classes: int) -> Tensor | None:
        """The label (1, ...) of one example from the loss's derivative by the classifier's outputs; None: no label explains it.

        Args:
            seen: the observed derivative; exact: its length is known too.
        """
        labels = self.candidates(classes)
        near = [torch.cosine_similarity(slope(y).detach().flatten(), seen.flatten(), 0) for y in labels]
        best = int(torch.stack(near).argmax())
        return labels[best] if float(near[best]) > 0.5 else None

    def guess(self, count: int) -> Tensor | None:
        """Labels (count, ...) guessed from public ones, to score restored labels against; None: chance is known."""
        return None

    def scores(self, truth: Tensor, guess: Tensor) -> Mapping[str, float]:
        """Scores of a batch's restored labels in any order, by metric.

        The accuracy compares multisets: repeats count. If more labels are claimed than there are, it is the share of those.
        """
        classes = int(max(truth.max(), guess.max())) + 1
        common = torch.minimum(torch.bincount(truth, minlength=classes), torch.bincount(guess, minlength=classes))
        return {self.metric: float(common.sum()) / max(len(truth), len(guess))}

    def right(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The part of each example (B,) that the network's outputs predict correctly."""
        return (outputs.argmax(1) == y).double()


class Binary(LabelKind):
    """One of two classes, y (B,), predicted by one output."""

    def width(self, classes: int) -> int:
        return 1

    def relaxed(self, free: Tensor) -> Tensor:
        return free[..., 0].sigmoid()

    def decided(self, y: Tensor) -> Tensor:
        return (y > 0.5).long()

    def soft(self, y: Tensor, classes: int) -> Tensor:
        return y

    def guess(self, count: int) -> Tensor | None:
        return self.public.mode().values.expand(count)

    def right(self, outputs: Tensor, y: Tensor) -> Tensor:
        hits = (outputs.view(len(y), -1) > self.threshold) == (y.view(len(y), -1) > 0.5)
        return hits.double().mean(1)


class Findings(Binary):
    """Multi-label targets: several findings for each example, each 0 or 1: y (B, K) float."""

    noun: ClassVar[str] = "multi-label"
    metric: ClassVar[str] = "label_f1"
    restored: ClassVar[str] = "the labels (multi-label) are restored with an F1 of {} by {}"
    few: ClassVar[bool] = False

    def width(self, classes: int) -> int:
        return classes

    def relaxed(self, free: Tensor) -> Tensor:
        return free.sigmoid()

    def decided(self, y: Tensor) -> Tensor:
        return (y > 0.5).float()

    def solved(self, slope: Slope, seen: Tensor, exact: bool, classes: int) -> Tensor | None:
        y = (seen < 0).float().view(1, -1)  # of the cross-entropy: sigmoid(z) - y
        return y if float(torch.cosine_similarity(slope(y).detach().flatten(), seen.flatten(), 0)) > 0.5 else None

    def guess(self, count: int) -> Tensor | None:
        """Return the most frequent findings, as many as give the highest F1 on the public examples."""
        public, shares = self.public, self.public.mean(0)
        each = [(shares >= least).float() for least in shares.unique()]
        best: Tensor = max(each, key=lambda y: _f1(public, y.expand_as(public)))
        return best.expand(count, -1)

    def scores(self, truth: Tensor, guess: Tensor) -> Mapping[str, float]:
        return {self.metric: _f1(*_paired(truth, guess))}


class Numbers(LabelKind):
    """Real numbers: y (B,) or (B, K) float; soft labels too."""

    noun: ClassVar[str] = "numbers"
    metric: ClassVar[str] = "label_error"
    restored: ClassVar[str] = "the labels are restored to {} standard deviations by {}"
    utility: ClassVar[str] = "R2"
    few: ClassVar[bool] = False

    def width(self, classes: int) -> int:
        return self.public[0].numel()

    @property
    def spread(self) -> Tensor:
        """The target's standard deviation among the public examples."""
        return self.public.std(0).clamp_min(torch.finfo(torch.float32).tiny)

    @property
    def are_shares(self) -> bool:
        """True if the numbers of an example are probabilities: their sum is 1."""
        return self.public.dim() > 1 and bool((self.public.flatten(1).sum(1) - 1).abs().max() < SAME)

    def relaxed(self, free: Tensor) -> Tensor:
        free = free if self.public.dim() > 1 else free[..., 0]
        if bool(((self.public == 0) | (self.public == 1)).all()):
            return free.sigmoid()  # a loss of probabilities may refuse others
        return self.public.mean(0).to(free) + self.spread.to(free) * free

    def decided(self, y: Tensor) -> Tensor:
        return y

    def solved(self, slope: Slope, seen: Tensor, exact: bool, classes: int) -> Tensor | None:
        if not exact or self.public[0].numel() > MOST:
            return None
        y = self.public.mean(0)[None].to(seen)
        for _ in range(STEPS):
            by_label = torch.autograd.functional.jacobian(slope, y).reshape(seen.numel(), y.numel())
            off = (slope(y) - seen).detach().flatten()
            if float(off.norm()) <= EXACT * float(seen.norm()):
                break
            if self.are_shares:
                by_label, off = torch.cat([by_label, torch.ones_like(y)]), torch.cat([off, y.sum()[None] - 1])
            y = y - (torch.linalg.pinv(by_label) @ off).view_as(y)
        left = (slope(y) - seen).detach()
        if not bool(by_label.any()):  # as in the linear part of a Huber loss
            return None
        return y.float() if bool(left.norm() <= SAME * seen.norm()) else None

    def guess(self, count: int) -> Tensor | None:
        return self.public.mean(0).expand(count, *self.public.shape[1:])

    def scores(self, truth: Tensor, guess: Tensor) -> Mapping[str, float]:
        truth, guess = _paired(truth / self.spread, guess / self.spread)
        return {self.metric: float((truth - guess).square().mean().sqrt())}

    def right(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Each example's part of R2, the explained share of the variance."""
        if math.isnan(self.threshold) and self.are_shares:
            outputs = outputs.softmax(-1)
        elif math.isnan(self.threshold):
            return torch.full((len(y),), torch.nan, dtype=torch.float64)
        off = (outputs.view_as(y) - y).square().flatten(1 if y.dim() > 1 else 0)
        error = off.mean(1) if off.dim() > 1 else off
        return 1 - (error / self.spread.square().mean()).double()


class Mask(LabelKind):
    """A class for each pixel, y (B, *size) int64, or 0 and 1 as floats."""

    noun: ClassVar[str] = "a mask"
    metric: ClassVar[str] = "mask_iou"
    restored: ClassVar[str] = "the masks are restored with an IoU of {} by {}"
    few: ClassVar[bool] = False

    @property
    def _size(self) -> tuple[int, ...]:
        return tuple(self.public.shape[1:])

    @property
    def binary(self) -> bool:
        """True if each pixel has one output, not one for each class."""
        one_output = self.tried is not None and self.tried[0].numel() == self.tried[1].numel()
        return self.public.is_floating_point() or one_output

    def width(self, classes: int) -> int:
        return math.prod(self._size) * (1 if self.binary else classes)

    def relaxed(self, free: Tensor) -> Tensor:
        if self.binary:
            return free.view(*free.shape[:-1], *self._size).sigmoid()
        return free.view(*free.shape[:-1], -1, *self._size).softmax(-1 - len(self._size))

    def decided(self, y: Tensor) -> Tensor:
        if self.binary:
            return (y > 0.5).to(self.public.dtype)
        return y.argmax(-1 - len(self._size))

    def soft(self, y: Tensor, classes: int) -> Tensor:
        return y if self.binary else super().soft(y, classes).movedim(-1, 1)

    def solved(self, slope: Slope, seen: Tensor, exact: bool, classes: int) -> Tensor | None:
        return None

    def guess(self, count: int) -> Tensor | None:
        """Return the most frequent class of each pixel; of 0 and 1 the threshold of least overlap lost on public masks."""
        public = self.public
        if int(public.max()) > 1:
            return public.mode(0).values.expand(count, *self._size)
        shares = public.float().mean(0)
        thresholds = shares.quantile(torch.linspace(0.05, 0.95, 19)).unique()
        each = [(shares >= least).to(public.dtype) for least in thresholds]
        best: Tensor = max(each, key=lambda y: _overlap(public, y.expand_as(public)))
        return best.expand(count, *self._size)

    def scores(self, truth: Tensor, guess: Tensor) -> Mapping[str, float]:
        return {self.metric: _overlap(*_paired(truth.float(), guess.float()))}

    def right(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The part of each mask's pixels (B,) that the network's outputs predict correctly."""
        if not self.binary:
            return (outputs.argmax(1) == y).double().flatten(1).mean(1)
        return ((outputs.view_as(y) > self.threshold) == (y > 0.5)).double().flatten(1).mean(1)


class NoLabel(LabelKind):
    """The loss reads no label, such as that of an autoencoder."""

    noun: ClassVar[str] = "no label"

    def candidates(self, classes: int) -> Tensor:
        return self.trial(1, classes)[None]

    def soft(self, y: Tensor, classes: int) -> Tensor:
        return y

    def scores(self, truth: Tensor, guess: Tensor) -> Mapping[str, float]:
        return {}

    def right(self, outputs: Tensor, y: Tensor) -> Tensor:
        return torch.full((len(y),), torch.nan, dtype=torch.float64)


SCORED: Mapping[str, type[LabelKind]] = {kind.metric: kind for kind in (LabelKind, Findings, Numbers, Mask)}


def label_kind(public: Tensor, outputs: Tensor, reads_labels: bool) -> type[LabelKind]:
    """Return the kind of labels (N, ...) that a loss compares with a network's outputs."""
    if not reads_labels:
        return NoLabel
    if not public.is_floating_point():
        whole = Binary if outputs[0].numel() == 1 else LabelKind
        return whole if public.dim() == 1 else Mask
    if public.dim() == 1 or not bool(((public == 0) | (public == 1)).all()):
        return Numbers
    return Findings if public.dim() == 2 else Mask


def label_faults(y: Tensor, classes: int) -> Iterator[str]:
    """Yield what is wrong with the labels of findings or numbers."""
    if (y.shape[1] if y.dim() > 1 else 1) != classes:
        yield f"labels of shape {tuple(y.shape)} should be (N, {classes}), as classes = {classes} says"
    if not bool(y.isfinite().all()):
        yield "some labels are NaN or infinite: leave such examples out"
    if bool((y == y[:1]).all()):
        yield "all labels have one value: there is nothing to learn"


def ordered(y: Tensor) -> Tensor:
    """Labels (B, ...) sorted, so that their order carries no information."""
    return y.sort().values if y.dim() == 1 else y[sorted(range(len(y)), key=lambda i: y[i].tolist())]


def written(y: Tensor) -> int | str:
    """One example's label: the number of its class, or its findings or numbers as text."""
    if y.dim() > 1 or (y.dim() == 1 and not y.is_floating_point()):
        return f"a mask, {float((y > 0).double().mean()):.0%} of it above 0"
    return " ".join(f"{v:.3g}" for v in y.flatten().tolist()) if y.is_floating_point() else int(y)


def _paired(truth: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Pair labels one to one at the least total difference."""
    if len(truth) > len(guess):
        return _paired(guess, truth)[::-1]
    off = (truth[:, None] - guess[None]).double()[..., None].flatten(2)
    return truth, guess[assigned(off.abs().sum(2))]


def _overlap(truth: Tensor, guess: Tensor) -> float:
    """Return the mean intersection over union of masks (N, ...): over each one's classes other than 0, 1 if it has none."""
    values = []
    for t, g in zip(truth, guess, strict=True):
        classes = [c for c in torch.cat([t.flatten(), g.flatten()]).unique().tolist() if c > 0]
        both = [float(((t == c) & (g == c)).sum()) / float(((t == c) | (g == c)).sum()) for c in classes]
        values.append(sum(both) / len(both) if both else 1.0)
    return sum(values) / len(values)


def _f1(truth: Tensor, guess: Tensor) -> float:
    """Return the F1 over all findings of a batch; 1 if it has none and none is claimed."""
    hits, both = float((truth * guess).sum()), float(truth.sum() + guess.sum())
    return 2 * hits / both if both else 1.0
