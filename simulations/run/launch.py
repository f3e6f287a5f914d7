"""Runs Flower in child processes: a SuperLink, the app in a scratch folder, and the run's true exit status."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tomli_w

from fedgauge.client.local_data import data_folder
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run import processes

_APP = {
    "project": {
        "name": "fedgauge-app",
        "version": "0.1.0",
        "description": "fedgauge",
        "license": "MIT",
        "dependencies": [],
    },
    "tool": {
        "flwr": {
            "app": {
                "publisher": "fedgauge",
                "components": {"serverapp": "fedgauge.server.app:app", "clientapp": "fedgauge.client.app:app"},
                "config": {"protocol": "", "run-dir": ""},
            }
        }
    },
}
_SETTINGS = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # the app runs in this environment
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
PATIENCE = 120.0  # seconds for the SuperLink to start, and to answer


class TrainingFailed(Exception):
    """The federation failed; the message names its log and shows the end of it."""


class AuditFailed(Exception):
    """The attack service died repeatedly; the message names its log and shows the end of it."""


class TrainingProcess:
    """One federation in training; its processes start on entry and end on exit, with everything they started."""

    def __init__(self, run: Run, scenario: Scenario) -> None:
        self.run = run
        self.scenario = scenario
        self.mark = uuid.uuid4().hex
        self.scratch = Path(tempfile.mkdtemp(prefix="fedgauge-"))  # short: Ray's sockets live below it
        self._children: list[subprocess.Popen[bytes]] = []
        self._submission: Submission | None = None

    def __enter__(self) -> "TrainingProcess":
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of this training and remove the scratch folder."""
        try:
            for child in reversed(self._children):
                processes.end(child)
        finally:  # also after a second Ctrl-C, which interrupts the orderly end
            processes.sweep(self.mark)
            shutil.rmtree(self.scratch, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """The environment of the child processes."""
        return child_environment(self.scratch, self.mark) | {"FLWR_HOME": str(self.scratch / "home")}

    def finished(self) -> bool:
        """Whether the federation has ended, successfully or not; TrainingFailed if the SuperLink died."""
        superlink, stream = self._children
        if stream.poll() is None and superlink.poll() is not None:
            raise TrainingFailed(self._blame("the SuperLink died"))
        return stream.poll() is not None

    def verify(self) -> None:
        """Ask the SuperLink how the run ended, as `flwr run --stream` exits with 0 even after a failure."""
        assert self._submission is not None
        status = self._submission.status(self._blame)
        if status != "finished:completed":
            raise TrainingFailed(self._blame(status))

    def _start(self) -> None:
        port = processes.free_port()
        write_app(self.scratch, self.run, self.scenario)
        write_home(self.scratch, {"address": f"127.0.0.1:{port}", "insecure": True})
        superlink = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
        env = self.environment()
        self._children.append(processes.start([*superlink, "--port", str(port)], self.run.log("superlink.log"), env))
        deadline = time.monotonic() + PATIENCE
        while not processes.listens(port):
            if self._children[0].poll() is not None or time.monotonic() > deadline:
                raise TrainingFailed(self._blame("the SuperLink did not start"))
            time.sleep(0.1)
        parallel = min(self.scenario.simulation.parallel_clients, self.scenario.protocol.clients)
        federation = (
            f"num-supernodes={self.scenario.protocol.clients} client-resources-num-cpus=1 "
            f"init-args-num-cpus={parallel} init-args-log-to-driver=false"
        )
        log = self.run.log("flower.log")
        self._submission = Submission(self.scratch, log, env, ["--federation-config", federation])
        self._children.append(self._submission.process)

    def _blame(self, what: str) -> str:
        return blame(self.run, f"the federation failed: {what}", "flower.log", "superlink.log")


class _OwnProcess:
    """One process of ours beside the driver, with everything that it starts."""

    def __init__(self, run: Run, log: str, *arguments: str) -> None:
        self.run = run
        self.log = log
        self.mark = uuid.uuid4().hex
        self.scratch = Path(tempfile.mkdtemp(prefix="fedgauge-"))
        env = child_environment(self.scratch, self.mark)
        self._child = processes.start([sys.executable, "-P", "-m", *arguments], run.log(log), env)

    def status(self) -> int | None:
        """Its exit status, or None while it works."""
        return self._child.poll()

    def close(self) -> None:
        """End it with everything it started, and remove its scratch folder."""
        try:
            processes.end(self._child, patience=1.0)  # a service still at work is closed only by a second Ctrl-C
        finally:
            processes.sweep(self.mark)
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _blame(self, what: str) -> str:
        return blame(self.run, f"{what} (exit status {self.status()})", self.log)


class AuditService(_OwnProcess):
    """The attack service that runs during training: `fedgauge audit RUN --follow` in its own process."""

    def __init__(self, run: Run) -> None:
        command = ("fedgauge.simulations.cli.main", "audit", str(run.folder.resolve()), "--follow")
        super().__init__(run, "audit.log", *command)

    def park(self) -> None:
        """Ask it to finish what is in flight and take nothing more."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def blame(self) -> str:
        """A message that it died, with the end of its log."""
        return self._blame("the attack service died")


class InMemoryTraining(_OwnProcess):
    """A federation in training in one process: Flower's messages without its transport; ends on exit."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, "training.log", "fedgauge.simulations.run.in_memory", str(run.folder.resolve()))

    def __enter__(self) -> "InMemoryTraining":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def finished(self) -> bool:
        """Whether the federation has ended, successfully or not."""
        return self.status() is not None

    def verify(self) -> None:
        """Raise TrainingFailed if it ended in a failure."""
        if self.status() != 0:
            raise TrainingFailed(self._blame("the federation failed: its process died"))


def write_app(scratch: Path, run: Run, scenario: Scenario) -> None:
    """Write the Flower app and its run-config into a scratch folder.

    Flower sends everything in the app's folder to every client. It holds a pyproject.toml and no code: server and clients run
    the fedgauge that is installed on their own machine.
    """
    (scratch / "app").mkdir()
    (scratch / "app" / "pyproject.toml").write_text(tomli_w.dumps(_APP))
    settings = {"protocol": scenario.protocol.to_json(), "run-dir": str(run.folder.resolve())}
    (scratch / "run-config.toml").write_text(tomli_w.dumps(settings))


def write_home(scratch: Path, link: Mapping[str, object]) -> None:
    """Write Flower's own settings into a scratch folder: how its commands reach the SuperLink."""
    (scratch / "home").mkdir()
    links = {"default": "fedgauge", "fedgauge": link}
    (scratch / "home" / "config.toml").write_text(tomli_w.dumps({"superlink": links}))


class Submission:
    """A Flower run: the app of a scratch folder, submitted to the SuperLink and logged until it ends."""

    def __init__(self, scratch: Path, log: Path, env: Mapping[str, str], more: Sequence[str] = ()) -> None:
        self._log, self._env, self._since = log, env, log.stat().st_size
        settings = ["--run-config", str(scratch / "run-config.toml")]
        command = ["flwr", "run", str(scratch / "app"), "fedgauge", "--stream", *settings, *more]
        self.process = processes.start(command, log, env)

    def stop(self) -> None:
        """Let the SuperLink end the run, if it has started; print a message if that fails, as the run may still train."""
        if run := self._run():
            command = ["flwr", "stop", run, "fedgauge"]
            try:
                done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                print(
                    f"fedgauge: Flower's run {run} could not be stopped: the SuperLink does not answer", file=sys.stderr
                )
                return
            if done.returncode:
                output = (done.stderr.strip() or done.stdout.strip())[-500:]
                print(f"fedgauge: Flower's run {run} could not be stopped: {output}", file=sys.stderr)

    def status(self, blame: Callable[[str], str]) -> str:
        """The run's status at the SuperLink; TrainingFailed if there is none.

        Args:
            blame: makes the error's message from what went wrong.
        """
        if not (run := self._run()):
            raise TrainingFailed(blame("it never started"))
        try:
            listing = subprocess.run(
                ["flwr", "ls", "fedgauge", "--run-id", run, "--format", "json"],
                env=self._env,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                start_new_session=True,  # a Ctrl-C in the terminal must not reach it
            )
        except subprocess.TimeoutExpired:
            raise TrainingFailed(blame(f"its status is unknown: no answer in {PATIENCE:.0f} s")) from None
        try:
            return str(json.loads(listing.stdout)["runs"][0]["status"])
        except (json.JSONDecodeError, KeyError, IndexError, TypeError):
            output = listing.stderr.strip() or listing.stdout.strip()
            raise TrainingFailed(blame(f"its status is unknown: {output[-300:]}")) from None

    def _run(self) -> str:
        """Its id, from the submission's log; "" if the submission did not get that far."""
        with self._log.open("rb") as log:
            log.seek(self._since)
            found = re.search(rb"started run (\d+)", log.read())
        return found[1].decode() if found else ""


def blame(run: Run, what: str, *logs: str) -> str:
    """A message: what went wrong, and the ends of these logs of a run."""
    return with_ends(what, *(run.folder / "logs" / name for name in logs))


def with_ends(what: str, *logs: Path) -> str:
    """A message: what went wrong, and the ends of these logs."""
    parts = [what]
    for path in logs:
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        if lines:
            parts += [f"--- the end of {path}:", *lines[-12:]]
    return "\n".join(parts)


def child_environment(scratch: Path, mark: str) -> dict[str, str]:
    """The environment of a child process.

    It is this process's, with a mark by which children are found, Ray's files in the scratch folder, and the data folder.
    """
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}  # it would break Flower's own ray.init
    data = data_folder()
    env |= {processes.MARK: mark, "RAY_TMPDIR": str(scratch / "ray"), **_SETTINGS}
    # Flower starts its own programs, which lie beside Python's
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    if data is not None:  # absolute, as children may run in another folder
        env["FEDGAUGE_DATA"] = str(data.resolve())
    (scratch / "ray").mkdir(exist_ok=True)
    return env
