"""Candidates of a membership test, and how well the scores separate members from strangers: one row for each member.

A member's value is the share of strangers with the members' labels that score below it. The mean over members is the area
under the ROC curve; the share of members that all but 1 % of the strangers score below is the true-positive rate there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedgauge.attacks.measure import Case, Memories, Rows
from fedgauge.attacks.membership.scores import classes_of
from fedgauge.attacks.modality.membership import HELD, MEMBER, RATES
from fedgauge.attacks.score_rows import ScoreRecord, wrong_client
from fedgauge.client.data.batches import batch_of
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, concatenate


@dataclass(frozen=True, eq=False)
class MembershipTest:
    """The candidates of one wave: members of its batches, others of the clients' shards, and strangers.

    Args:
        most, held: strangers, and examples of each client's data, at most.
        clients: their batches are members; with those of the baseline wrong_client.
    """

    case: Case
    most: int
    held: int
    clients: tuple[int, ...]

    @cached_property
    def rows(self) -> Tensor:
        """(R,) the training examples among the candidates, which come before the strangers."""
        found: Tensor = torch.cat([rows(c) for c in self.clients for rows in (self._batch, self._held)]).unique()
        return found

    @cached_property
    def strangers(self) -> Batch:
        """Test examples, which no client holds."""
        data = self.case.fed.shards.dataset
        order = torch.randperm(len(data.y_test), generator=generator(self.case.fed.protocol.seed, "strangers"))
        return batch_of(data.x_test, data.y_test, order[: self.most])

    @cached_property
    def candidates(self) -> Batch:
        data = self.case.fed.shards.dataset
        return concatenate([batch_of(data.x, data.y, self.rows), self.strangers])

    @cached_property
    def _labels(self) -> Tensor:
        return classes_of(self.candidates)

    @property
    def graded(self) -> Tensor:
        """(N,) the candidates with a label of one of the batches: no other counts in `of_updates`."""
        members = torch.searchsorted(self.rows, torch.cat([self._batch(c) for c in self.clients]))
        return torch.isin(self._labels, self._labels[members])

    def _batch(self, client: int) -> Tensor:
        return self.case.fed.rows_at(client, self.case.wave.round)

    def _held(self, client: int) -> Tensor:
        """Rows of some examples of the data behind a client's updates, the same in every round."""
        found = []
        for member in self.case.fed.protocol.group(client):
            mine = self.case.fed.shards.indices[member]
            order = torch.randperm(len(mine), generator=generator(self.case.fed.protocol.seed, "held", member))
            found.append(mine[order[: self.held]])
        return torch.cat(found)

    def of_updates(self, scores: Tensor, clients: Sequence[int]) -> Rows:
        """By client, the rows of each update's scores (K, N) and, as a baseline, of these against another client's batch."""
        found = {}
        for own, client in zip(scores, clients, strict=True):
            rows = self._graded(own, client)
            if rows and (other := self.case.others.get(client)) is not None:
                rows += self._against(self._graded(own, other))
            if rows:
                found[client] = rows
        return found

    def _against(self, rows: list[ScoreRecord]) -> list[ScoreRecord]:
        return [replace(row, attack=wrong_client(row.attack)) for row in rows]

    def _graded(self, scores: Tensor, client: int) -> list[ScoreRecord]:
        batch, held = self._batch(client), self._held(client)
        own = torch.searchsorted(self.rows, batch)
        outside = torch.searchsorted(self.rows, held)
        # the label alone reveals an example whose label no member has
        outside = outside.where(~torch.isin(held, batch) & torch.isin(self._labels[outside], self._labels[own]), -1)
        rows = self._relative(MEMBER, scores, own, client)
        return rows + self._relative(HELD, scores, outside, client, self._labels[own])

    def over_rounds(self, scores: Tensor, clients: Sequence[int]) -> tuple[Rows, Memories]:
        """By client, the rows of its highest scores so far (K, N), those against another client's data, and what is remembered."""
        found, after = Rows(), Memories()
        strangers = -1 - torch.arange(len(self.strangers.y))
        now = torch.cat([self.rows, strangers])
        for own, client in zip(scores, clients, strict=True):
            known = self.case.memories.get(client, {"rows": now[:0], "best": own[:0]})
            rows, place = torch.cat([known["rows"], now]).unique(return_inverse=True)
            best = torch.full((len(rows),), -math.inf, dtype=own.dtype)
            best = best.scatter_reduce(0, place, torch.cat([known["best"], own]), "amax")
            highest = best[torch.searchsorted(rows, now)]
            own_rows = self._relative(HELD, highest, torch.searchsorted(self.rows, self._held(client)), client)
            # the other's examples have been scored against this client's updates for as long as the two are neighbours
            other = self.case.others.get(client)
            if other is not None and bool(torch.isin(self._held(other), known["rows"]).all()):
                theirs = torch.searchsorted(self.rows, self._held(other))
                own_rows += self._against(self._relative(HELD, highest, theirs, other))
            after[client] = {"rows": rows, "best": best}
            if own_rows:
                found[client] = own_rows
        return found, after

    def _relative(
        self, metric: str, scores: Tensor, positions: Tensor, client: int, labels: Tensor | None = None
    ) -> list[ScoreRecord]:
        """Return these candidates' scores relative to the strangers of their labels; a position below 0 is left out."""
        kept = torch.nonzero(positions >= 0).flatten()
        mine = positions[kept]
        chosen = torch.isin(self._labels[len(self.rows) :], self._labels[mine] if labels is None else labels)
        strangers = scores[len(self.rows) :][chosen]
        if not len(strangers):
            return []
        values = {metric: above(scores[mine], strangers)}
        for ending, rate in RATES.items():
            if len(strangers) + 1 >= round(1 / rate):
                values[metric + ending] = (exceeded_by(scores[mine], strangers) <= rate).double()
        return self.case.rows(client, {k: t.tolist() for k, t in values.items()}, kept.tolist())


def above(scores: Tensor, strangers: Tensor) -> Tensor:
    """(P,) float64, the share of strangers (S,) that each score exceeds, ties counting half."""
    lower, higher = (torch.searchsorted(strangers.sort().values, scores, right=right) for right in (False, True))
    return (lower + higher).double() / 2 / len(strangers)


def exceeded_by(scores: Tensor, strangers: Tensor) -> Tensor:
    """(P,) float64, the p-value of each score: at most this share of strangers scores as high (Vovk et al., 2005).

    Example:
        >>> exceeded_by(torch.tensor([0.95]), torch.tensor([0.1, 0.5, 0.9])).item()  # 1 / (3 + 1)
        0.25
    """
    lower = torch.searchsorted(strangers.sort().values, scores)
    return (1 + len(strangers) - lower).double() / (1 + len(strangers))
