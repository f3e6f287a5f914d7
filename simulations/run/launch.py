"""Drive Flower: a SuperLink of our own as child process, the app in a scratch folder, the run's true exit status."""

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
    """The federation ended badly; the message says where its log is and shows its end."""


class AuditFailed(Exception):
    """The attack service died again and again; the message says where its log is and shows its end."""


class TrainingProcess:
    """One federation in training: started on entry, ended with everything it started on exit."""

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
        finally:  # a second Ctrl-C cuts the asking short
            processes.sweep(self.mark)
            shutil.rmtree(self.scratch, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """What the children's environment says."""
        return child_environment(self.scratch, self.mark) | {"FLWR_HOME": str(self.scratch / "home")}

    def finished(self) -> bool:
        """Whether the federation has ended, well or not; raises TrainingFailed when the SuperLink died."""
        superlink, stream = self._children
        if stream.poll() is None and superlink.poll() is not None:
            raise TrainingFailed(self._blame("the SuperLink died"))
        return stream.poll() is not None

    def verify(self) -> None:
        """Ask the SuperLink how the run ended: `flwr run --stream` exits 0 even when it failed."""
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


class AuditService:
    """The attack service beside the training: `fedgauge audit RUN --follow` in a process of its own."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.mark = uuid.uuid4().hex
        self.scratch = Path(tempfile.mkdtemp(prefix="fedgauge-"))
        command = [
            sys.executable,
            "-m",
            "fedgauge.simulations.cli.main",
            "audit",
            str(run.folder.resolve()),
            "--follow",
        ]
        env = child_environment(self.scratch, self.mark)
        self._child = processes.start(command, run.log("audit.log"), env)

    def status(self) -> int | None:
        """Its exit status, or None while it works."""
        return self._child.poll()

    def park(self) -> None:
        """Ask it to finish what is in flight and take nothing more."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End it with everything it started, and remove its scratch folder."""
        try:
            processes.end(self._child, patience=1.0)  # while it works, it is closed by a user who waits no longer
        finally:
            processes.sweep(self.mark)
            shutil.rmtree(self.scratch, ignore_errors=True)

    def blame(self) -> str:
        """That it died, and the end of its log."""
        return blame(self.run, f"the attack service died (exit status {self.status()})", "audit.log")


def write_app(scratch: Path, run: Run, scenario: Scenario) -> None:
    """Put the Flower app, and what it is told of the run, into a scratch folder."""
    (scratch / "app").mkdir()  # what is in it goes to every client: no code, as each has fedgauge installed
    (scratch / "app" / "pyproject.toml").write_text(tomli_w.dumps(_APP))
    settings = {"protocol": scenario.protocol.to_json(), "run-dir": str(run.folder.resolve())}
    (scratch / "run-config.toml").write_text(tomli_w.dumps(settings))


def write_home(scratch: Path, link: Mapping[str, object]) -> None:
    """Put Flower's own settings into a scratch folder: how its commands reach the SuperLink."""
    (scratch / "home").mkdir()
    links = {"default": "fedgauge", "fedgauge": link}
    (scratch / "home" / "config.toml").write_text(tomli_w.dumps({"superlink": links}))


class Submission:
    """The app of a scratch folder, given to the SuperLink to be run, with its log until it has ended."""

    def __init__(self, scratch: Path, log: Path, env: Mapping[str, str], more: Sequence[str] = ()) -> None:
        self._log, self._env, self._since = log, env, log.stat().st_size
        settings = ["--run-config", str(scratch / "run-config.toml")]
        command = ["flwr", "run", str(scratch / "app"), "fedgauge", "--stream", *settings, *more]
        self.process = processes.start(command, log, env)

    def stop(self) -> None:
        """Have the SuperLink end the run, where it has begun; where that fails it says so, as the run may train on."""
        if run := self._run():
            command = ["flwr", "stop", run, "fedgauge"]
            try:
                done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                print(f"fedgauge: Flower's run {run} could not be stopped: the SuperLink is silent", file=sys.stderr)
                return
            if done.returncode:
                said = (done.stderr.strip() or done.stdout.strip())[-500:]
                print(f"fedgauge: Flower's run {run} could not be stopped: {said}", file=sys.stderr)

    def status(self, told: Callable[[str], str]) -> str:
        """What the SuperLink says of the run; TrainingFailed when it says nothing."""
        if not (run := self._run()):
            raise TrainingFailed(told("it never began"))
        try:
            listing = subprocess.run(
                ["flwr", "ls", "fedgauge", "--run-id", run, "--format", "json"],
                env=self._env,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                start_new_session=True,  # a Ctrl-C of the terminal's is not for it
            )
        except subprocess.TimeoutExpired:
            raise TrainingFailed(told(f"its status is unknown: no answer in {PATIENCE:.0f} s")) from None
        try:
            return str(json.loads(listing.stdout)["runs"][0]["status"])
        except (json.JSONDecodeError, KeyError, IndexError, TypeError):
            said = listing.stderr.strip() or listing.stdout.strip()
            raise TrainingFailed(told(f"its status is unknown: {said[-300:]}")) from None

    def _run(self) -> str:
        """Its id, as the submission told it; "" where it did not get so far."""
        with self._log.open("rb") as told:
            told.seek(self._since)
            found = re.search(rb"started run (\d+)", told.read())
        return found[1].decode() if found else ""


def blame(run: Run, what: str, *logs: str) -> str:
    """What went wrong, and the ends of the logs of a run that say why."""
    return with_ends(what, *(run.folder / "logs" / name for name in logs))


def with_ends(what: str, *logs: Path) -> str:
    """What went wrong, and the ends of the logs that say why."""
    parts = [what]
    for path in logs:
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        if lines:
            parts += [f"--- the end of {path}:", *lines[-12:]]
    return "\n".join(parts)


def child_environment(scratch: Path, mark: str) -> dict[str, str]:
    """This process's environment, with a mark to find children by, Ray's files in the scratch folder, and one data folder."""
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}  # it would break Flower's own ray.init
    data = data_folder()
    env |= {processes.MARK: mark, "RAY_TMPDIR": str(scratch / "ray"), **_SETTINGS}
    env["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), env.get("PATH", "")]
    )  # Flower starts its own programs
    if data is not None:  # the copied code stands elsewhere and would not find the folder beside the project
        env["FEDGAUGE_DATA"] = str(data.resolve())
    (scratch / "ray").mkdir(exist_ok=True)
    return env
