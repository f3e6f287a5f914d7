"""What a worker does: it attacks one wave, from plain arrays to scores and images, and opens no file or connection."""

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
    """One wave as it travels to a worker: protocol and plan as JSON, weights and updates as plain arrays."""

    protocol: str
    planned: str
    seed: int
    round: int
    clients: tuple[int, ...]
    others: dict[int, int]
    params: dict[str, Any]
    buffers: dict[str, Any]
    updates: tuple[dict[str, Any], ...]
    memories: dict[int, dict[str, Any]] = field(default_factory=dict)  # by client, for a stateful attack
    blind: bool = False  # in a deployment there is no truth to grade against


@dataclass(frozen=True)
class TaskResult:
    """A wave's result, by attacked client: score rows, the reconstruction's arrays, and reasons.

    images: x; y if labels were claimed; and if a trace was kept, trace_iteration (T,), trace_objective (T,) and
        trace_x (T, B, C, H, W) in uint8.
    """

    rows: dict[int, list[ScoreRecord]]
    images: dict[int, dict[str, Any]]
    reasons: dict[int, str]  # only if the attack gives one
    memories: dict[int, dict[str, Any]] = field(default_factory=dict)  # what a stateful attack remembers afterwards


def attack_wave(task: Task) -> TaskResult:
    """Audit one wave, on one thread, so that equal waves give equal bits.

    Raises:
        RuntimeError: the attack's code asked Python to exit, which must end neither the audit nor the worker.
    """
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
    try:
        audited = auditor.audit(planned, Wave.stack(observations), task.others, memories=memories)
    except SystemExit as error:
        raise RuntimeError(f"the attack called sys.exit({error.code!r}) instead of returning") from error
    images = {a.client: as_arrays(_tensors(a.reconstruction)) for a in audited}
    reasons = {a.client: a.reconstruction.reason for a in audited if a.reconstruction.reason}
    kept = {a.client: as_arrays(a.memory) for a in audited if a.memory is not None}
    return TaskResult({a.client: list(a.rows) for a in audited}, images, reasons, kept)


def _tensors(reconstruction: Reconstruction) -> dict[str, Tensor]:
    """A reconstruction's tensors by their names in its file."""
    tensors = {"x": reconstruction.x, "y": reconstruction.y}
    if (trace := reconstruction.trace) is not None:
        tensors |= {"trace_iteration": trace.iteration, "trace_objective": trace.objective, "trace_x": trace.x}
    return {name: t for name, t in tensors.items() if t is not None}


@lru_cache(maxsize=2)
def _auditor(protocol: str, seed: int, blind: bool) -> Auditor:
    return Auditor(federation(protocol), seed, blind)
