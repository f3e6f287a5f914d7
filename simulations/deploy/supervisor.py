"""Supervises all processes of a deployment on one machine: starts them, restarts those that die, ends them together."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path

from fedgauge.client.files import replacing
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.deploy.services import Addresses, services
from fedgauge.simulations.deploy.submission import PATIENCE
from fedgauge.simulations.run import launch, processes
from fedgauge.simulations.run.launch import TrainingFailed

FACTS = "up.json"  # a local start's file for `down`
# deaths of one service before it is given up: the SuperLink readmits a killed node after a minute at the earliest
DEATHS = 20
NEEDED = ("superlink", "serverapp")  # without these there is no training, so the whole start fails
PAUSE = 3.0  # seconds before a dead service is restarted


class LocalDeployment:
    """All processes of a deployment on this machine's loopback address, with the commands of docker-compose.yml.

    Ray's cluster is none of them: its nodes would listen on every interface. The attack service starts a Ray of its own.
    """

    def __init__(self, deployment: Deployment, run: str) -> None:
        self.deployment = deployment
        self.addresses = Addresses.local(str(deployment.folder.resolve()), run, deployment.clients)
        self.services = services(self.addresses, deployment.clients)
        self.mark = uuid.uuid4().hex
        self.scratch = Path(tempfile.mkdtemp(prefix="fedgauge-"))  # short: Ray's sockets live below it
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.deaths: dict[str, int] = {}
        self.given_up: dict[str, str] = {}  # services that died repeatedly, with the end of their logs
        self._restart_at: dict[str, float] = {}

    def close(self) -> None:
        """End every process, whatever it does."""
        with ExitStack() as cleanup:  # each is ended, even if ending another one fails
            cleanup.callback(shutil.rmtree, self.scratch, ignore_errors=True)
            cleanup.callback(processes.sweep, self.mark)
            for child in self.children.values():
                cleanup.callback(processes.end, child)
            for child in self.children.values():  # all at once, as some take seconds to end
                if child.poll() is None:
                    child.terminate()

    def begin(self, name: str) -> None:
        log = self.deployment.log(name)
        self.children[name] = processes.start(self.services[name].command, log, self._environment(name))
        facts = {"mark": self.mark, "pids": {service: child.pid for service, child in self.children.items()}}
        with replacing(self.deployment.folder / FACTS) as file:
            file.write(json.dumps(facts).encode())

    def finish(self, name: str) -> None:
        """Start a service that does its work once, and wait for it.

        Raises:
            TrainingFailed: it fails.
        """
        self.begin(name)
        if status := self.children[name].wait():
            raise TrainingFailed(self.blame(name, f"exit status {status}"))

    def listen(self) -> None:
        self.begin("superlink")
        deadline = time.monotonic() + PATIENCE
        while not processes.listens(self.addresses.superlink[1]):
            if self.children["superlink"].poll() is not None or time.monotonic() > deadline:
                raise TrainingFailed(self.blame("superlink", "it did not start"))
            time.sleep(0.1)

    def poll(self) -> None:
        """Restart services that died, as Docker does, and give up one that dies repeatedly; the others continue.

        Raises:
            TrainingFailed: the service that is given up is one of NEEDED.
        """
        now = time.monotonic()
        for name, child in list(self.children.items()):
            status, restart = child.poll(), self.services[name].restart
            if status is None or restart == "no" or (restart == "on-failure" and status == 0) or name in self.given_up:
                continue
            if name not in self._restart_at:
                self.deaths[name] = self.deaths.get(name, 0) + 1
                if self.deaths[name] > DEATHS:
                    message = self.blame(name, f"exit status {status}, {DEATHS} times")
                    if name in NEEDED:
                        raise TrainingFailed(message)
                    self.given_up[name] = message
                    print(f"fedgauge: it continues without {name}: {message}", file=sys.stderr)
                    continue
                self._restart_at[name] = now + PAUSE
            elif now >= self._restart_at[name]:
                del self._restart_at[name]
                with suppress(ProcessLookupError):  # what it had started would hold its port, or answer in its place
                    os.killpg(child.pid, signal.SIGKILL)
                self.begin(name)

    def status(self, name: str) -> int | None:
        """A service's exit status, or None while it works."""
        return self.children[name].poll()

    def blame(self, name: str, what: str) -> str:
        return launch.with_ends(f"the deployment failed: {name}: {what}", self.deployment.log(name))

    def _environment(self, name: str) -> dict[str, str]:
        home = self.scratch / name
        home.mkdir(exist_ok=True)
        return launch.child_environment(self.scratch, self.mark) | {"FLWR_HOME": str(home)}
