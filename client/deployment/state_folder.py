"""The client's private folder: its draws, its answers and its log; nothing in it is ever sent."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch

from fedgauge.client.files import replacing
from fedgauge.client.inspection.policy import FIRST_NETWORK
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Batch


@dataclass(frozen=True)
class DrawnBatch:
    """A client's batch in a round."""

    run: int  # Flower's number
    rows: tuple[int, ...]
    digest: str  # of the examples: if the owner's data changes, the same rows mean other examples
    sent: bool = False  # the update left; the server learns nothing about a withheld one


@dataclass(frozen=True)
class Answer:
    """A client's answer to one question about a batch."""

    images: str  # their digest
    psnr: tuple[float, ...]  # as reported


@dataclass(frozen=True)
class ClientFolder:
    """The client's private folder: its draws, its answers and its log; nothing in it is ever sent."""

    folder: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder: two processes must not read counts at the same time."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _private(self.folder / "lock") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            yield

    def drawn(self, run: int, round: int) -> DrawnBatch | None:
        """Return the client's batch in a round of a run; None if there was no such round."""
        path = self._round(run, round)
        if not path.exists():
            return None
        table = json.loads(path.read_text())  # a damaged file fails: no count begins anew
        return DrawnBatch(**table | {"rows": tuple(table["rows"])})

    def draws(self) -> int:
        return sum(1 for _ in (self.folder / "rounds").glob("run-*.json"))

    def keep_drawn(self, round: int, drawn: DrawnBatch) -> None:
        _write(self._round(drawn.run, round), asdict(drawn))

    def answers(self, digest: str) -> dict[str, Answer]:
        """Return the stored answers about a batch, by round and attack."""
        path = self._answers(digest)
        tables = json.loads(path.read_text()) if path.exists() else {}
        return {place: Answer(table["images"], tuple(table["psnr"])) for place, table in tables.items()}

    def keep_answers(self, digest: str, answers: Mapping[str, Answer]) -> None:
        """Record answers before they leave, so that a crash loses none."""
        _write(self._answers(digest), {place: asdict(answer) for place, answer in answers.items()})

    def protocol(self) -> str | None:
        """Return the protocol that the server sent last; None if it has sent none."""
        try:
            return (self.folder / "protocol.json").read_text()
        except FileNotFoundError:
            return None

    def keep_protocol(self, text: str) -> None:
        """Record the server's protocol, for the owner's report."""
        with replacing(self.folder / "protocol.json") as file:
            file.write(text.encode())

    @contextmanager
    def inspection_memory(self, run: int) -> Iterator[TransformState]:
        """Yield the inspections' memory of a run's weights; changes are saved.

        The first network counts for all runs: an owner who agrees to another one deletes the file, or names the network.
        Weights are not compared between runs.
        """
        from safetensors.torch import load, save

        path, mine = self.folder / "inspected.safetensors", torch.tensor(list(str(run).encode()), dtype=torch.uint8)
        memory: TransformState = load(path.read_bytes()) if path.exists() else {}
        if not torch.equal(memory.pop("run", mine), mine):
            memory = {k: t for k, t in memory.items() if k == FIRST_NETWORK}
        yield memory
        with replacing(path, durable=True) as file:
            file.write(save({**{k: t.contiguous() for k, t in memory.items()}, "run": mine}))

    @property
    def log(self) -> Path:
        """One line of JSON for each event: an update, an answer, a refusal."""
        return self.folder / "log.jsonl"

    @property
    def sums(self) -> Path:
        """The steps of secure sums that the client has begun to answer."""
        return self.folder / "sums"

    def note(self, event: str, **facts: object) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        line = json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n"
        with _private(self.log) as file:
            file.write(line.encode())  # at once: two writers' lines do not mix

    def _round(self, run: int, round: int) -> Path:
        return self.folder / "rounds" / f"run-{run}-round-{round:05d}.json"

    def _answers(self, digest: str) -> Path:
        # by batch, not by round: training on the same examples again gives the server no new questions
        return self.folder / "answers" / f"{digest}.json"


def digest_of(batch: Batch) -> str:
    """A digest of a batch that does not depend on the order of its examples."""
    each = sorted(hashlib.sha256(x.contiguous().numpy().tobytes()).digest() for x in batch.x)
    return hashlib.sha256(b"".join(each)).hexdigest()[:32]


def _private(path: Path) -> IO[bytes]:
    opened = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    return os.fdopen(opened, "ab", buffering=0)


def _write(path: Path, table: Mapping[str, object]) -> None:
    with replacing(path, durable=True) as file:  # a count that a power cut loses would give the server new questions
        file.write(json.dumps(table).encode())
