"""A run is a folder: scenario.toml, environment.json, ledger.sqlite, checkpoint.json, tape/, reconstructions/, memories/, ..."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedgauge.server.store import predecessor
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import Tape, read_tensors, sweep, write_bytes, write_tensors

ROUNDS = ("tape", "reconstructions", "memories")  # folders whose files are named by their round
WEIGHTS = "weights.safetensors"  # what [model] weights named when the run began


class RunBusy(Exception):
    """Another process works on this run; the message names it."""


class NotResumable(LedgerError):
    """A training cannot be resumed; the message says why and what to do."""


@dataclass(frozen=True)
class Run:
    """One run folder: its paths, and how its files are read, written and locked."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, scenario: Scenario) -> "Run":
        """Create a run folder that only its owner may read, as its contents can be inverted to personal data."""
        folder.mkdir(parents=True, mode=0o700)
        for part in ("tape", "reconstructions", "logs"):
            (folder / part).mkdir(mode=0o700)
        run = cls(folder)
        write_bytes(folder / "scenario.toml", scenario.to_toml().encode())
        if weights := scenario.protocol.model.get("weights"):
            shutil.copyfile(weights, run._private(WEIGHTS))
        unfinished = run._private(".part-ledger.sqlite")  # SQLite gives its own files beside a ledger the ledger's mode
        Ledger(unfinished, create=True).close()
        unfinished.replace(
            folder / "ledger.sqlite"
        )  # complete from the first moment, as another process may wait for it
        return run

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """An existing run; LedgerError if the folder is none, or a predecessor of fedgauge wrote it."""
        missing = [name for name in ("ledger.sqlite", "scenario.toml") if not (folder / name).exists()]
        if missing:
            raise LedgerError(f"{folder} is not a run folder: it has no {' and no '.join(missing)}")
        predecessor.refuse(folder)
        return cls(folder)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.resolve().name

    def scenario(self, settings: Sequence[str] = ()) -> Scenario:
        """The scenario as it was run, with further settings applied; [model] weights are the run's own copy."""
        weights = (self.folder / WEIGHTS).absolute()
        own = [f"model.weights={json.dumps(str(weights), ensure_ascii=False)}"] if weights.exists() else []
        return Scenario.load(self.folder / "scenario.toml", [*own, *settings])

    def ledger(self, readonly: bool = False) -> Ledger:
        """A connection to the ledger."""
        return Ledger(self.folder / "ledger.sqlite", readonly=readonly)

    def tape(self) -> Tape:
        """The tape."""
        return Tape(self.folder / "tape")

    @property
    def model(self) -> Path:
        """The trained model's file, which is written last: with it the training is complete."""
        return self.folder / "model.safetensors"

    def log(self, name: str) -> Path:
        """A log file of the run, to append to."""
        return self._private(f"logs/{name}")

    def _private(self, name: str) -> Path:
        """A file of the run that only its owner may read, created if missing."""
        path = self.folder / name
        path.touch(mode=0o600)
        return path

    def reconstruction(self, round: int, client: int, attack: str) -> Path:
        """The file of an attack's reconstruction of one observation: x (B, C, H, W), and y if the attack claims labels."""
        return self.folder / "reconstructions" / f"round-{round:05d}-client-{client:05d}-{attack}.safetensors"

    def write_reconstruction(self, round: int, client: int, attack: str, tensors: dict[str, Tensor]) -> None:
        """Write an attack's reconstruction."""
        write_tensors(self._own(self.reconstruction(round, client, attack)), tensors)

    def read_reconstruction(self, round: int, client: int, attack: str) -> dict[str, Tensor]:
        """An attack's reconstruction; TapeError if there is none."""
        return read_tensors(self.reconstruction(round, client, attack))

    def memory(self, round: int, client: int, attack: str) -> Path:
        """The file of what a stateful attack remembers of a client after a round."""
        return self.folder / "memories" / f"round-{round:05d}-client-{client:05d}-{attack}.safetensors"

    def write_memory(self, round: int, client: int, attack: str, tensors: Mapping[str, Tensor]) -> str:
        """Write what an attack remembers; returns its digest."""
        return write_tensors(self._own(self.memory(round, client, attack)), tensors)

    def read_memory(self, round: int, client: int, attack: str, digest: str | None = None) -> dict[str, Tensor]:
        """What an attack remembered; TapeError if it is missing, damaged, or does not match the ledger's digest."""
        return read_tensors(self.memory(round, client, attack), digest)

    def _own(self, path: Path) -> Path:
        """A path checked to lie in this run: in somebody else's ledger an attack may have any name, such as ../../x."""
        if (
            path.name != os.path.basename(os.path.normpath(path))
            or path.parent.parent != self.folder
            or "\0" in path.name
        ):
            raise LedgerError(
                f"{self.folder}: an attack in its ledger has a name that cannot be part of a file's name: {path.name!r}"
            )
        return path

    def sweep(self, round: int) -> None:
        """Delete all files of the rounds from this one on, which are trained again; the ledger's rows stay."""
        for name in ROUNDS:
            sweep(self.folder / name, round)
        for scrap in (self.folder / "tape").glob(".part-*"):  # left by a killed server; nobody else writes there
            scrap.unlink()

    @contextmanager
    def lock(self, purpose: str) -> Iterator[None]:
        """Lock this run for one purpose ("audit", "training"); RunBusy names the holder. A process that dies loses its lock."""
        with self._private(f"{purpose}.lock").open("a+") as file:
            for attempt in range(10):  # a process that only asks for the holder locks the file for a moment
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if attempt == 9:
                        file.seek(0)
                        holder = file.read().strip() or "?"
                        raise RunBusy(f"{self.folder}: process {holder} holds its {purpose}") from error
                    time.sleep(0.02)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def holder(self, purpose: str) -> int | None:
        """The process that holds the lock for a purpose, or None."""
        path = self.folder / f"{purpose}.lock"
        if not path.exists():
            return None
        while True:
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return None
                except BlockingIOError:
                    if pid := file.read():
                        return int(pid)
            time.sleep(0.02)  # the holder has the lock but has not written its process id yet
