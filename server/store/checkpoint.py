"""Checkpoints after each round, from which a killed training resumes with equal results.

A round counts once its checkpoint exists. Writes are in the order tape, checkpoint, ledger: without a checkpoint, a round's
files on the tape are deleted; with one, missing rows of the ledger are entered from it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedgauge.client.components import check_arguments
from fedgauge.client.update import Params
from fedgauge.server.store import run_files
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import REPEATED, Participation, repeated
from fedgauge.server.store.run import NotResumable, Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import DTYPES, read_tensors, write_tensors

_NAME = "checkpoint.json"  # names the file of tensors and its digest
_MOST = 32 << 20  # bytes of it
_PARAM, _BUFFER, _STATE = "param/", "buffer/", "state/"
_SAVABLE = {np.dtype(str(t).removeprefix("torch.")) for t in DTYPES if t != torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Federation between two rounds.

    Args:
        round: the last finished round.
        strategy: attributes of the wrapped strategy but functions, such as the moments of Flower's.
        seen: participation in that round.
    """

    round: int
    params: Params
    buffers: Mapping[str, Tensor]
    strategy: Mapping[str, Any]
    seen: tuple[Participation, ...]

    def write(self, folder: Path) -> None:
        """Write to a run folder, and replace the previous checkpoint.

        Raises:
            NotResumable: the strategy's state cannot be saved.
            OSError: writing failed; the previous checkpoint remains.
        """
        tensors = {_PARAM + k: t for k, t in self.params.items()} | {_BUFFER + k: t for k, t in self.buffers.items()}
        kept = {name: value for name, value in self.strategy.items() if not isinstance(value, FunctionType)}
        state = {name: _encoded(value, name, tensors) for name, value in kept.items()}
        name = f"checkpoint-{self.round:05d}.safetensors"
        digest = write_tensors(folder / name, tensors)
        facts = dict(round=self.round, tensors=name, digest=digest, strategy=state)
        order = {"params": list(self.params), "buffers": list(self.buffers)}
        seen = [asdict(s) for s in self.seen]
        run_files.write(folder / _NAME, json.dumps({**facts, **order, "seen": seen}).encode())
        for old in run_files.names(folder):
            if old.startswith("checkpoint-") and old.endswith(".safetensors") and old != name:
                run_files.delete(folder / old)

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint | None":
        """Read the checkpoint of a run folder, if there is one.

        Raises:
            NotResumable: it is damaged, or the run cannot be resumed.
        """
        path = folder / _NAME
        if run_files.look(path) is None:
            return None
        try:
            facts = json.loads(run_files.read(path, _MOST))
            if (refused := facts.get("refused")) is None:
                return cls._of(facts, folder)
        except Exception as error:  # whatever a damaged file makes of it
            raise NotResumable(f"{path} is damaged: {type(error).__name__}: {error}") from error
        raise NotResumable(f"{folder} cannot be resumed: {refused}")

    @classmethod
    def _of(cls, facts: Any, folder: Path) -> "Checkpoint":
        tensors = read_tensors(folder / Path(facts["tensors"]).name, facts["digest"])
        return cls(
            round=int(facts["round"]),
            params={k: tensors.pop(_PARAM + k) for k in facts["params"]},
            buffers={k: tensors.pop(_BUFFER + k) for k in facts["buffers"]},
            strategy={k: _decoded(v, tensors) for k, v in facts["strategy"].items()},
            seen=tuple(Participation(**check_arguments(Participation, seen, "seen")) for seen in facts["seen"]),
        )


def mark_not_resumable(folder: Path, reason: str) -> None:
    run_files.write(folder / _NAME, json.dumps({"refused": reason}).encode())


def starting_point(run: Run, ledger: Ledger, scenario: Scenario) -> Checkpoint | None:
    """Return the checkpoint from which a training continues, and adjust ledger and tape; None: start at the first round.

    Later rounds in the ledger without a checkpoint (full disk) are deleted and trained again. A deployment records their
    number, as its clients draw new noise.

    Raises:
        NotResumable: the clients' state is lost, the checkpoint is missing or damaged, or the ledger lacks rounds.
        RunBusy: an attack service works on rounds that would be deleted.
    """
    checkpoint = Checkpoint.read(run.folder)
    done = checkpoint.round if checkpoint is not None else 0
    beyond = [row["round"] for row in (*ledger.observations(done + 1), *ledger.rounds(done + 1))]
    if why := _why_not(ledger, scenario, checkpoint, beyond):
        raise NotResumable(f"{run.folder} cannot be resumed: {why}")
    if checkpoint is not None and not any(o["round"] == done for o in ledger.observations(done)):
        ledger.record_intake(done, checkpoint.seen, scenario.plan if scenario.audit.curious else None)
    if beyond:
        with run.lock("audit"):
            if ledger.deployed:  # first, so that a kill counts them twice rather than not at all
                ledger.set_meta(**{REPEATED: str(repeated(ledger.meta()) + max(beyond) - done)})
            ledger.rewind(done + 1)
    run.sweep(done + 1)
    return checkpoint


def _why_not(ledger: Ledger, scenario: Scenario, checkpoint: Checkpoint | None, beyond: Sequence[int]) -> str:
    if checkpoint is None:
        lost = "no checkpoint (the disk was full); attack the recorded updates with fedgauge audit"
        return f"it has rounds up to {max(beyond)} but {lost}" if beyond else ""
    if scenario.federation.chain.remembers:
        return "its chain is stateful (error feedback, control variates or private layers), and the clients' states are lost"
    shapes = {k: p.shape for k, p in scenario.federation.model.named_parameters()}
    same = {k: t.shape for k, t in checkpoint.params.items()} == shapes
    return "" if same else "its checkpoint is of another network than its scenario's"


# ------------------------------------------------------------------------------------------------ a strategy's state


def _encoded(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a value exactly as JSON, with its arrays in `tensors`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype in _SAVABLE:
        name = f"{_STATE}{len(tensors)}"
        tensors[name] = torch.as_tensor(np.array(value, order="C"))
        return {"array" if isinstance(value, np.ndarray) else "scalar": name}
    if isinstance(value, ArrayRecord):
        return {"record": _encoded({k: array.numpy() for k, array in value.items()}, where, tensors)}
    if isinstance(value, dict) and all(type(k) in (str, int) for k in value):
        return {"dict": [[k, _encoded(v, f"{where}[{k!r}]", tensors)] for k, v in value.items()]}
    if type(value) in (list, tuple):
        items = [_encoded(v, f"{where}[{i}]", tensors) for i, v in enumerate(value)]
        return {type(value).__name__: items}
    raise NotResumable(f"the strategy keeps {where}, a {type(value).__name__}, which a checkpoint cannot hold")


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Decode a value of `_encoded`, and remove its arrays from `tensors`."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind in ("array", "scalar"):
        array = tensors.pop(inner).numpy().copy()
        return array if kind == "array" else array[()]
    if kind == "record":
        return ArrayRecord({k: Array(array) for k, array in _decoded(inner, tensors).items()})
    if kind in ("list", "tuple"):
        items = [_decoded(v, tensors) for v in inner]
        return items if kind == "list" else tuple(items)
    return {k: _decoded(v, tensors) for k, v in inner}
