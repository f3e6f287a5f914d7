"""Membership as a planned attack: it scores candidates against the updates instead of reconstructing examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.likelihood import RestOfBatch
from fedgauge.attacks.membership.scores import SCORES, Scoring, against_null, calibrated, classes_of
from fedgauge.attacks.modality.membership import LABELS_ALONE
from fedgauge.client.components import check_at_least
from fedgauge.client.update import Batch, concatenate


@dataclass(frozen=True)
class membership(Attack):
    """Tell by a score who was in the batch behind an update.

    Public examples of the candidate's label show how high a stranger scores.

    Args:
        score: likelihood_ratio (under the chain's own density, with the rest of the batch unknown), matched_filter, cosine,
            gradient_difference, fedmia and fedmia_loss (cosine or loss beside the other clients' updates), loss_change, loss
            (reads the weights alone) or label_frequency (reads nothing).
        strangers: examples that nobody trains on, among which false positives are counted; at most so many, at least 1.
        held: examples of each client's data, whether or not they are in its batch; at most so many, at least 0.
    """

    score: Literal[
        "likelihood_ratio",
        "matched_filter",
        "cosine",
        "gradient_difference",
        "fedmia",
        "fedmia_loss",
        "loss_change",
        "loss",
        "label_frequency",
    ] = "likelihood_ratio"
    strangers: int = 1000
    held: int = 40

    is_random: ClassVar[bool] = False
    scores_candidates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least(self, 1, "strangers")
        check_at_least(self, 0, "held")

    on_cpu = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        return not_applicable(wave, "it scores candidates and reconstructs nothing")

    def scores(self, wave: Wave, known: Knowledge, candidates: Batch) -> Tensor:
        """How much each candidate (N) seems to have been in the batch of each update (K): (K, N) float64.

        An update that is not finite, or for which a score is not, has no scores (NaN), and changes no other's.

        Raises:
            ValueError: a score needs what is not there: public examples of a label, or a gradient of one example.
        """
        if known.auxiliary is None:
            raise ValueError("who is a stranger is learned from public examples: set [data] auxiliary above 0")
        # beside whose scores a candidate's is put, and what the rest of a batch is like
        null, public = (Batch(*(t[i::2] for t in known.auxiliary)) for i in range(2))
        scored = CandidateGradients(known, wave.params, concatenate([candidates, null]))
        rest = None
        if self.score == "likelihood_ratio":
            rest = RestOfBatch.of_population(CandidateGradients(known, wave.params, public))
        finite = torch.stack([t.reshape(len(wave), -1).isfinite().all(1) for t in wave.update.values()]).all(0)
        found = torch.full((len(wave), len(scored)), torch.nan, dtype=torch.float64)
        if bool(finite.any()):
            found[finite] = SCORES[self.score](Scoring(scored, wave.of(finite.nonzero().flatten().tolist()), rest))
        found[~found.isfinite().all(1)] = torch.nan
        own, others = found[:, : len(candidates.y)], found[:, len(candidates.y) :]
        if self.score == LABELS_ALONE:
            return own
        compare = calibrated if self.score == "likelihood_ratio" else against_null
        return compare(own, classes_of(candidates), others, classes_of(null))


@dataclass(frozen=True)
class membership_over_rounds(membership):
    """Tell by the highest score over the rounds whom a client's data holds; the arguments are those of membership."""

    is_stateful: ClassVar[bool] = True
