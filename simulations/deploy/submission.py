"""Submit the app and the settings of a deployment's run to the SuperLink, and query its status."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import tomli_w

from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run import processes
from fedgauge.simulations.run.launch import TrainingFailed
from fedgauge.simulations.run.simulate import POLL

_APP = """
[project]
name = "fedgauge-app"
version = "0.1.0"
description = "fedgauge"
license = "MIT"
dependencies = []
[tool.flwr.app]
publisher = "fedgauge"
components = { serverapp = "fedgauge.server.app:app", clientapp = "fedgauge.client.app:app" }
config = { protocol = "", run-dir = "" }
"""
PATIENCE = 120.0  # seconds for the SuperLink to start, and to answer


def write_app(scratch: Path, run: Run, scenario: Scenario) -> None:
    """Write the Flower app and its run-config into a scratch folder.

    Flower sends everything in the app's folder to every client. It holds a pyproject.toml and no code: server and clients run
    the fedgauge that is installed on their own machine.
    """
    (scratch / "app").mkdir()
    (scratch / "app" / "pyproject.toml").write_text(_APP)
    settings = {"protocol": scenario.protocol.to_json(), "run-dir": str(run.folder.absolute())}
    (scratch / "run-config.toml").write_text(tomli_w.dumps(settings))


def write_home(scratch: Path, link: Mapping[str, object]) -> None:
    """Write Flower's own settings into a scratch folder: how its commands reach the SuperLink."""
    (scratch / "home").mkdir()
    links = {"default": "fedgauge", "fedgauge": link}
    (scratch / "home" / "config.toml").write_text(tomli_w.dumps({"superlink": links}))


def ask(env: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Carry out a command of Flower; a Ctrl-C in the terminal does not reach it."""
    command = ["flwr", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, start_new_session=True)


class Submission:
    """A Flower run: the app of a scratch folder, submitted to the SuperLink and logged until it ends."""

    def __init__(self, scratch: Path, log: Path, env: Mapping[str, str]) -> None:
        self._log, self._env, self._since = log, env, log.stat().st_size
        settings = ["--run-config", str(scratch / "run-config.toml")]
        command = ["flwr", "run", str(scratch / "app"), "fedgauge", "--stream", *settings]
        self.process = processes.start(command, log, env)

    def stop(self) -> None:
        """Let the SuperLink end the run, if it has started; print a message if that fails, as the run may still train."""
        if run := self._run():
            try:
                done = ask(self._env, "stop", run, "fedgauge")
                output = done.stderr.strip() or done.stdout.strip() if done.returncode else ""
            except subprocess.TimeoutExpired:
                output = "the SuperLink does not answer"
            if output:
                print(f"fedgauge: Flower's run {run} could not be stopped: {output[-500:]}", file=sys.stderr)

    def wait(self, blame: Callable[[str], str], stopped: Callable[[], bool]) -> str:
        """Wait for the run's end; return its status, or the last one if `stopped`.

        The log's stream ends with the SuperLink. The run continues if the SuperLink comes back within PATIENCE seconds.

        Raises:
            TrainingFailed: the run never started, or the SuperLink does not answer.
        """
        while self.process.poll() is None and not stopped():
            time.sleep(POLL)
        answered, status = time.monotonic(), ""
        while not stopped() and not status.startswith("finished"):
            try:
                status, answered = self.status(blame), time.monotonic()
            except TrainingFailed:
                if not self._run() or time.monotonic() - answered > PATIENCE:
                    raise
            time.sleep(POLL)
        return status

    def status(self, blame: Callable[[str], str]) -> str:
        """The run's status at the SuperLink; TrainingFailed, with the message that `blame` makes, if there is none."""
        output = "it never started"
        if run := self._run():
            try:
                listing = ask(self._env, "ls", "fedgauge", "--run-id", run, "--format", "json")
                output = f"its status is unknown: {(listing.stderr.strip() or listing.stdout.strip())[-300:]}"
                return str(json.loads(listing.stdout)["runs"][0]["status"])
            except subprocess.TimeoutExpired:
                output = f"its status is unknown: no answer in {PATIENCE:.0f} s"
            except (json.JSONDecodeError, KeyError, IndexError, TypeError):
                pass
        raise TrainingFailed(blame(output))

    def _run(self) -> str:
        """Its id, from the submission's log; "" if the submission did not get that far."""
        with self._log.open("rb") as log:
            log.seek(self._since)
            found = re.search(rb"started run (\d+)", log.read())
        return found[1].decode() if found else ""
