"""What the benchmark's tables share: rows that processes compute, scores of one round's updates, and the figures of a test."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor

from fedgauge.attacks.base import Knowledge, Observation, Wave
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.likelihood import RestOfBatch
from fedgauge.attacks.membership.scores import Scoring
from fedgauge.client.data.images import batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.update import Batch, concatenate
from fedgauge.simulations.benchmarks.membership.roc import Estimate, ScoredCandidates
from fedgauge.simulations.benchmarks.reporting import Figure, Progress
from fedgauge.simulations.run.honest_rounds import HonestRound

RATE = 0.01  # of false positives
Made = TypeVar("Made")
Told = tuple[Tensor, Tensor, Tensor]  # scores of members, of others, and the number of their client


def in_processes(measure: Callable[..., Made], work: Sequence[tuple[Any, ...]], progress: Progress) -> list[Made]:
    """The results for each tuple of arguments, in order."""
    made = []
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for one in pool.map(measure, *zip(*work, strict=True)):
            made.append(one)
            progress(len(made), len(work))
    return made


class HeldGradients(CandidateGradients):
    """Gradients that are formed once, where several scores read them."""

    @cached_property
    def _held(self) -> tuple[Tensor, ...]:
        return tuple(super().rows())

    def rows(self) -> Iterator[Tensor]:
        """As of candidates whose gradients are formed anew each time."""
        return iter(self._held)


def scoring(known: Knowledge, now: HonestRound, candidates: Batch, population: Batch) -> Scoring:
    """Candidates beside all clients' updates of a round; public examples stand for the unknown rest of a batch."""
    clients = range(now.federation.protocol.clients)
    updates = [now.federation.client_update(now.params, now.buffers, c, now.round) for c in clients]
    wave = Wave.stack([Observation(now.round, c, now.params, u) for c, u in zip(clients, updates, strict=True)])
    rest = RestOfBatch.of_population(HeldGradients(known, now.params, population))
    return Scoring(HeldGradients(known, now.params, candidates), wave, rest)


@dataclass(frozen=True, eq=False)
class Candidates:
    """Images of each client's data, then test images, of one row and seed.

    Args:
        owners: (N,) the client that holds a candidate; the number of clients: nobody does.
        clients: (K,) clusters: one for each seed and client.
        alike: (K, N) the candidates that a client's are compared with.
    """

    images: Batch
    owners: Tensor
    clients: Tensor
    alike: Tensor

    @classmethod
    def of(cls, fed: Federation, each: int, strangers: int, same_label: bool) -> "Candidates":
        """So many of each client's, and test images.

        Args:
            same_label: a client's are compared only with those of its labels.
        """
        data, indices, count = fed.shards.dataset, fed.shards.indices, fed.protocol.clients
        members = batch_of(data.x, data.y, torch.cat([mine[:each] for mine in indices]))
        images = concatenate([members, batch_of(data.x_test, data.y_test, torch.arange(strangers))])
        owners = torch.cat([torch.arange(count).repeat_interleave(each), torch.full((strangers,), count)])
        alike = [torch.isin(images.y, data.y[mine]) | (not same_label) for mine in indices]
        return cls(images, owners, fed.protocol.seed * count + torch.arange(count), torch.stack(alike))

    def told(self, scores: Tensor, others: bool = False) -> Iterator[Told]:
        """Scores (K, N) of each client's own images beside the test images', or beside the other clients' images."""
        for k, own in enumerate(scores):
            held = self.owners == k
            rest = ~held & (self.owners < len(scores)) if others else self.owners == len(scores)
            yield own[held], own[rest & self.alike[k]], self.clients[k]


def pooled(parts: Iterable[Told]) -> ScoredCandidates:
    """Scores of members and of others from several updates, each with its client's number."""
    members, others, clients = zip(*parts, strict=True)
    numbers = torch.stack(clients)
    return ScoredCandidates(
        torch.cat(members),
        numbers.repeat_interleave(torch.tensor([len(some) for some in members])),
        torch.cat(others),
        numbers.repeat_interleave(torch.tensor([len(some) for some in others])),
    )


def numbers(estimate: Estimate) -> list[float | None]:
    """Value, low and high of an estimate, rounded."""
    return [None if v is None else round(v, 4) for v in (estimate.value, estimate.low, estimate.high)]


def rates(found: ScoredCandidates, rng: Callable[[str], Generator]) -> tuple[dict[str, object], Estimate, Estimate]:
    """A record of a test, its area under the ROC curve, and the true positives at 1 % false positives."""
    auc, hits = found.auc(rng("auc")), found.true_positives(RATE, rng("hits"))
    rare = found.true_positives(RATE / 10, rng("rare"))
    counts = {"n": len(found.members), "negatives": len(found.others)}
    shown = {"auc": numbers(auc), "tpr_at_1_percent": numbers(hits), "tpr_at_0.1_percent": numbers(rare)}
    return {**counts, **shown}, auc, hits


def figure(name: str, record: Mapping[str, object], auc: Estimate, hits: Estimate) -> Figure:
    """The area of a test, with its interval and true positives."""
    note = f"{auc.low:.3f} to {auc.high:.3f}, n = {record['n']}; TPR at 1 % FPR {hits.value:.2f}"
    return Figure(name, auc.value, "AUC", note=note)
