"""Canaries: the excess of each one's direction, or the evidence that each canary example is in the data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgauge.attacks.learned.auxiliary import Auxiliary
from fedgauge.attacks.measure import Case, Measure, Memories, Rows
from fedgauge.attacks.membership.canary_epsilon import CANARY, cosines
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.likelihood import AT_ONCE, RestOfBatch, joint_ratios
from fedgauge.attacks.membership.one_run import EVIDENCE
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.client.data.batches import batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.rng import seed_of

SWEEPS, SETTLING = 400, 100  # of the Gibbs sampler, and how many of them come before the first that counts


@dataclass(frozen=True)
class Canaries(Measure):
    """A federation's noise measured by its canaries. A canary's number is its row's example.

    Args:
        clients: the updates, by their clients, that canaries are in.
        examples: canary examples of each of these; 0: a canary is a client that sends its direction.
    """

    clients: tuple[int, ...] = ()
    examples: int = 0

    role = "limit"

    @property
    def watched(self) -> Sequence[int]:
        return self.clients

    @property
    def metric(self) -> str:
        return EVIDENCE if self.examples else CANARY

    @property
    def needs_truth(self) -> bool:  # type: ignore[override]
        return self.examples > 0

    @property
    def takes_gradients(self) -> bool:
        return self.examples > 0

    def assumes(self, fed: Federation, batch: str) -> list[str]:
        count, data = len(fed.protocol.canary_clients), fed.shards
        if not self.examples:
            return [f"the directions of {count} canaries"]
        known = f"{count * self.examples} canary examples, but not which of them are among the data"
        return [batch, known, modality_of(data.dataset).auxiliary(Auxiliary(), len(data.auxiliary))]

    def measure(self, case: Case) -> tuple[Rows, Memories]:
        holders = case.fed.protocol.canary_clients
        rest = None
        if self.examples:
            rest = RestOfBatch.of_population(CandidateGradients(case.known, case.wave.params, case.known.public))
        found = Rows()
        for k, client in enumerate(case.wave.clients):
            members = [m for m in case.fed.protocol.group(client) if m in holders]
            if not members:
                found[client] = []
            elif all(bool(t[k].isfinite().all()) for t in case.wave.update.values()):
                try:
                    values = _directions(case, k, members) if rest is None else _evidence(case, k, rest, members)
                except ValueError:  # this client's update is zero, or too small for a likelihood
                    continue
                if bool(values.isfinite().all()):
                    each = case.fed.protocol.canary_examples
                    numbers = [holders.index(m) * each + i for m in members for i in range(each)] or members
                    found[client] = case.rows(client, {self.metric: values.tolist()}, numbers)
        return found, {}


def _directions(case: Case, k: int, members: Sequence[int]) -> Tensor:
    """Return each canary direction's component in an update, in standard deviations of chance, (N,)."""
    update = {name: t.double() for name, t in case.seen.alone(k).items()}
    found = cosines(update, map(case.fed.direction, members))
    # the tangent divides by the noise alone, without the canary's own part
    rest = (1 - found.square()).clamp_min(torch.finfo(found.dtype).eps)  # 0 where an update is nothing else
    return found / rest.sqrt() * math.sqrt(sum(t.numel() for t in update.values()) - 1)


def _evidence(case: Case, k: int, rest: RestOfBatch, members: Sequence[int]) -> Tensor:
    """The evidence (N,) that each canary example of these clients is among their data, from one update.

    The canaries of an update are judged together. A round's batch holds an example of the data with the chance q of its drawing:
    log(1 - q + q e^ratio), of the likelihood ratio of the batch. Rounds add up.
    """
    shards, seed, update = case.fed.shards, case.fed.protocol.seed, case.wave.of([k])
    rows = torch.cat([shards.canaries[m] for m in members])
    counts = torch.tensor([len(shards.canaries[m]) for m in members])
    drawn = torch.tensor([shards.batch_size / len(shards.indices[m]) for m in members]).repeat_interleave(counts)
    q, parts = drawn.double(), max(1, AT_ONCE // len(rest.mean))  # gradients that are held at once
    ratios = []
    for block, (some, share) in enumerate(zip(rows.split(parts), (q / 2).split(parts), strict=True)):
        candidates = CandidateGradients(case.known, update.params, batch_of(shards.dataset.x, shards.dataset.y, some))
        unknown = max(0.0, case.known.batch_size - float(share.sum()))
        rng = seed_of(seed, "canaries together", update.round, update.clients[0], block)
        ratios.append(marginal_ratios(*joint_ratios(candidates, update, rest, unknown), share, rng))
    return torch.logaddexp((-q).log1p(), q.log() + torch.cat(ratios))


def marginal_ratios(linear: Tensor, square: Tensor, share: Tensor, seed: int) -> Tensor:
    """log p(seen | in the batch) - log p(seen | not) of each candidate, the others being as probable as the update makes them.

    Args:
        linear, square: (N,) and (N, N) of fedgauge.attacks.membership.likelihood.joint_ratios.
        share: (N,) how probable each is in the batch beforehand, above 0 and below 1.
        seed: of the sampler.

    Each one's conditional probability is averaged over a Gibbs sampler's draws of the others. (N,) float64, without a number where
    the update is none.
    """
    if not (linear.isfinite().all() and square.isfinite().all()):
        return torch.full_like(linear, torch.nan)
    rng, before = np.random.default_rng(seed), share.double().numpy()
    prior = np.log(before) - np.log1p(-before)
    pairs = square.numpy().copy()
    alone = linear.numpy() - pairs.diagonal() / 2 + prior
    np.fill_diagonal(pairs, 0.0)
    here = (rng.random(len(alone)) < before).astype(float)
    odds = alone - pairs @ here
    inside, outside = np.full(len(alone), -np.inf), np.full(len(alone), -np.inf)
    for sweep in range(SWEEPS):
        for i in rng.permutation(len(alone)):
            drawn = float(np.log(rng.random()) < -np.logaddexp(0.0, -odds[i]))
            if drawn != here[i]:
                odds -= pairs[:, i] * (drawn - here[i])
                here[i] = drawn
        if sweep >= SETTLING:
            inside = np.logaddexp(inside, -np.logaddexp(0.0, -odds))
            outside = np.logaddexp(outside, -np.logaddexp(0.0, odds))
    return torch.from_numpy(inside - outside - prior)
