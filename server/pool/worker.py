"""What a worker does with a wave: plain arrays in, scores and images out; it opens no file and no connection."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedgauge.attacks.base import Observation, Reconstruction, Wave
from fedgauge.attacks.engine.batch_limiter import keep_freed_memory
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.scores import ScoreRecord
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.federation import federation
from fedgauge.server.store.tape import as_arrays, as_tensors


@dataclass(frozen=True)
class Task:
    """One wave, as it travels to a worker: the protocol and plan as JSON, weights and updates as plain arrays."""

    protocol: str
    planned: str
    seed: int
    round: int
    clients: tuple[int, ...]
    others: dict[int, int]
    params: dict[str, Any]
    buffers: dict[str, Any]
    updates: tuple[dict[str, Any], ...]
    memories: dict[int, dict[str, Any]] = field(default_factory=dict)  # by client, of an attack that remembers any
    blind: bool = False  # there is no truth to grade against: a deployment's


@dataclass(frozen=True)
class TaskResult:
    """What comes back, by attacked client: its rows, its reconstruction's arrays, and why.

    images: x, y where labels were claimed, and trace_iteration (T,), trace_objective (T,), trace_x (T, B, C, H, W) in uint8
        where a trace was kept.
    """

    rows: dict[int, list[ScoreRecord]]
    images: dict[int, dict[str, Any]]
    reasons: dict[int, str]  # of those whose attack gives one
    memories: dict[int, dict[str, Any]] = field(default_factory=dict)  # of an attack that remembers: afterwards


def attack_wave(task: Task) -> TaskResult:
    """Audit one wave, on one thread, so that equal waves give equal bits."""
    torch.set_num_threads(1)
    keep_freed_memory()
    params, buffers = as_tensors(task.params), as_tensors(task.buffers)
    observations = [
        Observation(task.round, client, params, as_tensors(update), buffers)
        for client, update in zip(task.clients, task.updates, strict=True)
    ]
    planned = PlannedAttack.from_json(task.planned)
    memories = {client: as_tensors(memory) for client, memory in task.memories.items()}
    auditor = _auditor(task.protocol, task.seed, task.blind)
    audited = auditor.audit(planned, Wave.stack(observations), task.others, memories=memories)
    images = {a.client: as_arrays(_tensors(a.reconstruction)) for a in audited}
    reasons = {a.client: a.reconstruction.reason for a in audited if a.reconstruction.reason}
    kept = {a.client: as_arrays(a.memory) for a in audited if a.memory is not None}
    return TaskResult({a.client: list(a.rows) for a in audited}, images, reasons, kept)


def _tensors(found: Reconstruction) -> dict[str, Tensor]:
    """What is kept of a reconstruction, by the names it has in its file."""
    tensors = {"x": found.x, "y": found.y}
    if (trace := found.trace) is not None:
        tensors |= {"trace_iteration": trace.iteration, "trace_objective": trace.objective, "trace_x": trace.x}
    return {name: t for name, t in tensors.items() if t is not None}


@lru_cache(maxsize=2)
def _auditor(protocol: str, seed: int, blind: bool) -> Auditor:
    return Auditor(federation(protocol), seed, blind)
