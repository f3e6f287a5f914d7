"""The child processes of a run: the federation in training, and the attack service."""

import os
import shutil
import signal
import sys
import uuid
from pathlib import Path

from fedgauge.client.data_folder import data_folder
from fedgauge.server.child_processes import paths_from_here, scratch_folder
from fedgauge.server.pool.ray_security import SETTINGS, ray_access
from fedgauge.server.store import run_files
from fedgauge.server.store.ledger_types import sanitised
from fedgauge.server.store.run import Run
from fedgauge.simulations.run import processes

_SETTINGS = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # the app runs in this environment
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


class TrainingFailed(Exception):
    """The federation failed; the message names its log and shows the end of it."""


class AuditFailed(Exception):
    """The attack service died repeatedly; the message names its log and shows the end of it."""


class OwnProcess:
    """A child process of the driver, with everything that it starts; ray: it starts Ray."""

    def __init__(
        self, run: Run, log: str, *arguments: str, ray: bool = True, at_our_death: int = signal.SIGTERM
    ) -> None:
        self.run = run
        self.log = log
        self.mark = uuid.uuid4().hex
        self.scratch = scratch_folder()
        env = child_environment(self.scratch, self.mark) | (ray_access(self.scratch) if ray else {})
        # in a separate folder, as Ray's workers look for every package in their driver's current folder first
        command = [sys.executable, "-P", "-m", *arguments]
        self._child = processes.start(command, run.log(log), env, self.scratch, at_our_death)

    def status(self) -> int | None:
        return self._child.poll()

    def park(self) -> None:
        """Ask it to end in order; an attack service finishes what is in flight."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End it with everything it started, and remove its scratch folder."""
        try:
            processes.end(self._child, patience=1.0)  # a service still at work is closed only by a second Ctrl-C
        finally:
            processes.sweep(self.mark)
            shutil.rmtree(self.scratch, ignore_errors=True)

    def blame(self, what: str) -> str:
        """Return a message: what went wrong, its exit status and the end of its log."""
        return with_ends(f"{what} (exit status {self.status()})", self.run.folder / "logs" / self.log)

    def last_line(self) -> str:
        """Return the last line of its log, such as a download's retry."""
        return sanitised(_end(self.run.folder / "logs" / self.log).decode(errors="replace").strip().rpartition("\n")[2])


def attack_service(run: Run) -> OwnProcess:
    """Start the attack service that runs during training: `fedgauge audit RUN --follow`."""
    command = ("fedgauge.simulations.cli.main", "audit", str(run.folder.absolute()), "--follow")
    return OwnProcess(run, "audit.log", *command)


def training_process(run: Run, in_memory: bool) -> OwnProcess:
    """Start a federation's training; in_memory: Flower's messages without its simulation engine."""
    module = "in_memory" if in_memory else "simulation_engine"
    command = (f"fedgauge.simulations.run.{module}", str(run.folder.absolute()))
    # Ray answers SIGTERM by writing a stack trace first, which may not end; its own processes end with the training
    return OwnProcess(run, "flower.log", *command, at_our_death=signal.SIGKILL)


def with_ends(what: str, log: Path) -> str:
    lines = _end(log).decode(errors="replace").strip().splitlines()
    return "\n".join([what, f"--- the end of {log}:", *lines[-12:]] if lines else [what])


def _end(log: Path) -> bytes:
    """Return the last 64 KiB of a log; nothing if it is missing or no regular file."""
    try:
        with os.fdopen(run_files.opened(log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (64 << 10)))
            return file.read()
    except OSError:
        return b""


def child_environment(scratch: Path, mark: str) -> dict[str, str]:
    """The environment of a child process.

    It is this process's, with a mark by which children are found, Ray's files in the scratch folder, and the data folder.
    """
    # an address would break Flower's own ray.init; how Ray is reached is decided for each child anew
    env = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
    data = data_folder()
    env |= {processes.MARK: mark, "RAY_TMPDIR": str(scratch / "ray"), **_SETTINGS, **paths_from_here()}
    # Flower's programs are next to Python's
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    if data is not None:  # absolute, as children may run in another folder
        env["FEDGAUGE_DATA"] = str(data.resolve())
    (scratch / "ray").mkdir(exist_ok=True)
    return env
