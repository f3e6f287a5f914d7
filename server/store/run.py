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

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import Tape, read_tensors, sweep, write_bytes, write_tensors

ROUNDS = ("tape", "reconstructions", "memories")  # folders whose files are named by their round
WEIGHTS = "weights.safetensors"  # what [model] weights named when the run began


class RunBusy(Exception):
    """Another process is at work on this run; the message names it."""


class NotResumable(LedgerError):
    """A training cannot go on; the message says why, and what can be done."""


@dataclass(frozen=True)
class Run:
    """Paths and doors of one run folder."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, scenario: Scenario) -> "Run":
        """A new run folder, for its owner only: what it holds can be inverted to personal data."""
        folder.mkdir(parents=True, mode=0o700)
        for part in ("tape", "reconstructions", "logs"):
            (folder / part).mkdir(mode=0o700)
        run = cls(folder)
        write_bytes(folder / "scenario.toml", scenario.to_toml().encode())
        if weights := scenario.protocol.model.get("weights"):
            shutil.copyfile(weights, run._private(WEIGHTS))
        begun = run._private(".part-ledger.sqlite")  # SQLite's own files beside a ledger get its mode
        Ledger(begun, create=True).close()
        begun.replace(folder / "ledger.sqlite")  # whole from the first moment: somebody may be waiting for it
        return run

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """An existing run; LedgerError when the folder is none."""
        missing = [name for name in ("ledger.sqlite", "scenario.toml") if not (folder / name).exists()]
        if missing:
            raise LedgerError(f"{folder} is not a run folder (no {' and '.join(missing)} in it)")
        return cls(folder)

    @property
    def name(self) -> str:
        """The run's id."""
        return self.folder.resolve().name

    def scenario(self, settings: Sequence[str] = ()) -> Scenario:
        """The scenario as it was run, settings applied; [model] weights are the run's own copy, wherever it is read from."""
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
        """Where the trained model is put, last of all: with it a training is complete."""
        return self.folder / "model.safetensors"

    def log(self, name: str) -> Path:
        """A log of the run, to be appended to."""
        return self._private(f"logs/{name}")

    def _private(self, name: str) -> Path:
        """A file of the run that only its owner may read, made where there is none."""
        path = self.folder / name
        path.touch(mode=0o600)
        return path

    def reconstruction(self, round: int, client: int, attack: str) -> Path:
        """Where an attack's images of one observation are kept: x (B, C, H, W), and y where labels were claimed."""
        return self.folder / "reconstructions" / f"round-{round:05d}-client-{client:05d}-{attack}.safetensors"

    def write_reconstruction(self, round: int, client: int, attack: str, tensors: dict[str, Tensor]) -> None:
        """Keep an attack's images."""
        write_tensors(self._own(self.reconstruction(round, client, attack)), tensors)

    def read_reconstruction(self, round: int, client: int, attack: str) -> dict[str, Tensor]:
        """An attack's images; TapeError when there are none."""
        return read_tensors(self.reconstruction(round, client, attack))

    def memory(self, round: int, client: int, attack: str) -> Path:
        """Where is kept what an attack with memory knew of a client after a round."""
        return self.folder / "memories" / f"round-{round:05d}-client-{client:05d}-{attack}.safetensors"

    def write_memory(self, round: int, client: int, attack: str, tensors: Mapping[str, Tensor]) -> str:
        """Keep what an attack remembers; returns its digest."""
        return write_tensors(self._own(self.memory(round, client, attack)), tensors)

    def read_memory(self, round: int, client: int, attack: str, digest: str | None = None) -> dict[str, Tensor]:
        """What an attack remembered; TapeError when it is missing, damaged, or not what the ledger's digest says."""
        return read_tensors(self.memory(round, client, attack), digest)

    def _own(self, path: Path) -> Path:
        """A path that is really below this run: in a ledger from elsewhere an attack may be called anything, ../../x too."""
        if (
            path.name != os.path.basename(os.path.normpath(path))
            or path.parent.parent != self.folder
            or "\0" in path.name
        ):
            raise LedgerError(f"{self.folder}: its ledger has an attack whose name is no file's name: {path.name!r}")
        return path

    def sweep(self, round: int) -> None:
        """Delete everything but the ledger's rows of the rounds from one on: they are trained again."""
        for name in ROUNDS:
            sweep(self.folder / name, round)
        for scrap in (self.folder / "tape").glob(".part-*"):  # of a server that was killed; there nobody else writes
            scrap.unlink()

    @contextmanager
    def lock(self, purpose: str) -> Iterator[None]:
        """Hold a purpose of this run alone ("audit", "training"); Busy names the holder. A dead holder holds nothing."""
        with self._private(f"{purpose}.lock").open("a+") as file:
            for attempt in range(10):  # somebody who only asks for the holder has the file for a moment
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
        """The living process that holds a purpose of this run, or None."""
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
            time.sleep(0.02)  # it holds the lock and is about to say who it is
