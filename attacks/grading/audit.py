"""The audit of a wave: attack first, and only then fetch the truth and grade."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, get_args

import torch
from torch import Tensor

from fedgauge.attacks.base import Attack, ClientState, Knowledge, Reconstruction, Status, Stream, Wave, not_applicable
from fedgauge.attacks.engine.devices import CPU
from fedgauge.attacks.grading.scores import Grader, ungraded_rows
from fedgauge.attacks.grading.tuning import Tuning
from fedgauge.attacks.measure import Case, Measure
from fedgauge.attacks.modality.base import Modality
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.score_rows import WHOLE_BATCH, ScoreRecord, came_back, wrong_client
from fedgauge.attacks.source import FederationSource
from fedgauge.attacks.threat_model import (
    as_known,
    blurred_correction,
    chosen_auxiliary,
    needs_truth,
    public_knowledge,
    waves_known_alike,
    with_given_truth,
)
from fedgauge.client.chain import Chain
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch

NO_MEMBERS = "the private batches are missing: their owner supplies them by fedgauge audit RUN --truth FOLDER"
NOT_FINITE = (
    "no score is finite (the update is zero or not finite, or the model fails with these weights), or no non-member shares a "
    "label with the batch (raise strangers, or give more test data)"
)


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
    """Attacks waves (batches of updates) of one source and grades the results.

    Args:
        source: gives the attacker its public knowledge, and the grader the truth where there is one.
        seed: of the attacker's randomness.
        device: where attacks run; waves come from the CPU, and results are graded there.
        few: at most this many public examples for an attack to learn from; default: all.
    """

    source: FederationSource
    seed: int = 0
    device: torch.device = CPU
    few: int | None = None

    @property
    def federation(self) -> Federation:
        return self.source.federation

    @cached_property
    def _moved(self) -> Federation:
        return self.federation if self.device == CPU else self.federation.on(self.device)

    @property
    def modality(self) -> Modality:
        return self.source.modality

    @cached_property
    def grader(self) -> Grader:
        return Grader(self.modality, self.source.auxiliary.x, label_kind=self.federation.label_kind)

    # ------------------------------------------------------------------------------------------ what the attacker knows

    def knowledge(self, planned: PlannedAttack, members: int | None = None, fed: Federation | None = None) -> Knowledge:
        """Return the attacker's knowledge in a planned attack.

        Args:
            members: clients that the server sees as one sum; default: a whole group.
            fed: the federation on the device where the attack runs; default: on the CPU.
        """
        fed = fed or self.federation
        chain = fed.chain if planned.defense == "known" else Chain((fed.chain.local,))
        public = chosen_auxiliary(planned, self.source.auxiliary, fed.shards.dataset.classes, self.seed)
        if self.few is not None:
            public = Batch(*(t[: self.few] for t in public))
        return public_knowledge(fed, public, chain, members)

    def stream(self, planned: PlannedAttack, round: int, client: int) -> Stream:
        """Return the attacker's randomness for one observation: a function from keys to generators."""
        return partial(generator, self.seed, "attack", planned.name, round, client)

    # -------------------------------------------------------------------------------------------------------- the audit

    def audit(
        self,
        planned: PlannedAttack,
        wave: Wave,
        others: Mapping[int, int] = {},
        memories: Mapping[int, ClientState] = {},
    ) -> list[AuditResult]:
        """Attack a wave, then grade the reconstructions: one result for each client, in the wave's order.

        Args:
            others: by client, another client of the same round. The result is also graded against the other client's truth,
                as its baseline wrong_client(attack).
            memories: by client, what a stateful attack remembers of it from earlier rounds.

        Raises:
            ValueError: the attack returned a batch of the wrong shape.
        """
        fed = self.federation
        if len(parts := waves_known_alike(fed.model, fed.chain, fed.shards.batch_size, wave)) > 1:
            each = {a.client: a for part in parts for a in self.audit(planned, part, others, memories)}
            return [each[client] for client in wave.clients]
        members, attack = len(fed.protocol.group(wave.clients[0])), planned.build()
        if isinstance(attack, Measure):
            return self._measured(planned, attack, wave, members, others, memories)
        audited = []
        for client, (result, memory) in zip(wave.clients, self.attack(planned, wave, members, memories), strict=True):
            if self.source.blind:
                examples, main = members * fed.shards.batch_size, self.modality.main.metric
                rows = ungraded_rows(planned.name, wave.round, client, result, examples, others.get(client), main)
            else:
                result, rows = self.grade(planned.name, wave, client, result, others.get(client))
            audited.append(AuditResult(client, result, tuple(rows), memory))
        return audited

    def _measured(
        self,
        planned: PlannedAttack,
        attack: Measure,
        seen: Wave,
        members: int,
        others: Mapping[int, int],
        memories: Mapping[int, ClientState],
    ) -> list[AuditResult]:
        """The rows of an attack that reconstructs nothing; a client without any gets one that is not applicable."""
        started = time.perf_counter()
        rows, remembered = dict[int, list[ScoreRecord]](), dict[int, ClientState]()
        reason = NO_MEMBERS if self.source.blind and attack.needs_truth else ""
        try:
            if not reason:
                known, wave = self._threat(planned, attack, seen, members)
                reason = blurred_correction(known, attack)
            if not reason:
                case = Case(self.federation, planned.name, known, wave, seen, others, memories, self.seed)
                (rows, remembered), reason = attack.measure(case), NOT_FINITE
        except ValueError as error:
            reason = str(error)
        seconds = (time.perf_counter() - started) / len(seen)
        audited = []
        for client in seen.clients:
            status: Status = "converged" if client in rows else "not_applicable"
            none = ScoreRecord(seen.round, client, planned.name, WHOLE_BATCH, attack.metric, None, status, seconds)
            own = tuple(replace(row, seconds=seconds) for row in rows.get(client, [none]))
            result = Reconstruction(None, None, math.nan, 0, seconds, status, "" if client in rows else reason)
            audited.append(AuditResult(client, result, own, remembered.get(client)))
        return audited

    def _threat(self, planned: PlannedAttack, attack: Attack, wave: Wave, members: int) -> tuple[Knowledge, Wave]:
        if self.source.blind and planned.role == "baseline":
            planned = replace(planned, labels="restored")
        fed = self.federation if attack.on_cpu else self._moved
        known = self.knowledge(planned, members, fed)
        private = [self.source.truth(c, wave.round) for c in wave.clients] if needs_truth(planned) else []
        known = with_given_truth(planned, known, private)
        if not attack.on_cpu and self.device != CPU:
            known, wave = known.to(self.device), wave.to(self.device)
        known, wave = as_known(known, wave)
        fed.load_buffers(wave.buffers)
        return known, wave

    def attack(
        self, planned: PlannedAttack, wave: Wave, members: int, memories: Mapping[int, ClientState] = {}
    ) -> list[tuple[Reconstruction, ClientState | None]]:
        """Attack a wave without grading it: for each client the reconstruction, and the memory of a stateful attack.

        The attack gets no more of the truth than its threat model gives it. Other arguments and errors are those of `audit`.

        Args:
            members: clients that the server sees as one sum.
        """
        attack = planned.build()
        known, wave = self._threat(planned, attack, wave, members)
        streams = [self.stream(planned, wave.round, client) for client in wave.clients]
        started = time.perf_counter()
        if blurred := blurred_correction(known, attack):
            declined = not_applicable(wave, blurred)
            return [(result, memories.get(c)) for c, result in zip(wave.clients, declined, strict=True)]
        tuned = ""
        if planned.tune == "shadow":
            observations = len(self.federation.protocol.groups)
            tuning = Tuning(self.modality, planned.budget, observations, self.seed, wave.round)
            try:
                attack, tuned = tuning.of(attack, known, wave)
            except ValueError as error:
                tuned = f"not tuned: {error}"
        before = [_on(memories.get(client, {}), wave.device) for client in wave.clients]
        returned, after = attack.advance(wave, known, planned.budget, streams, before)
        like, possible = self.source.auxiliary.x[:1].expand(known.batch_size, *known.shape), self.modality.possible
        checked = _checked(returned, len(wave), like)
        checked = [replace(r, x=possible(r.x)) if r.x is not None and came_back(r.x) else r for r in checked]
        remembered = [_on(memory, CPU) if attack.is_stateful else None for memory in after]
        results = [result.to(CPU) for result in checked]
        seconds = (time.perf_counter() - started) / len(wave)
        return [
            (replace(result, seconds=seconds, reason="; ".join(filter(None, (tuned, result.reason)))), memory)
            for result, memory in zip(results, remembered, strict=True)
        ]

    def grade(
        self, attack: str, wave: Wave, client: int, result: Reconstruction, other: int | None = None
    ) -> tuple[Reconstruction, list[ScoreRecord]]:
        """Grade a reconstruction against its client's truth; return it in the truth's order, and the rows.

        Args:
            attack: the name for the rows.
            other: another client; the result is also graded against its truth.
        """
        source, round = self.source, wave.round
        truth, augmented = source.truth(client, round), source.trained_on(wave, client)
        paired, rows, _ = self.grader.grade(attack, round, client, result, truth, augmented)
        if other is not None:
            unlabelled = replace(result, y=None)
            rows += self.grader.grade(wrong_client(attack), round, other, unlabelled, source.truth(other, round))[1]
        return paired, rows


def _checked(returned: Any, count: int, like: Tensor) -> list[Reconstruction]:
    """Check what an attack, perhaps a user's, returned for so many updates; like: a batch of examples."""
    given: list[Any] = list(returned) if isinstance(returned, list | tuple) else [returned]
    wrong: tuple[str, object] | None = None
    if len(given) != count or not all(isinstance(result, Reconstruction) for result in given):
        found = ", ".join(type(result).__name__ for result in given) or "none"
        wrong = f"a list of {count} Reconstruction, one for each update", found
    else:
        wrong = next(filter(None, (_fault(result, like) for result in given)), None)
    if wrong is not None:
        raise ValueError(f"the attack must return {wrong[0]}, and returned {wrong[1]}")
    return given


def _fault(result: Reconstruction, like: Tensor) -> tuple[str, object] | None:
    """Return what was expected of a reconstruction, and what was returned instead."""
    parts: dict[str, Any] = {"x": result.x, "y": result.y, "confidence": result.confidence}
    for name, t in parts.items():
        if not isinstance(t, Tensor | None):
            return f"{name} as a tensor or None", type(t).__name__
    x = like if result.x is None else result.x
    if x.shape != like.shape or x.is_floating_point() != like.is_floating_point():
        expected, found = (f"{tuple(t.shape)} of {t.dtype}" for t in (like, x))
        return f"a whole batch, {expected}", found
    known = get_args(Status)
    return None if result.status in known else (f"a status among {', '.join(known)}", repr(result.status))


def _on(memory: ClientState, device: torch.device) -> ClientState:
    return {name: t.to(device) for name, t in memory.items()}
