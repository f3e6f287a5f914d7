"""A worker's task: attack one wave, from tensors to scores and images, without files or connections."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from fedgauge.attacks.base import ClientState, Wave
from fedgauge.attacks.engine.batch_limiter import exhausted, keep_freed_memory
from fedgauge.attacks.engine.devices import CPU, Precision, compute_on, described
from fedgauge.attacks.grading.audit import Auditor, AuditResult
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.federation import federation

NONDETERMINISTIC = "does not have a deterministic implementation"  # as torch refuses an operator
CUDA_ERROR = "CUDA error"  # as torch reports one; a process whose context has one cannot use its GPU any more


@dataclass(frozen=True)
class Task:
    """One wave as it travels to a worker.

    Args:
        protocol: as JSON.
        others: by client, another client; its truth also grades the reconstruction.
        memories: by client, of a stateful attack.
        blind: there is no truth to grade against, as in a deployment.
        last: earlier attempts ended their workers, and there is no other attempt.
    """

    protocol: str
    planned: PlannedAttack
    seed: int
    wave: Wave
    others: dict[int, int]
    memories: dict[int, ClientState] = field(default_factory=dict)
    blind: bool = False
    last: bool = False


@dataclass(frozen=True)
class TaskResult:
    audited: list[AuditResult]
    computed_on: str  # device and precision


class Worker:
    """Attacks waves on one device, and on the CPU those that the device cannot attack; each such result says why.

    Args:
        name: of the device in results, where this process sees it by another one.
    """

    def __init__(self, device: torch.device = CPU, precision: Precision = "ieee", name: str = "") -> None:
        self.device = device
        self.precision = precision
        self.name = name or str(device)
        self._lost = ""  # why the device is not used any more

    def attack(self, task: Task) -> TaskResult:
        """Attack one wave; raises what the attack raises on the CPU."""
        if self.device == CPU or task.planned.build().on_cpu:
            return self._on_cpu(task)
        why = self._lost or ("earlier attempts ended their workers" if task.last else "")
        deterministic = True
        while not why:
            try:
                audited = attack_wave(task, self.device, self.precision, deterministic)
                return TaskResult(audited, described(self.device, self.name, self.precision, deterministic))
            except Exception as error:  # of the GPU, its driver or the attack, which the CPU tells apart
                if deterministic and NONDETERMINISTIC in str(error):
                    deterministic = False
                else:
                    why = self._why(error)
        result = self._on_cpu(task)
        explained = []
        for one in result.audited:
            reason = "; ".join(filter(None, (f"attacked on the CPU: {why}", one.reconstruction.reason)))
            explained.append(replace(one, reconstruction=replace(one.reconstruction, reason=reason)))
        return replace(result, audited=explained)

    def _on_cpu(self, task: Task) -> TaskResult:
        if self.device.type == "cuda":  # what is set for a GPU must not refuse operators of the CPU
            torch.use_deterministic_algorithms(False)
        return TaskResult(attack_wave(task), described(CPU, "cpu"))

    def _why(self, error: Exception) -> str:
        """Return why a wave cannot be attacked on the device, with the remedy; notes whether the device is lost."""
        said = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, MemoryError):  # the batch limiter's
            return f"a single problem does not fit into the memory of {self.name}: it needs a GPU with more"
        if exhausted(error) or "out of memory" in said:
            return f"the batch of updates does not fit into the memory of {self.name}: set a smaller [audit] wave"
        words = f"{self.name} raised {type(error).__name__}: {said}"
        if CUDA_ERROR in str(error):
            self._lost = f"{words}; this process cannot use it any more, the next audit can"
        return self._lost or words


def attack_wave(
    task: Task, device: torch.device = CPU, precision: Precision = "ieee", deterministic: bool = True
) -> list[AuditResult]:
    """Audit one wave, on one thread of the CPU or on a device, so that equal waves give equal bits.

    Raises:
        RuntimeError: the attack's code asked Python to exit, which must end neither the audit nor the worker.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    compute_on(device, precision, deterministic)
    auditor = _auditor(task.protocol, task.seed, task.blind, device)
    try:
        return auditor.audit(task.planned, task.wave, task.others, task.memories)
    except SystemExit as error:
        raise RuntimeError(f"the attack called sys.exit({error.code!r}) instead of returning") from error


@lru_cache(maxsize=4)
def _auditor(protocol: str, seed: int, blind: bool, device: torch.device) -> Auditor:
    return Auditor(FederationSource(federation(protocol), blind), seed, device)
