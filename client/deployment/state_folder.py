"""The client's own folder: what it drew, what it answered, and its log; nothing in it ever travels."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fedgauge.client.files import replacing
from fedgauge.client.inspection.policy import FIRST_NETWORK
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Batch


class DamagedState(Exception):
    """A file of the client's own folder cannot be read; the message names it, and is for the owner alone."""


@dataclass(frozen=True)
class DrawnBatch:
    """What a client trained on in a round.

    Args:
        run: Flower's number of the run.
        digest: of the examples; else rows would mean others where the owner's data has changed.
        sent: whether the update left: of one that the owner's guard held back nothing is told, not even its leak.
    """

    run: int
    rows: tuple[int, ...]
    digest: str
    sent: bool = False


@dataclass(frozen=True)
class ClientFolder:
    """The client's own folder: what it drew, what it answered, and its log; nothing in it ever travels."""

    folder: Path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder alone: counts must not be read by two at the same time."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _private(self.folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def drawn(self, run: int, round: int) -> DrawnBatch | None:
        """What was trained on in a round of one of the server's runs; None where that round never came."""
        table = _read(self._round(run, round))
        if table is None:
            return None
        try:
            return DrawnBatch(
                int(table["run"]), tuple(map(int, table["rows"])), str(table["digest"]), table["sent"] is True
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedState(f"{self._round(run, round)} is damaged: {error!r}") from error

    def draws(self) -> int:
        """How often a round's examples were drawn, in all runs."""
        return sum(1 for _ in (self.folder / "rounds").glob("run-*.json"))

    def keep_drawn(self, round: int, drawn: DrawnBatch) -> None:
        """Write a round's draw down."""
        _write(self._round(drawn.run, round), asdict(drawn))

    def answers(self, digest: str) -> dict[str, Any]:
        """What was answered on a batch, by round and attack."""
        return _read(self._answers(digest)) or {}

    def keep_answers(self, digest: str, answers: Mapping[str, Any]) -> None:
        """Write down what will be answered: before it leaves, so that a crash forgets no answer."""
        _write(self._answers(digest), answers)

    def protocol(self) -> str | None:
        """The server's last protocol; None before the first."""
        try:
            return (self.folder / "protocol.json").read_text()
        except FileNotFoundError:
            return None

    def keep_protocol(self, text: str) -> None:
        """Write the server's protocol down, for the owner's own account."""
        with replacing(self.folder / "protocol.json") as file:
            file.write(text.encode())

    @contextmanager
    def met(self, run: int) -> Iterator[TransformState]:
        """What an inspection remembers of the weights of one of the server's runs; what is changed in it is kept.

        The network that was met first is that of all runs: an owner who agrees to another one deletes the file, or names it.
        Weights are not compared between runs.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load, save

        path, mine = self.folder / "inspected.safetensors", torch.tensor(list(str(run).encode()), dtype=torch.uint8)
        try:
            memory: TransformState = load(path.read_bytes())
        except FileNotFoundError:
            memory = {}
        except (OSError, SafetensorError) as error:
            raise DamagedState(f"{path} is damaged: {error}") from error
        if not torch.equal(memory.pop("run", mine), mine):
            memory = {k: t for k, t in memory.items() if k == FIRST_NETWORK}
        yield memory
        with replacing(path, durable=True) as file:
            file.write(save({**{k: t.contiguous() for k, t in memory.items()}, "run": mine}))

    @property
    def log(self) -> Path:
        """A line of JSON for each thing that was done, answered or refused."""
        return self.folder / "log.jsonl"

    def note(self, event: str, **facts: object) -> None:
        """Append to the log."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        line = json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n"
        with _private(self.log) as file:
            os.write(file, line.encode())  # at once: two writers' lines do not mix

    def _round(self, run: int, round: int) -> Path:
        return self.folder / "rounds" / f"run-{run}-round-{round:05d}.json"

    def _answers(self, digest: str) -> Path:
        # by batch, not by round: a server that has the same examples trained on again has spent its questions on them
        return self.folder / "answers" / f"{digest}.json"


def digest_of(batch: Batch) -> str:
    """Tells batches apart, whatever the order of their examples."""
    each = sorted(hashlib.sha256(x.contiguous().numpy().tobytes()).digest() for x in batch.x)
    return hashlib.sha256(b"".join(each)).hexdigest()[:32]


@contextmanager
def _private(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DamagedState(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise DamagedState(f"{path} is damaged: it holds no table")
    return found


def _write(path: Path, table: Mapping[str, Any]) -> None:
    with replacing(path, durable=True) as file:  # a count that a power cut forgets is one that a server can reset
        file.write(json.dumps(table).encode())
