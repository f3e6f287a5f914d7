"""The audit of a wave: attack first, and only then fetch the truth and grade."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch

from fedgauge.attacks.base import (
    ClientState,
    Knowledge,
    Reconstruction,
    Status,
    Stream,
    Wave,
    not_applicable,
)
from fedgauge.attacks.candidate_bound import candidate_bound
from fedgauge.attacks.defense_inference.evidence import Inferred
from fedgauge.attacks.defense_inference.infer import infer
from fedgauge.attacks.engine.devices import CPU
from fedgauge.attacks.gaussian_prior import ClassPrior, class_priors
from fedgauge.attacks.grading.canary import CANARY, cosines
from fedgauge.attacks.grading.membership import tell_members
from fedgauge.attacks.grading.one_run import EVIDENCE
from fedgauge.attacks.grading.scores import WHOLE_BATCH, Grader, ScoreRecord, has_images, ungraded_rows, wrong_client
from fedgauge.attacks.grading.tuning import Tuning
from fedgauge.attacks.limits import bayes_limit
from fedgauge.attacks.modality.base import Modality
from fedgauge.attacks.modality.image_metrics import mse
from fedgauge.attacks.modality.membership import MEMBER
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import CANARIES, CANDIDATE_BOUND, MEMBERSHIP_LIMIT, PlannedAttack
from fedgauge.attacks.threat_model import (
    as_known,
    blurred_pull,
    chosen_auxiliary,
    needs_truth,
    public_knowledge,
    waves_known_alike,
    with_given_truth,
)
from fedgauge.client.chain import Chain
from fedgauge.client.federation import Federation
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch

NO_TRUTH = 'labels = "given" needs the true labels, which the server of a deployment does not have: use "restored"'
NO_MEMBERS = (
    "the batches are not here: who owns the data hands them in by fedgauge audit RUN --truth FOLDER, or simulates"
)
NOT_FINITE = "scores are not finite, as the update is not, or makes the model fail, or the weights are too large"
Truth = Callable[[int, int], Batch]  # (client, round) -> the private batch


@dataclass(frozen=True, eq=False)
class AuditResult:
    """The result for one observation: the reconstruction, in the truth's order where there is a truth, and its score rows.

    memory: what a stateful attack remembers of the client from now on; it does not depend on the truth's order.
    """

    client: int
    reconstruction: Reconstruction
    rows: tuple[ScoreRecord, ...]
    memory: ClientState | None = None


@dataclass(frozen=True, eq=False)
class Auditor:
    """Attacks waves of one federation and grades the results.

    Args:
        federation: gives the attacker its public knowledge and, in a simulation, the grader its truth.
        seed: of the attacker's randomness.
        blind: there is no truth, as in a deployment: rows hold the attack's own objective, or say that nothing can be graded.
        device: where attacks run; waves come from the CPU, and results are graded there.
    """

    federation: Federation
    seed: int = 0
    blind: bool = False
    device: torch.device = CPU

    labels_in_order: ClassVar[bool] = False  # given labels are sorted, unless a paper gives them in the client's order

    @cached_property
    def _moved(self) -> Federation:
        """The federation whose model is on the device."""
        return self.federation if self.device == CPU else self.federation.on(self.device)

    @cached_property
    def auxiliary(self) -> Batch:
        """The public examples: the attacker's knowledge of the distribution, and the gallery of identification."""
        return self.federation.shards.auxiliary_batch()

    @cached_property
    def modality(self) -> Modality:
        """The kind of this federation's data."""
        return modality_of(self.federation.shards.dataset)

    @cached_property
    def grader(self) -> Grader:
        """Pairs and measures reconstructions of this federation's data."""
        return Grader(self.modality, self.auxiliary.x)

    @cached_property
    def priors(self) -> tuple[ClassPrior, ...]:
        """The Gaussian priors of the limit, fitted to the auxiliary images of each class."""
        return class_priors(self.auxiliary)

    # ------------------------------------------------------------------------------------------ what the attacker knows

    def knowledge(
        self,
        planned: PlannedAttack,
        members: int | None = None,
        inferred: Inferred | None = None,
        fed: Federation | None = None,
    ) -> Knowledge:
        """The threat model of a planned attack.

        Args:
            members: clients whose updates are seen as one, under a secure sum; default: a whole group.
            inferred: the defense, where the plan leaves it to the attacker to infer it from the updates.
            fed: the federation on the device where the attack runs; default: on the CPU.
        """
        fed = fed or self.federation
        chain = fed.chain if planned.defense == "known" else Chain((fed.chain.local,))
        if planned.defense == "inferred":
            if inferred is None:
                raise ValueError(f"{planned.name}: a defense is inferred from updates: call infer_defense(wave) first")
            chain = inferred.chain
        return public_knowledge(fed, self.auxiliary_of(planned), chain, members)

    def auxiliary_of(self, planned: PlannedAttack) -> Batch:
        """The public examples that a planned attack has, with those that it makes up."""
        return chosen_auxiliary(planned, self.auxiliary, self.federation.shards.dataset.classes, self.seed)

    def infer_defense(self, wave: Wave, members: int = 1) -> Inferred:
        """What a wave's updates reveal of the chain to an attacker who knows the local training alone."""
        fed = self.federation
        if self.modality.hides_defense:
            raise ValueError(self.modality.hides_defense)
        if not is_cross_entropy(fed.loss):
            raise ValueError("a defense is inferred from a cross-entropy's zeros, and [loss] names another loss")
        return infer(wave, fed.model, fed.chain.local, fed.shards.batch_size, members)

    def stream(self, planned: PlannedAttack, round: int, client: int) -> Stream:
        """The attacker's randomness for one observation."""
        return partial(generator, self.seed, "attack", planned.name, round, client)

    # -------------------------------------------------------------------------------------------------------- the audit

    def audit(
        self,
        planned: PlannedAttack,
        wave: Wave,
        others: Mapping[int, int] | None = None,
        truth: Truth | None = None,
        memories: Mapping[int, ClientState] | None = None,
    ) -> list[AuditResult]:
        """Attack a wave, then grade it.

        Args:
            others: for a client, another one of the same round: the reconstruction is also graded against that one's truth,
                as the baseline wrong_client(attack) of that client.
            truth: default: the simulation's own.
            memories: by client, what a stateful attack remembers of it; clients that it never met are absent.
        """
        members = [len(self.federation.protocol.members(client, wave.round)) for client in wave.clients]
        if len(set(members)) > 1:  # secure sums of several sizes
            parts = [wave.of([k for k, m in enumerate(members) if m == size]) for size in sorted(set(members))]
            each = {a.client: a for part in parts for a in self.audit(planned, part, others, truth, memories)}
            return [each[client] for client in wave.clients]
        fed = self.federation
        if len(parts := waves_known_alike(fed.model, fed.chain, fed.shards.batch_size, wave)) > 1:
            return [a for part in parts for a in self.audit(planned, part, others, truth, memories)]
        of_canaries = planned.name == CANARIES and self.federation.protocol.canary_examples > 0
        if planned.name == MEMBERSHIP_LIMIT or planned.tells_members or of_canaries:
            return self._membership(planned, wave, members[0], others or {}, memories or {})
        if planned.name == CANARIES:
            return self._canaries(planned, wave)
        if planned.is_limit:
            return self._limit(planned, wave, members[0])
        attacked = self.attack(planned, wave, members[0], truth, memories or {})
        audited = []
        for client, (result, memory) in zip(wave.clients, attacked, strict=True):
            other = None if planned.is_baseline else (others or {}).get(client)
            if other is not None and not self.federation.protocol.alike(client, other, wave.round):
                other = None
            if self.blind:
                examples = members[0] * self.federation.shards.batch_size
                rows = ungraded_rows(
                    planned.name, wave.round, client, result, examples, other, self.modality.main.metric
                )
            else:
                result, rows = self.grade(planned.name, wave, client, result, other, truth)
            audited.append(AuditResult(client, result, tuple(rows), memory))
        return audited

    def attack(
        self,
        planned: PlannedAttack,
        wave: Wave,
        members: int,
        truth: Truth | None = None,
        memories: Mapping[int, ClientState] = {},
    ) -> list[tuple[Reconstruction, ClientState | None]]:
        """Each client's reconstruction, and what a stateful attack remembers of it.

        Args:
            members: clients whose updates are seen as one.
            truth, memories: as for `audit`; the attack gets of the truth what its threat model gives it and no more.
        """
        inferred = self.infer_defense(wave, members) if planned.defense == "inferred" else None
        if self.blind and planned.is_baseline:
            planned = replace(planned, labels="restored")
        attack = planned.build()
        device, fed = (CPU, self.federation) if attack.on_cpu else (self.device, self._moved)
        known = self.knowledge(planned, members, inferred, fed)
        private = [(truth or self._truth)(c, wave.round) for c in wave.clients] if needs_truth(planned) else []
        known = with_given_truth(planned, known, private, self.labels_in_order)
        if device != CPU:
            known, wave = known.to(device), wave.to(device)
            memories = {client: _on(memory, device) for client, memory in memories.items()}
        known, wave = as_known(known, wave)
        fed.load_buffers(wave.buffers)
        streams = [self.stream(planned, wave.round, client) for client in wave.clients]
        started = time.perf_counter()
        if blurred := blurred_pull(known, attack):
            return [
                (result, memories.get(c)) for c, result in zip(wave.clients, not_applicable(wave, blurred), strict=True)
            ]
        tuned = ""
        if planned.tune == "shadow":
            observations = len(self.federation.protocol.groups(wave.round))
            tuning = Tuning(self.modality, planned.budget, observations, self.seed, wave.round)
            try:
                found = tuning.of(attack, known, wave)
                attack, tuned = found.attack, found.words
            except ValueError as error:
                tuned = f"not tuned: {error}"
        before = [memories.get(client, attack.initial()) for client in wave.clients]
        reconstructions, after = attack.advance(wave, known, planned.budget, streams, before)
        expected = (known.batch_size, *known.shape)
        for shape in (tuple(result.x.shape) for result in reconstructions if result.x is not None):
            if shape != expected:
                raise ValueError(f"the attack must return a whole batch, {expected}, and returned {shape}")
        if known.mean:  # pixels of the truth lie in [0, 1], and a client that grades at home takes no others
            reconstructions = [
                replace(r, x=r.x.clamp(0, 1)) if r.x is not None and has_images(r.x) else r for r in reconstructions
            ]
        remembered = list[ClientState | None](after) if attack.is_stateful else [None] * len(wave)
        if device != CPU:
            reconstructions = [result.to(CPU) for result in reconstructions]
            remembered = [None if memory is None else _on(memory, CPU) for memory in remembered]
        seconds = (time.perf_counter() - started) / len(wave)
        note = f"chain inferred: {inferred}: {inferred.evidence}" if inferred is not None else ""
        return [
            (replace(result, seconds=seconds, reason="; ".join(filter(None, (note, tuned, result.reason)))), memory)
            for result, memory in zip(reconstructions, remembered, strict=True)
        ]

    def grade(
        self,
        attack: str,
        wave: Wave,
        client: int,
        result: Reconstruction,
        other: int | None = None,
        truth: Truth | None = None,
    ) -> tuple[Reconstruction, list[ScoreRecord]]:
        """The reconstruction in the truth's order, with rows against its client's truth and against another client's."""
        fed, round = self.federation, wave.round
        augmented = fed.trained_on(wave.params, wave.buffers, client, round) if truth is None else None
        truth = truth or self._truth
        paired, rows, _ = self.grader.grade(attack, round, client, result, truth(client, round), augmented)
        if other is not None:
            unlabelled = replace(result, y=None)
            rows += self.grader.grade(wrong_client(attack), round, other, unlabelled, truth(other, round))[1]
        return paired, rows

    def _membership(
        self,
        planned: PlannedAttack,
        wave: Wave,
        members: int,
        others: Mapping[int, int],
        memories: Mapping[int, ClientState],
    ) -> list[AuditResult]:
        """Scores of candidates, then who was a member; of the limit, how well any test can tell; evidence of canary examples."""
        started, fed = time.perf_counter(), self.federation
        same = {c: o for c, o in others.items() if fed.protocol.alike(c, o, wave.round)}
        rows: Mapping[int, list[ScoreRecord]] = {}
        remembered: Mapping[int, ClientState] = {}
        reason = NOT_FINITE
        try:
            if self.blind:
                raise ValueError(NO_MEMBERS)
            inferred = self.infer_defense(wave, members) if planned.defense == "inferred" else None
            known, wave = as_known(self.knowledge(planned, members, inferred), wave)
            fed.load_buffers(wave.buffers)
            if blurred := blurred_pull(known):
                raise ValueError(blurred)
            rows, remembered = tell_members(fed, planned, known, wave, {} if planned.is_baseline else same, memories)
        except ValueError as error:
            reason = str(error)
        metric = EVIDENCE if planned.name == CANARIES else MEMBER
        return _scored(planned.name, wave, metric, rows, reason, started, remembered)

    def _canaries(self, planned: PlannedAttack, wave: Wave) -> list[AuditResult]:
        """How far each canary's direction stands out of the update that it is in; its number is the row's example."""
        fed, started, rows, reason = self.federation, time.perf_counter(), dict[int, list[ScoreRecord]](), ""
        for k, client in enumerate(wave.clients):
            update = {name: t.double() for name, t in wave.alone(k).items()}
            mine = [c for c in fed.protocol.members(client, wave.round) if c in fed.protocol.canary_clients]
            try:
                found = cosines(update, [fed.direction(c) for c in mine])
            except ValueError as error:
                reason = str(error)
                continue
            # the tangent divides by what is not the canary's: by the noise, and not by the canary's own part beside it
            rest = (1 - found.square()).clamp_min(torch.finfo(found.dtype).eps)  # 0 where an update is nothing else
            values = found / rest.sqrt() * math.sqrt(sum(t.numel() for t in update.values()) - 1)
            rows[client] = [
                ScoreRecord(wave.round, client, planned.name, c, CANARY, value, "converged", 0.0)
                for c, value in zip(mine, values.tolist(), strict=True)
            ]
        return _scored(planned.name, wave, CANARY, rows, reason, started)

    def _truth(self, client: int, round: int) -> Batch:
        if self.blind:
            raise ValueError(NO_TRUTH)
        return self.federation.batch_at(client, round)

    def _limit(self, planned: PlannedAttack, wave: Wave, members: int) -> list[AuditResult]:
        """One for all clients of a round: they share params, and it reads neither update nor truth."""
        self.federation.load_buffers(wave.buffers)
        started, rows, reason = time.perf_counter(), dict[int, list[ScoreRecord]](), ""
        rng = generator(self.seed, "limit", planned.name, wave.round)
        known, wave = as_known(self.knowledge(planned, members), wave)
        try:
            if planned.name == CANDIDATE_BOUND:
                error = candidate_bound(known, wave.params, rng)
            else:
                error = bayes_limit(known, wave.params, self.priors, rng)
            for c in wave.clients:
                record = ScoreRecord(wave.round, c, planned.name, WHOLE_BATCH, mse.name, error, "converged", 0.0)
                rows[c] = [record]
        except ValueError as why:
            reason = str(why)
        return _scored(planned.name, wave, mse.name, rows, reason, started)


def _scored(
    attack: str,
    wave: Wave,
    metric: str,
    rows: Mapping[int, Sequence[ScoreRecord]],
    reason: str,
    started: float,
    remembered: Mapping[int, ClientState] = {},
) -> list[AuditResult]:
    """The results of what gives scores and no reconstruction; a client without rows gets one that is not applicable.

    Args:
        rows, remembered: by client.
    """
    seconds = (time.perf_counter() - started) / len(wave)
    audited = []
    for client in wave.clients:
        status: Status = "converged" if client in rows else "not_applicable"
        none = ScoreRecord(wave.round, client, attack, WHOLE_BATCH, metric, None, status, seconds)
        own = tuple(replace(row, seconds=seconds) for row in rows.get(client, [none]))
        result = Reconstruction(None, None, math.nan, 0, seconds, status, "" if client in rows else reason)
        audited.append(AuditResult(client, result, own, remembered.get(client)))
    return audited


def _on(memory: ClientState, device: torch.device) -> ClientState:
    return {name: t.to(device) for name, t in memory.items()}
