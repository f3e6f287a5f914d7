"""Fishing: classifier weights under which only one example of a batch has a gradient (Wen et al., ICML 2022).

With all rows but that of class c zero, and its logit far below the others, p_c is zero. An example of another class has no
gradient before the classifier, and one of class c keeps its whole gradient. Among several examples of that class, a steep logit
behind a threshold leaves only the one that the row scores lowest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.func import functional_call

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Streams, Wave, not_applicable
from fedgauge.attacks.delegating import DelegatingAttack
from fedgauge.attacks.engine.computation import classifier
from fedgauge.attacks.malicious.server_attack import ServerAttack, check_one_gradient, delegated
from fedgauge.client.chain import Chain
from fedgauge.client.transforms import UpdateTransform, is_per_example
from fedgauge.client.update import Params, Update

CERTAIN = 30.0  # a distance of logits at which softmax rounds to 0 or 1 in float32
ALONE = 1e-3  # largest distance from one of the count of examples, for one to count as isolated
NARROWEST = 1e-6  # of the width in which a threshold is searched: float32 has no finer one
PUBLIC = 200  # public examples from which thresholds are estimated


@dataclass(frozen=True)
class class_fishing(ServerAttack):
    """Leaves only examples of one class a gradient; a single example where the batch has the class once.

    Args:
        target: the class; None: try each in turn until one occurs once in the client's batch.
    """

    target: int | None = None

    @property
    def is_stateful(self) -> bool:
        return self.target is None

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        row = self._next(known, seen) if self.target is None else self.target
        weight = _classifier(sent, known, row)[row]
        highest = float(_row_logits(sent, known, weight).max())
        return _one_row(sent, known, row, weight, -highest - CERTAIN)

    def _next(self, known: Knowledge, seen: Sequence[Observation]) -> int:
        """The class to try: the first not tried yet, else the tried one with the fewest examples."""
        counts = {_fished_class(o.params, known): round(count_isolated(o.params, o.update, known)) for o in seen}
        present = {row: count for row, count in counts.items() if count > 0}
        if 1 not in present.values() and len(counts) < known.classes:
            return next(row for row in range(known.classes) if row not in counts)
        return min(present, key=lambda row: present[row]) if present else 0


@dataclass(frozen=True)
class feature_fishing(ServerAttack):
    """Leaves one example of a batch of one class a gradient; bisects the threshold over rounds.

    Args:
        target: the class that all examples of the client have.
    """

    target: int

    is_stateful = True

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        row = self.target
        weight = _classifier(sent, known, row)[row]
        logits = _row_logits(sent, known, weight)
        low, high = (float(logits.mean() + side * 6 * logits.std()) for side in (-1, 1))
        if not high > low:  # as where no unit is active, to which one client's update can bring the weights
            raise ValueError("the weights give all public examples the same score, so no threshold can separate them")
        threshold, steepness = self._search(low, high, known, seen)
        return _one_row(sent, known, row, steepness * weight, -steepness * threshold)

    def _search(self, low: float, high: float, known: Knowledge, seen: Sequence[Observation]) -> tuple[float, float]:
        """The next threshold and the logit's steepness there: below the right threshold no example is left, above it several."""
        threshold, steepness, narrow = (low + high) / 2, 2 * CERTAIN / (high - low), NARROWEST * (high - low)
        for o in seen:
            count = count_isolated(o.params, o.update, known)
            if abs(count - 1) <= ALONE or high - low < narrow:  # equal images can never be separated
                break
            low, high = (threshold, high) if count < 1 else (low, threshold)
            threshold, steepness = (low + high) / 2, 4 * CERTAIN / (high - low)
        return threshold, steepness


def count_isolated(params: Params, update: Update, known: Knowledge) -> float:
    """Count the examples with a gradient by the bias of the fished class: each adds 1 - p, and less behind clipping."""
    gradient = -update[f"{classifier(known.model, known.shape)}.bias"] / known.scale
    return -float(gradient[_fished_class(params, known)]) * known.batch_size


def _classifier(sent: Params, known: Knowledge, target: int = 0) -> Tensor:
    """The classifier's weight; ValueError if it has no bias or the target is no class."""
    name = classifier(known.model, known.shape)
    if f"{name}.bias" not in sent or not 0 <= target < known.classes:
        raise ValueError(f"target must be one of {known.classes} classes, and the classifier {name!r} needs a bias")
    return sent[f"{name}.weight"]


def _row_logits(sent: Params, known: Knowledge, row: Tensor) -> Tensor:
    """The logits (n,) that a row of the classifier gives public examples, without its bias."""
    x = known.normalise(known.public.x[:PUBLIC])
    with torch.no_grad():
        scores: Tensor = functional_call(known.model, _one_row(sent, known, 0, row, 0.0), (x,))[:, 0]
    return scores


def _one_row(params: Params, known: Knowledge, row: int, weight: Tensor, bias: float) -> dict[str, Tensor]:
    changed, name = {k: t.clone() for k, t in params.items()}, classifier(known.model, known.shape)
    for key, value in ((f"{name}.weight", weight), (f"{name}.bias", bias)):
        changed[key].zero_()
        changed[key][row] = value
    return changed


def _fished_class(params: Params, known: Knowledge) -> int:
    """The class that these weights isolate; ValueError where they were not crafted by fishing."""
    rows = _classifier(params, known).flatten(1).any(1).nonzero().flatten().tolist()
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} rows of the classifier are not zero: these weights were not crafted by fishing")
    return int(rows[0])


@dataclass(frozen=True)
class _BatchShare(UpdateTransform):
    """One example's share of its batch's mean gradient."""

    examples: int

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: t / self.examples for k, t in update.items()}


@dataclass(frozen=True)
class _OneRow(UpdateTransform):
    """Leaves the classifier's other rows out of the comparison: every example of the batch has a gradient in them."""

    classifier: str
    row: int

    def apply(self, update: Update, rng: Generator | None) -> Update:
        names = (f"{self.classifier}.weight", f"{self.classifier}.bias")
        others = torch.arange(len(update[names[0]]), device=update[names[0]].device) != self.row
        return {**update, **{k: update[k].movedim(0, -1).masked_fill(others, 0.0).movedim(-1, 0) for k in names}}


@dataclass(frozen=True)
class lone_example(DelegatingAttack):
    """Inverts the isolated example by another attack, as a batch of one; it knows the whole chain."""

    decodes: ClassVar[tuple[str, ...]] = ("class_fishing", "feature_fishing")

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        try:
            check_one_gradient(known)
            row = _fished_class(wave.params, known)
        except ValueError as error:
            return not_applicable(wave, str(error))
        counts = [count_isolated(wave.params, wave.alone(k), known) for k in range(len(wave))]
        caught = [k for k, count in enumerate(counts) if math.isfinite(count) and count > ALONE]
        results = dict(enumerate(not_applicable(wave, f"no example of class {row} was fished")))
        if caught:
            notes = [f"{round(counts[k], 3):g} of the batch's examples keep a gradient" for k in caught]
            inverted = self._inverted(wave.of(caught), row, known, budget, [streams[k] for k in caught], notes)
            results |= dict(zip(caught, inverted, strict=True))
        return [results[k] for k in range(len(wave))]

    def _inverted(
        self, wave: Wave, row: int, known: Knowledge, budget: Budget, streams: Streams, notes: Sequence[str]
    ) -> list[Reconstruction]:
        links = list(known.chain.links)
        links.insert(sum(map(is_per_example, links)), _BatchShare(known.batch_size))
        rest = _OneRow(classifier(known.model, known.shape), row)
        labels = torch.full((len(wave), 1), row, device=wave.device)
        alone = replace(known, chain=Chain((*links, rest)), batch_size=1, labels=labels)
        parts = [rest.apply(wave.alone(i), None) for i in range(len(wave))]
        update = {k: torch.stack([part[k] for part in parts]) for k in wave.update}
        # without the threshold the isolated image keeps its gradient, and a guess anywhere has a gradient to follow
        weight = _classifier(wave.params, known)[row]
        logits = _row_logits(wave.params, known, weight)
        threshold = -float(logits.max() + 10 * (logits.max() - logits.min())) - CERTAIN
        open_to_all = _one_row(wave.params, known, row, weight, threshold)
        unthresholded = replace(wave, params=open_to_all, update=update)
        return delegated(self.inner, unthresholded, alone, known, budget, streams, notes)
