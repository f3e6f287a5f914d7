"""What a worker does with a wave: plain arrays in, scores and images out; it opens no file and no connection."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from attacks.audit import Auditor, Row
from attacks.base import Observation, Wave
from attacks.memory import keep_freed_memory
from attacks.plan import PlannedAttack
from client.protocol import federation
from server.tape import as_arrays, as_tensors


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


@dataclass(frozen=True)
class Outcome:
    """What comes back, by attacked client: its rows, its reconstruction's arrays (x, and y where there is one), and why."""

    rows: dict[int, list[Row]]
    images: dict[int, dict[str, Any]]
    reasons: dict[int, str]  # of those whose attack gives one


def attack_wave(task: Task) -> Outcome:
    """Audit one wave, on one thread, so that equal waves give equal bits."""
    torch.set_num_threads(1)
    keep_freed_memory()
    params, buffers = as_tensors(task.params), as_tensors(task.buffers)
    observations = [
        Observation(task.round, client, params, as_tensors(update), buffers)
        for client, update in zip(task.clients, task.updates, strict=True)
    ]
    planned = PlannedAttack.from_json(task.planned)
    audited = _auditor(task.protocol, task.seed).audit(planned, Wave.stack(observations), task.others)
    images = {}
    for a in audited:
        found = {"x": a.reconstruction.x, "y": a.reconstruction.y}
        images[a.client] = as_arrays({k: t for k, t in found.items() if t is not None})
    reasons = {a.client: a.reconstruction.reason for a in audited if a.reconstruction.reason}
    return Outcome({a.client: list(a.rows) for a in audited}, images, reasons)


@lru_cache(maxsize=2)
def _auditor(protocol: str, seed: int) -> Auditor:
    return Auditor(federation(protocol), seed)
