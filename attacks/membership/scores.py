"""Scores of candidates against observed updates: the higher, the more the candidate seems to have been in the batch.

An update reveals its labels anyway, and gradients of different labels differ in size and direction. So a score is compared with
those of strangers of its label, in their standard deviations (`against_non_members`). A likelihood ratio is directly comparable.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedgauge.attacks.base import Wave
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.likelihood import RestOfBatch
from fedgauge.attacks.membership.likelihood import likelihood_ratio as log_ratios
from fedgauge.client.update import Batch, as_rows

LEAST_NON_MEMBERS = 10  # fewest non-members of a label for a mean and a spread
LEAST_OTHERS = 2  # updates that say how the scores against others vary
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class Scoring:
    """N candidates and the K updates of a wave, with quantities that several scores share.

    Args:
        rest: of the batch; only the likelihood ratio reads it.
    """

    candidates: CandidateGradients
    wave: Wave
    rest: RestOfBatch | None = None

    @cached_property
    def products(self) -> Tensor:
        """<gradient, -update>, (K, N) float64."""
        return self.candidates.products(-as_rows({k: self.wave.update[k] for k in self.candidates.params}))


Score = Callable[[Scoring], Tensor]  # (K, N) float64


def likelihood_ratio(scoring: Scoring) -> Tensor:
    """log p(update | in the batch) - log p(update | not), under the chain's density (fedgauge.attacks.membership.likelihood)."""
    assert scoring.rest is not None
    return log_ratios(scoring.candidates, scoring.wave, scoring.rest)


def matched_filter(scoring: Scoring) -> Tensor:
    """<gradient, -update> / |gradient|: the best linear detector under noise of equal size in every entry."""
    return scoring.products / scoring.candidates.norms.clamp_min(TINY)


def cosine(scoring: Scoring) -> Tensor:
    """The cosine of gradient and -update (Li et al., 2023)."""
    sizes = as_rows(scoring.wave.update).double().norm(dim=1, keepdim=True)
    found: Tensor = matched_filter(scoring) / sizes.clamp_min(TINY)
    return found


def gradient_difference(scoring: Scoring) -> Tensor:
    """|gradient seen|^2 - |gradient seen - the candidate's part of it|^2 (Li et al., 2023)."""
    known, kept = scoring.candidates.known, scoring.candidates.kept / scoring.candidates.known.batch_size
    return 2 * scoring.products * kept / known.scale - (scoring.candidates.norms * kept).square()


def fedmia(scoring: Scoring) -> Tensor:
    """The cosine, in standard deviations above that of the other clients' updates of the round (Zhu et al., 2025, FedMIA-II)."""
    return against_others(cosine(scoring))


def fedmia_loss(scoring: Scoring) -> Tensor:
    """The loss after the update, in standard deviations below that after the other clients' (Zhu et al., 2025, FedMIA-I)."""
    return against_others(loss_change(scoring))  # the loss before is the same for all


def against_others(every: Tensor) -> Tensor:
    """Scores (K, N) in standard deviations above the mean of the same candidate's scores against the other updates.

    Raises:
        ValueError: there are too few updates to compare with the others.
    """
    shown = every.isfinite().all(1)  # an update so large that its scores overflow says nothing about the others
    own, found = every[shown], torch.full_like(every, torch.nan)
    others = len(own) - 1
    if others < LEAST_OTHERS:
        raise ValueError(f"fedmia needs {LEAST_OTHERS} other updates, got {others}: let more clients take part")
    mean = (own.sum(0) - own) / others
    variance = ((own.square().sum(0) - own.square()) / others - mean.square()).clamp_min(0) * others / (others - 1)
    found[shown] = (own - mean) / variance.sqrt().clamp_min(TINY)
    return found


def loss(scoring: Scoring) -> Tensor:
    """The negative loss at the weights before the update, which reads no update."""
    return (-scoring.candidates.losses).expand(len(scoring.wave), -1)


def loss_change(scoring: Scoring) -> Tensor:
    """Return the update's reduction of the candidate's loss."""
    wave, candidates = scoring.wave, scoring.candidates
    moved = [{k: p + wave.update[k][i].to(p) for k, p in wave.params.items()} for i in range(len(wave))]
    return torch.stack([candidates.losses - candidates.losses_at(params) for params in moved])


def label_frequency(scoring: Scoring) -> Tensor:
    """Return the frequency of the candidate's label among public examples; reads neither update nor weights."""
    known, labels = scoring.candidates.known, classes_of(scoring.candidates.batch)
    counts = torch.bincount(classes_of(known.public), minlength=known.classes).double()
    return (counts / counts.sum())[labels].expand(len(scoring.wave), -1)


_BY_UPDATE = (likelihood_ratio, matched_filter, cosine, gradient_difference, fedmia, fedmia_loss, loss_change)
SCORES: Mapping[str, Score] = {score.__name__: score for score in (*_BY_UPDATE, loss, label_frequency)}


def classes_of(batch: Batch) -> Tensor:
    """(N,) int64: the label of each example; one for all where it is no class."""
    one_class = batch.y.dim() == 1 and not batch.y.is_floating_point()
    return batch.y if one_class else torch.zeros(len(batch.y), dtype=torch.int64)


def against_non_members(scores: Tensor, labels: Tensor, non_members: Tensor, non_member_labels: Tensor) -> Tensor:
    """Scores (K, N) in standard deviations above the mean of non-members' (K, M) of the same update and label.

    Args:
        labels, non_member_labels: (N,) and (M,) int64.
        non_members: scores of candidates outside all training sets.

    Raises:
        ValueError: there are too few non-members of a label.
    """
    found = torch.zeros_like(scores)
    for mine, same in _by_label(labels, non_members, non_member_labels):
        spread = same.std(1, keepdim=True)
        found[:, mine] = (scores[:, mine] - same.mean(1, keepdim=True)) / torch.where(spread > 0, spread, 1.0)
    return found


def calibrated(ratios: Tensor, labels: Tensor, non_members: Tensor, non_member_labels: Tensor) -> Tensor:
    """Log-ratios (K, N) on a scale on which non-members' ratios of the same update and label have a mean of at most 1.

    A true ratio has the mean 1 where its candidate is not in the batch; one that takes the rest of the batch for normal exceeds it
    on heavy tails. Standard deviations would lose members, as a few non-members' ratios spread widely. Arguments and errors are
    those of `against_non_members`.
    """
    found = ratios.clone()
    for mine, same in _by_label(labels, non_members, non_member_labels):
        found[:, mine] -= (same.logsumexp(1, keepdim=True) - math.log(same.shape[1])).clamp_min(0)
    return found


def _by_label(labels: Tensor, non_members: Tensor, non_member_labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each label, where its candidates are, and the non-members' scores (K, m)."""
    for label in labels.unique().tolist():
        yield labels == label, non_members[:, non_member_labels == label]


def check_non_members(labels: Tensor, non_member_labels: Tensor) -> None:
    """Raise ValueError if there are too few non-members of a candidate's label."""
    for label in labels.unique().tolist():
        if int((non_member_labels == label).sum()) < LEAST_NON_MEMBERS:
            raise ValueError(
                f"{2 * LEAST_NON_MEMBERS} public examples of label {label} are needed: provide more public data ([data] auxiliary)"
            )
