"""Membership as a planned attack: it scores candidates against the updates instead of reconstructing examples."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge, Role, Wave
from fedgauge.attacks.measure import Case, Measure, Memories, Rows
from fedgauge.attacks.membership.candidates import MembershipTest
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.likelihood import RestOfBatch
from fedgauge.attacks.membership.limit import detectability, pair_area, power
from fedgauge.attacks.membership.scores import (
    SCORES,
    Scoring,
    against_non_members,
    calibrated,
    check_non_members,
    classes_of,
)
from fedgauge.attacks.modality.membership import GUESSES, HELD, LABELS_ALONE, MEMBER, RATES
from fedgauge.client.components import Count, Natural
from fedgauge.client.federation import Federation
from fedgauge.client.update import Batch, concatenate


@dataclass(frozen=True)
class membership(Measure):
    """Batch membership: score candidates against an update.

    Public examples of the candidate's label show how high a stranger scores.

    Args:
        score: likelihood_ratio (under the chain's own density, with the rest of the batch unknown), matched_filter, cosine,
            gradient_difference, fedmia and fedmia_loss (cosine or loss relative to the other clients' updates), loss_change, loss
            (reads only the weights) or label_frequency (reads nothing).
        strangers: examples outside all training sets, among which false positives are counted; at most so many, at least 1.
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
    strangers: Count = 1000
    held: Natural = 40

    @property
    def role(self) -> Role:
        return "baseline" if self.score in GUESSES else "attack"

    @property
    def metric(self) -> str:
        return HELD if self.is_stateful else MEMBER

    def measure(self, case: Case) -> tuple[Rows, Memories]:
        """Score the candidates against each update of a wave; a client with an infinite or NaN score gets no rows."""
        wave = case.wave
        test = MembershipTest(case, self.strangers, self.held, (*wave.clients, *case.others.values()))
        asked = torch.ones_like(test.graded) if self.is_stateful else test.graded
        scores = torch.zeros(len(wave), len(asked), dtype=torch.float64)
        scores[:, asked] = self.scores(wave, case.known, Batch(*(t[asked] for t in test.candidates)))
        scored = [k for k, own in enumerate(scores) if bool(own.isfinite().all())]
        if not scored:
            return {}, {}
        tested = scores[scored], [wave.clients[k] for k in scored]
        return test.over_rounds(*tested) if self.is_stateful else (test.of_updates(*tested), {})

    def scores(self, wave: Wave, known: Knowledge, candidates: Batch) -> Tensor:
        """Return the membership score of each candidate (N) in each update's batch (K): (K, N) float64.

        An update with a non-finite value or score gets NaN scores; other updates are unaffected.

        Raises:
            ValueError: a score needs what is not there: public examples of a label, or a gradient of one example.
        """
        # one half shows how strangers score, the other the rest of a batch
        non_members, public = (Batch(*(t[i::2] for t in known.public)) for i in range(2))
        same = torch.isin(classes_of(non_members), classes_of(candidates))
        non_members = Batch(*(t[same] for t in non_members))
        scored = CandidateGradients(known, wave.params, concatenate([candidates, non_members]))
        if self.score != LABELS_ALONE:
            check_non_members(classes_of(candidates), classes_of(non_members))  # before the gradients, which take long
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
        compare = calibrated if self.score == "likelihood_ratio" else against_non_members
        return compare(own, classes_of(candidates), others, classes_of(non_members))


@dataclass(frozen=True)
class membership_over_rounds(membership):
    """Dataset membership: score each candidate by its maximum over all rounds; arguments as of membership."""

    is_stateful: ClassVar[bool] = True


@dataclass(frozen=True)
class MembershipLimit(Measure):
    """Limit of any membership test on one update under normal noise."""

    metric = MEMBER
    role = "limit"

    def assumes(self, fed: Federation, batch: str) -> list[str]:
        return [batch, "the rest of the batch known, and the candidates"]

    def measure(self, case: Case) -> tuple[Rows, Memories]:
        found, usual = Rows(), membership()
        public = MembershipTest(case, usual.strangers, usual.held, case.wave.clients).strangers
        labels = classes_of(public)
        for client in case.wave.clients:
            batch = case.fed.batch_at(client, case.wave.round)
            same = torch.isin(labels, classes_of(batch))
            strangers = Batch(public.x[same], public.y[same])
            members = CandidateGradients(case.known, case.wave.params, batch)
            values = {MEMBER: pair_area(members, CandidateGradients(case.known, case.wave.params, strangers)).tolist()}
            mus = detectability(members).tolist()
            values |= {MEMBER + ending: [power(rate, mu) for mu in mus] for ending, rate in RATES.items()}
            found[client] = case.rows(client, values, range(len(mus)))
        return found, {}
