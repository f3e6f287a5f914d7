"""Who is a candidate, and how well the scores tell members from strangers: one row for each member.

A member's value is the share of strangers with the members' labels that score below it. The mean over members is the area
under the ROC curve; the share of members that all but 1 % of the strangers score below is the true-positive rate there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from fedgauge.attacks.base import ClientState, Knowledge, Wave
from fedgauge.attacks.grading.one_run import EVIDENCE
from fedgauge.attacks.grading.scores import ScoreRecord, wrong_client
from fedgauge.attacks.membership.attack import membership
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.joint import marginal_ratios
from fedgauge.attacks.membership.likelihood import AT_ONCE, RestOfBatch, joint_ratios
from fedgauge.attacks.membership.limit import detectability, pair_area, power
from fedgauge.attacks.membership.scores import classes_of
from fedgauge.attacks.modality.membership import ANYBODY, HELD, MEMBER, RATES
from fedgauge.attacks.plan import CANARIES, PlannedAttack
from fedgauge.client.data.images import batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator, seed_of
from fedgauge.client.update import Batch, concatenate


@dataclass(frozen=True, eq=False)
class MembershipTest:
    """The candidates of one wave: members of its batches, others of the clients' shards, and strangers.

    Args:
        round: of the wave.
        clients: whose batches are members; with those of the baseline wrong_client.

    Raises:
        ValueError: there are no strangers.
    """

    fed: Federation
    attack: membership
    round: int
    clients: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.strangers.y):
            raise ValueError("strangers are examples of the test part, and [data] has none: give it one")

    @cached_property
    def rows(self) -> Tensor:
        """(R,) the training examples among the candidates, which come before the strangers."""
        found: Tensor = torch.cat([rows(c) for c in self.clients for rows in (self._batch, self._held)]).unique()
        return found

    @cached_property
    def strangers(self) -> Batch:
        """Test examples, which no client holds."""
        data = self.fed.shards.dataset
        order = torch.randperm(len(data.y_test), generator=generator(self.fed.protocol.seed, "strangers"))
        return batch_of(data.x_test, data.y_test, order[: self.attack.strangers])

    @cached_property
    def candidates(self) -> Batch:
        """All of them; nothing tells which are members."""
        data = self.fed.shards.dataset
        return concatenate([batch_of(data.x, data.y, self.rows), self.strangers])

    @cached_property
    def _labels(self) -> Tensor:
        return classes_of(self.candidates)

    def _batch(self, client: int) -> Tensor:
        """Rows of the examples behind a client's update."""
        return self.fed.rows_at(client, self.round)

    def _held(self, client: int) -> Tensor:
        """Rows of some examples of the data behind a client's updates, the same in every round."""
        found = []
        for member in self.fed.protocol.members(client, self.round):
            mine = self.fed.shards.indices[member]
            order = torch.randperm(len(mine), generator=generator(self.fed.protocol.seed, "held", member))
            found.append(mine[order[: self.attack.held]])
        return torch.cat(found)

    def of_updates(
        self, scores: Tensor, name: str, clients: Sequence[int], others: Mapping[int, int]
    ) -> dict[int, list[ScoreRecord]]:
        """By client, the rows of each update's scores (K, N) and, as a baseline, of the same scores against another client's batch.

        Of several updates, also those of the highest score over all of them: whether a member is in anybody's batch.
        """
        found, highest = {}, scores.max(0).values
        for own, client in zip(scores, clients, strict=True):
            rows = self._graded(own, name, client)
            if len(scores) > 1:
                rows += self._told(ANYBODY, highest, torch.searchsorted(self.rows, self._batch(client)), name, client)
            if (other := others.get(client)) is not None:
                rows += self._graded(own, wrong_client(name), other)
            found[client] = rows
        return found

    def _graded(self, scores: Tensor, name: str, client: int) -> list[ScoreRecord]:
        batch, held = self._batch(client), self._held(client)
        own = torch.searchsorted(self.rows, batch)
        outside = torch.searchsorted(self.rows, held)
        # a label of none in the batch is told by the label alone
        outside = outside.where(~torch.isin(held, batch) & torch.isin(self._labels[outside], self._labels[own]), -1)
        rows = self._told(MEMBER, scores, own, name, client)
        return rows + self._told(HELD, scores, outside, name, client, self._labels[own])

    def over_rounds(
        self,
        scores: Tensor,
        name: str,
        clients: Sequence[int],
        others: Mapping[int, int],
        memories: Mapping[int, ClientState],
    ) -> tuple[dict[int, list[ScoreRecord]], dict[int, ClientState]]:
        """By client, the rows of its highest scores so far, those against another client's data, and what is remembered.

        Args:
            scores: (K, N) of this round's updates.
        """
        found, after = dict[int, list[ScoreRecord]](), dict[int, ClientState]()
        strangers = -1 - torch.arange(len(self.strangers.y))
        now = torch.cat([self.rows, strangers])
        for own, client in zip(scores, clients, strict=True):
            known = memories.get(client, {"rows": now[:0], "best": own[:0]})
            rows, place = torch.cat([known["rows"], now]).unique(return_inverse=True)
            best = torch.full((len(rows),), -math.inf, dtype=own.dtype)
            best = best.scatter_reduce(0, place, torch.cat([known["best"], own]), "amax")
            highest = best[torch.searchsorted(rows, now)]
            told = self._told(HELD, highest, torch.searchsorted(self.rows, self._held(client)), name, client)
            # the other's examples have been scored against this client's updates for as long as the two are neighbours
            if (other := others.get(client)) is not None and bool(torch.isin(self._held(other), known["rows"]).all()):
                theirs = torch.searchsorted(self.rows, self._held(other))
                told += self._told(HELD, highest, theirs, wrong_client(name), other)
            found[client], after[client] = told, {"rows": rows, "best": best}
        return found, after

    def _told(
        self, metric: str, scores: Tensor, positions: Tensor, name: str, client: int, labels: Tensor | None = None
    ) -> list[ScoreRecord]:
        """How far these candidates score above the strangers of the labels; a position below 0 is left out."""
        kept = torch.nonzero(positions >= 0).flatten()
        mine = positions[kept]
        chosen = torch.isin(self._labels[len(self.rows) :], self._labels[mine] if labels is None else labels)
        strangers = scores[len(self.rows) :][chosen]
        values = {metric: above(scores[mine], strangers)}
        for ending, rate in RATES.items():
            if len(strangers) + 1 >= round(1 / rate):
                values[metric + ending] = (exceeded_by(scores[mine], strangers) <= rate).double()
        return _records({k: t.tolist() for k, t in values.items()}, kept.tolist(), self.round, client, name)

    def limits(self, known: Knowledge, wave: Wave, name: str) -> dict[int, list[ScoreRecord]]:
        """By client, the rows of what the noise of one update allows, where it is normal.

        Raises:
            ValueError: the noise is another, or examples have no gradients of their own.
        """
        found, labels = {}, classes_of(self.strangers)
        for client in wave.clients:
            batch = self.fed.batch_at(client, self.round)
            same = torch.isin(labels, classes_of(batch))
            strangers = Batch(self.strangers.x[same], self.strangers.y[same])
            members = CandidateGradients(known, wave.params, batch)
            values = {MEMBER: pair_area(members, CandidateGradients(known, wave.params, strangers)).tolist()}
            mus = detectability(members).tolist()
            values |= {MEMBER + ending: [power(rate, mu) for mu in mus] for ending, rate in RATES.items()}
            found[client] = _records(values, range(len(mus)), self.round, client, name)
        return found


def tell_members(
    fed: Federation,
    planned: PlannedAttack,
    known: Knowledge,
    wave: Wave,
    others: Mapping[int, int],
    memories: Mapping[int, ClientState],
) -> tuple[dict[int, list[ScoreRecord]], dict[int, ClientState]]:
    """By client, the rows of a wave's updates under a planned test, its limit or that of canary examples, and what is remembered.

    A client has no rows if its update makes its scores infinite or no number.

    Raises:
        ValueError: nobody can tell, for the reason that the message says.
    """
    if planned.name == CANARIES:
        return _canaries(fed, known, wave), {}
    if planned.is_limit:
        return MembershipTest(fed, membership(), wave.round, wave.clients).limits(known, wave, planned.name), {}
    attack = cast(membership, planned.build())
    if attack.is_stateful and fed.protocol.secure_sum is not None and fed.protocol.secure_sum.drawn:
        raise ValueError("groups are drawn anew in each round, so that no sum is of the same clients again")
    test = MembershipTest(fed, attack, wave.round, (*wave.clients, *others.values()))
    scores = attack.scores(wave, known, test.candidates)
    scored = [k for k, own in enumerate(scores) if bool(own.isfinite().all())]
    if not scored:
        return {}, {}
    scores, clients = scores[scored], [wave.clients[k] for k in scored]
    if attack.is_stateful:
        return test.over_rounds(scores, planned.name, clients, others, memories)
    return test.of_updates(scores, planned.name, clients, others), {}


def _canaries(fed: Federation, known: Knowledge, wave: Wave) -> dict[int, list[ScoreRecord]]:
    """By client, the evidence that each canary example of those behind its update is among their data.

    The canaries of an update are judged together. A round's batch holds an example of the data with the chance q of its drawing:
    log(1 - q + q e^ratio), of the likelihood ratio of the batch. Rounds add up. A canary's number is the row's example.

    Raises:
        ValueError: no update has a likelihood, for the reason that the message says.
    """
    if known.auxiliary is None:
        raise ValueError("the rest of a batch is learned from public examples: set [data] auxiliary above 0")
    holders, each = fed.protocol.canary_clients, fed.protocol.canary_examples
    rest = RestOfBatch.of_population(CandidateGradients(known, wave.params, known.auxiliary))
    found, failure = dict[int, list[ScoreRecord]](), None
    for k, client in enumerate(wave.clients):
        members = [m for m in fed.protocol.members(client, wave.round) if m in holders]
        if not members:
            found[client] = []
            continue
        if not all(bool(t[k].isfinite().all()) for t in wave.update.values()):
            continue
        try:
            told = _canaries_of(fed, known, wave.of([k]), rest, members)
        except ValueError as error:  # of this client's update
            failure = error
            continue
        if bool(told.isfinite().all()):
            numbers = [holders.index(m) * each + i for m in members for i in range(each)]
            found[client] = _records({EVIDENCE: told.tolist()}, numbers, wave.round, client, CANARIES)
    if failure is not None and not any(found.values()):
        raise failure
    return found


def _canaries_of(fed: Federation, known: Knowledge, update: Wave, rest: RestOfBatch, members: Sequence[int]) -> Tensor:
    """The evidence (N,) of these clients' canaries in one update."""
    shards = fed.shards
    rows = torch.cat([shards.canaries[m] for m in members])
    drawn = torch.cat(
        [torch.full((len(shards.canaries[m]),), shards.batch_size / len(shards.indices[m])) for m in members]
    )
    q, parts = drawn.double(), max(1, AT_ONCE // len(rest.mean))  # gradients that are held at once
    ratios = []
    for block, (some, share) in enumerate(zip(rows.split(parts), (q / 2).split(parts), strict=True)):
        candidates = CandidateGradients(known, update.params, batch_of(shards.dataset.x, shards.dataset.y, some))
        unknown = max(0.0, known.batch_size - float(share.sum()))
        seed = seed_of(fed.protocol.seed, "canaries together", update.round, update.clients[0], block)
        ratios.append(marginal_ratios(*joint_ratios(candidates, update, rest, unknown), share, seed))
    return torch.logaddexp((-q).log1p(), q.log() + torch.cat(ratios))


def _records(
    values: Mapping[str, Sequence[float]], examples: Sequence[int], round: int, client: int, name: str
) -> list[ScoreRecord]:
    return [
        ScoreRecord(round, client, name, example, metric, value, "converged", 0.0)
        for metric, column in values.items()
        for example, value in zip(examples, column, strict=True)
    ]


def above(scores: Tensor, strangers: Tensor) -> Tensor:
    """(P,) float64, the share of strangers (S,) that each score exceeds, ties counting half."""
    if not len(strangers):
        raise ValueError("no stranger has a label of the members: raise strangers, or give more test data")
    lower, higher = (torch.searchsorted(strangers.sort().values, scores, right=right) for right in (False, True))
    return (lower + higher).double() / 2 / len(strangers)


def exceeded_by(scores: Tensor, strangers: Tensor) -> Tensor:
    """(P,) float64, the p-value of each score: at most this share of strangers scores as high (Vovk et al., 2005)."""
    lower = torch.searchsorted(strangers.sort().values, scores)
    return (1 + len(strangers) - lower).double() / (1 + len(strangers))
