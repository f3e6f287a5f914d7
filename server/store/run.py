"""A run is a folder: scenario.toml, environment.json, ledger.sqlite, checkpoint.json, tape/, reconstructions/, memories/, ..."""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedgauge.attacks.modality.registry import MODALITIES
from fedgauge.client import toml_text
from fedgauge.client.components import coerce, resolve
from fedgauge.client.federation import DATASET
from fedgauge.client.files import SCRAP
from fedgauge.server.store import run_files
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import MOST, LedgerError
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import Tape, TapeError, read_tensors, write_tensors

ROUNDS = ("tape", "reconstructions", "memories")  # folders whose files are named by their round
_MOST_RECONSTRUCTED = 1 << 30  # bytes of a reconstruction
BASE = "base"  # key in the ledger's meta table: the folder of a user's audit file
WEIGHTS = "weights.safetensors"  # what [model] weights named when the run began


class RunBusy(Exception):
    """Another process works on this run; the message names it."""


class NotResumable(LedgerError):
    """A training cannot be resumed; the message says why and what to do."""


@dataclass(frozen=True)
class Run:
    """Run folder: its paths, files and locks."""

    folder: Path

    def __post_init__(self) -> None:
        # only the run itself may be named by a link
        if self.folder.is_symlink() or self.folder.name in ("", ".."):
            object.__setattr__(self, "folder", self.folder.resolve())

    @classmethod
    def create(cls, folder: Path, scenario: Scenario | str) -> "Run":
        """Create a run folder that only its owner may read, as it holds personal data.

        Args:
            scenario: or a user's text, which is read at the audit.

        Raises:
            FileExistsError: the folder exists.
        """
        folder.mkdir(parents=True, mode=0o700)
        for part in ("tape", "reconstructions", "logs"):
            (folder / part).mkdir(mode=0o700)
        run = cls(folder)
        text = scenario if isinstance(scenario, str) else scenario.to_toml()
        run_files.write(folder / "scenario.toml", text.encode())
        if isinstance(scenario, Scenario) and (weights := scenario.protocol.model.get("weights")):
            with open(weights, "rb") as given, run_files.replacing(folder / WEIGHTS) as copy:
                shutil.copyfileobj(given, copy)
        unfinished = run._private(".part-ledger.sqlite")  # SQLite's other files get its mode
        Ledger(unfinished, create=True).close()
        unfinished.replace(folder / "ledger.sqlite")
        return run

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """Open an existing run.

        Raises:
            LedgerError: the folder is no run.
        """
        missing = [name for name in ("ledger.sqlite", "scenario.toml") if not os.path.lexists(folder / name)]
        if missing:
            raise LedgerError(f"{folder} is not a run folder: it has no {' and no '.join(missing)}")
        return cls(folder)

    @property
    def name(self) -> str:
        return self.folder.name

    def scenario(self, settings: Sequence[str] = ()) -> Scenario:
        """Load the scenario with further settings; [model] weights are the run's copy."""
        path, weights = self.folder / "scenario.toml", (self.folder / WEIGHTS).absolute()
        own = [f"model.weights={json.dumps(str(weights), ensure_ascii=False)}"] if run_files.look(weights) else []
        with self.ledger(readonly=True) as ledger:
            base = ledger.meta().get(BASE)
        return Scenario.load(path, [*own, *settings], read=run_files.read, base=Path(base) if base else None)

    def ledger(self, readonly: bool = False) -> Ledger:
        ledger = Ledger(self.folder / "ledger.sqlite", readonly=readonly)
        ledger.load_data = self._load_data
        return ledger

    def _load_data(self) -> None:
        """Load the module of the dataset, which may add a kind of data."""
        data = toml_text.parse(run_files.read(self.folder / "scenario.toml", toml_text.MOST)).get("data")
        resolve(coerce(data, dict, "[data]"), "[data]", DATASET)

    def tape(self) -> Tape:
        return Tape(self.folder / "tape")

    @property
    def model(self) -> Path:
        """File of the trained model, which is written last."""
        return self.folder / "model.safetensors"

    def log(self, name: str) -> Path:
        return self._private(f"logs/{name}")

    def _private(self, name: str) -> Path:
        """Create a file that only its owner may read, if it is missing."""
        path = self.folder / name
        os.close(run_files.opened(path, os.O_RDWR | os.O_CREAT))
        return path

    def reconstruction(self, round: int, client: int, attack: str) -> Path:
        """Return the file of a reconstruction: x (B, C, H, W), and y if the attack claims labels."""
        return self._of_attack("reconstructions", round, client, attack)

    def memory(self, round: int, client: int, attack: str) -> Path:
        """Return the file of a stateful attack's memory of a client after a round."""
        return self._of_attack("memories", round, client, attack)

    def _of_attack(self, folder: str, round: int, client: int, attack: str) -> Path:
        if "/" in attack or "\0" in attack:  # of a foreign ledger
            raise LedgerError(f"{self.folder}: an attack's name cannot be part of a file's name: {attack!r}")
        return self.folder / folder / f"round-{round:05d}-client-{client:05d}-{attack}.safetensors"

    def write_reconstruction(self, round: int, client: int, attack: str, tensors: dict[str, Tensor]) -> None:
        write_tensors(self.reconstruction(round, client, attack), tensors)

    def read_reconstruction(self, round: int, client: int, attack: str) -> dict[str, Tensor]:
        """Read an attack's reconstruction.

        Raises:
            TapeError: it is missing or damaged.
        """
        path = self.reconstruction(round, client, attack)
        tensors = read_tensors(path, most=_MOST_RECONSTRUCTED)
        if not _fit(tensors):
            raise TapeError(f"{path} is damaged: its tensors are no reconstruction")
        return tensors

    def write_memory(self, round: int, client: int, attack: str, tensors: Mapping[str, Tensor]) -> str:
        return write_tensors(self.memory(round, client, attack), tensors)

    def read_memory(self, round: int, client: int, attack: str, digest: str | None = None) -> dict[str, Tensor]:
        """Read an attack's memory.

        Raises:
            TapeError: it is missing, damaged, or differs from the digest.
        """
        return read_tensors(self.memory(round, client, attack), digest)

    def sweep(self, round: int) -> None:
        """Delete the files of the rounds from this one on, and those that a killed server left on the tape."""
        for part in ROUNDS:
            for name in run_files.names(self.folder / part):
                named = re.match(r"round-(\d{1,9})(?!\d)", name)
                unfinished = part == "tape" and name.startswith(SCRAP)
                if unfinished or (named is not None and int(named[1]) >= round):
                    run_files.delete(self.folder / part / name)

    @contextmanager
    def lock(self, purpose: str) -> Iterator[None]:
        """Lock this run for one purpose ("audit", "training"); a process that dies loses its lock.

        Raises:
            RunBusy: another process has the lock; the message names it.
        """
        with os.fdopen(run_files.opened(self._lock(purpose), os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+") as file:
            for attempt in range(10):  # `_written` locks the file for a moment
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if attempt == 9:
                        file.seek(0)
                        raise RunBusy(f"{self.folder}: process {file.read() or '?'} uses it for {purpose}") from error
                    time.sleep(0.02)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def holder(self, purpose: str) -> int | None:
        """Return the process with the lock for a purpose; None without one, or before it has written its number."""
        pid = self._written(purpose)
        return int(pid) if pid and re.fullmatch(r"[1-9]\d{0,9}", pid) else None

    def at_work(self, purpose: str) -> bool:
        return self._written(purpose) is not None

    def _written(self, purpose: str) -> str | None:
        """Return the content of a lock, or None if it is free."""
        if run_files.look(self._lock(purpose)) is None:
            return None
        with os.fdopen(run_files.opened(self._lock(purpose)), errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                return file.read(11)

    def _lock(self, purpose: str) -> Path:
        return self.folder / f"{purpose}.lock"


def _fit(tensors: Mapping[str, Tensor]) -> bool:
    """Check the names, shapes and types of a reconstruction's tensors."""
    x, y, sure, example = (tensors.get(name) for name in ("x", "y", "confidence", "example"))
    if y is not None and (not y.dim() or (y.dim() == 1 and not y.is_floating_point() and not _within(y, 0))):
        return False
    if x is None:
        return sure is None and example is None
    fits = any(modality.holds(x) for modality in MODALITIES.values()) and (y is None or len(y) == len(x))
    if sure is not None:
        fits = fits and sure.dim() == 2 and len(sure) == len(x) and sure.is_floating_point()
    if example is not None:
        fits &= example.shape == x.shape[:1] and example.dtype == torch.int64 and _within(example, -1)
        fits = fits and (not len(x) or (int(example.max()) + 1) * x[0].nbytes <= _MOST_RECONSTRUCTED)
    return bool(fits)


def _within(t: Tensor, least: int) -> bool:
    return not t.numel() or (int(t.min()) >= least and int(t.max()) <= MOST)
