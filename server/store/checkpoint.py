"""Checkpoints: everything the next round needs, written after each round, so that a killed training resumes with equal results.

The order of the writes (tape, checkpoint, ledger) makes a kill at any moment harmless. A round counts once its checkpoint
exists. Before that, its files on the tape are deleted; after that, rows missing from the ledger are entered from the checkpoint.
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
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedgauge.client.components import check_arguments
from fedgauge.client.update import Params
from fedgauge.server.store import run_files
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import REPEATED, Participation, repeated
from fedgauge.server.store.run import NotResumable, Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import DTYPES, TapeError, read_tensors, write_tensors

VERSION = 1  # of the format of checkpoint.json
_NAME = "checkpoint.json"  # read first: it names the round's file of tensors and its digest, so that no reader sees half a round
_MOST = 32 << 20  # bytes of it
_PARAM, _BUFFER, _STATE = "param/", "buffer/", "state/"


class StateNotSavable(Exception):
    """A strategy has state that no checkpoint can hold; the message names it."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A federation between two rounds.

    Args:
        round: the last finished round.
        strategy: all attributes of the wrapped strategy, by name; Flower's own strategies keep their moments there.
        seen: what each client did in that round.
    """

    round: int
    params: Params
    buffers: Mapping[str, Tensor]
    strategy: Mapping[str, Any]
    seen: tuple[Participation, ...]

    def write(self, folder: Path) -> None:
        """Write it to a run folder, replacing the previous one.

        Raises:
            StateNotSavable: the strategy's state cannot be saved.
            OSError: writing failed; the previous checkpoint is still complete.
        """
        tensors = {_PARAM + k: t for k, t in self.params.items()} | {_BUFFER + k: t for k, t in self.buffers.items()}
        state = {name: _encoded(value, name, tensors) for name, value in self.strategy.items()}
        name = f"checkpoint-{self.round:05d}.safetensors"
        digest = write_tensors(folder / name, tensors)
        facts = dict(version=VERSION, round=self.round, tensors=name, digest=digest, strategy=state)
        order = {"params": list(self.params), "buffers": list(self.buffers)}
        seen = [asdict(s) for s in self.seen]
        run_files.write(folder / _NAME, json.dumps({**facts, **order, "seen": seen}).encode())
        for old in run_files.names(folder):
            if old.startswith("checkpoint-") and old.endswith(".safetensors") and old != name:
                run_files.delete(folder / old)

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint | None":
        """The checkpoint in a run folder, or None; NotResumable if it is damaged or says that there can be none."""
        path = folder / _NAME
        if run_files.look(path) is None:
            return None
        try:
            facts = json.loads(run_files.read(path, _MOST))
            if facts["version"] != VERSION:
                raise NotResumable(f"{path} has version {facts['version']}, this fedgauge reads {VERSION}")
            if "refused" in facts:
                raise NotResumable(f"{folder} cannot be resumed: {facts['refused']}")
            tensors = read_tensors(folder / Path(facts["tensors"]).name, facts["digest"])
            return cls(
                round=int(facts["round"]),
                params={k: tensors.pop(_PARAM + k) for k in facts["params"]},
                buffers={k: tensors.pop(_BUFFER + k) for k in facts["buffers"]},
                strategy={name: _decoded(value, tensors) for name, value in facts["strategy"].items()},
                seen=tuple(Participation(**check_arguments(Participation, seen, "seen")) for seen in facts["seen"]),
            )
        except TapeError as error:
            raise NotResumable(f"{folder} cannot be resumed: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise NotResumable(f"{path} is damaged: {type(error).__name__}: {error}") from error


def mark_not_resumable(folder: Path, reason: str) -> None:
    """Record in a run folder that it cannot be resumed, and why."""
    run_files.write(folder / _NAME, json.dumps({"version": VERSION, "refused": reason}).encode())


def starting_point(run: Run, ledger: Ledger, scenario: Scenario) -> Checkpoint | None:
    """The checkpoint from which a training continues, with ledger and tape brought to it; None: start at the first round.

    A second call changes nothing more. If the ledger has later rounds (a full disk prevented their checkpoint), they are
    trained again, and everything recorded about them is deleted; of a deployment it stays noted how many there were, as its
    clients' noise is another one then.

    Raises:
        NotResumable: the clients' state is lost with their processes; the checkpoint is missing or damaged; the ledger lacks
            rounds.
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
            if ledger.deployed:  # noted first: a kill in between counts them twice, and never not at all
                ledger.set_meta(**{REPEATED: str(repeated(ledger.meta()) + max(beyond) - done)})
            ledger.rewind(done + 1)
    run.sweep(done + 1)
    return checkpoint


def _why_not(ledger: Ledger, scenario: Scenario, checkpoint: Checkpoint | None, beyond: Sequence[int]) -> str:
    if checkpoint is None:
        lost = "no checkpoint (the disk was full); attack what is on its tape with fedgauge audit"
        return f"it has rounds up to {max(beyond)} but {lost}" if beyond else ""
    if scenario.federation.chain.remembers:
        return "its chain is stateful (error feedback, control variates or private layers), and the clients' states are lost"
    recorded, done = {row["round"] for row in ledger.rounds()}, checkpoint.round
    if (missing := next((round for round in range(done) if round not in recorded), None)) is not None:
        # a power cut may lose the ledger's last rows
        return f"its ledger lacks round {missing}, although its checkpoint is of round {done}"
    shapes = {k: p.shape for k, p in scenario.federation.model.named_parameters()}
    same = {k: t.shape for k, t in checkpoint.params.items()} == shapes
    return "" if same else "its checkpoint is of another network than its scenario's"


def restore(strategy: Strategy, state: Mapping[str, Any]) -> None:
    """Restore the state of a freshly built strategy.

    Raises:
        NotResumable: it is built with other functions than before, or the state is not of such a strategy.
    """
    fresh = vars(strategy)
    for name, value in state.items():
        now = fresh.get(name)
        if isinstance(value, _Named):
            if _Named.of(now) != value:
                raise NotResumable(f"the strategy's {name} was {value.name} and is another now: build it as before")
        elif name not in fresh and hasattr(strategy, name):
            raise NotResumable(f"the checkpoint is damaged: its {name!r:.60} is no state of the strategy")
        else:
            setattr(strategy, name, value)


# ------------------------------------------------------------------------------------------------ a strategy's state


@dataclass(frozen=True)
class _Named:
    """A function among a strategy's attributes: it has no state, and is there again once the strategy is built again."""

    name: str

    @classmethod
    def of(cls, value: object) -> "_Named":
        return cls(f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', repr(value))}")


def _encoded(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON, with its arrays put into `tensors`; exact in bits, types and order of names."""
    if value is None or isinstance(value, bool | int | float | str) and not isinstance(value, np.generic):
        return value
    if isinstance(value, FunctionType) and value.__closure__ is None:
        return {"function": _Named.of(value).name}
    if isinstance(value, np.ndarray | np.generic):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: _put(np.array(value, order="C"), where, tensors)}
    if isinstance(value, Tensor):
        return {"tensor": _put(value.detach().cpu().clone(), where, tensors)}
    if isinstance(value, Array):
        return {"flower": _encoded(value.numpy(), where, tensors)}
    if isinstance(value, ArrayRecord | dict) and all(type(k) in (str, int) for k in value):
        items = [[k, _encoded(v, f"{where}[{k!r}]", tensors)] for k, v in value.items()]
        return {"record" if isinstance(value, ArrayRecord) else "dict": items}
    if type(value) in (list, tuple):
        items = [_encoded(v, f"{where}[{i}]", tensors) for i, v in enumerate(value)]
        return {type(value).__name__: items}
    raise StateNotSavable(f"the strategy keeps {where}, a {type(value).__name__}, which a checkpoint cannot hold")


def _put(value: Any, where: str, tensors: dict[str, Tensor]) -> str:
    name = f"{_STATE}{len(tensors)}"
    try:
        tensors[name] = torch.as_tensor(value)
        _ = DTYPES[tensors[name].dtype]
    except (TypeError, ValueError, KeyError) as error:  # text, objects, foreign byte order
        raise StateNotSavable(f"the strategy keeps {where}, which a checkpoint cannot hold: {value.dtype}") from error
    return name


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value of `_encoded`; it takes its arrays out of `tensors`, as each is there once."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "function":
        return _Named(inner)
    if kind in ("array", "scalar"):
        array = tensors.pop(inner).numpy().copy()
        return array if kind == "array" else array[()]
    if kind == "tensor":
        return tensors.pop(inner)
    if kind == "flower":
        return Array(_decoded(inner, tensors))
    if kind in ("list", "tuple"):
        items = [_decoded(v, tensors) for v in inner]
        return items if kind == "list" else tuple(items)
    pairs = {k: _decoded(v, tensors) for k, v in inner}
    if kind == "dict":
        return pairs
    if kind == "record":
        return ArrayRecord(pairs)
    raise ValueError(f"unknown kind {kind!r}")
