"""All processes of a deployment on one machine: started by the table's commands, started again when they die, ended together."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

from fedgauge.server.store.tape import write_bytes
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.deploy.services import Addresses, Service, services
from fedgauge.simulations.run import launch, processes
from fedgauge.simulations.run.launch import TrainingFailed

FACTS = "up.json"  # what a local start tells `status` and `down`
# deaths of one service before it is given up: a node that was killed is let in again after a minute at the earliest
DEATHS = 20
NEEDED = ("superlink", "serverapp")  # without these nobody trains, and all is given up
PAUSE = 3.0  # seconds before a service that died is started again
MUTE = 60.0  # seconds after its start from which on a service that does not answer counts as failed


class LocalDeployment:
    """All processes of a deployment, on this machine's loopback address: the commands are those of docker-compose.yml."""

    def __init__(self, deployment: Deployment, run: str, with_ray: bool) -> None:
        self.deployment = deployment
        self.addresses = Addresses.local(str(deployment.folder.resolve()), run, deployment.clients)
        ray = ("ray-head", "ray-worker")
        table = services(self.addresses, deployment.clients)
        self.services = {k: s for k, s in table.items() if with_ray or k not in ray}
        self.with_ray = with_ray
        self.mark = uuid.uuid4().hex
        self.scratch = Path(tempfile.mkdtemp(prefix="fedgauge-"))  # short: Ray's sockets live below it
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.deaths: dict[str, int] = {}
        self.given_up: dict[str, str] = {}  # services that died again and again, and the end of their logs
        self._again: dict[str, float] = {}
        self._listened: dict[str, float] = {}  # when each was last asked whether it answers, or is first to be

    def __enter__(self) -> "LocalDeployment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process, whatever it does."""
        with ExitStack() as all_of_it:  # each is ended, however the end of another goes
            all_of_it.callback(shutil.rmtree, self.scratch, ignore_errors=True)
            all_of_it.callback(processes.sweep, self.mark)
            for child in self.children.values():
                all_of_it.callback(processes.end, child)
            for child in self.children.values():  # all at once: some take seconds
                if child.poll() is None:
                    child.terminate()

    def begin(self, name: str) -> None:
        """Start one service."""
        service = self.services[name]
        log = self.deployment.log(name)
        self.children[name] = processes.start(service.command, log, self._environment(name, service))
        self._listened[name] = time.monotonic() + MUTE
        self._write_facts()

    def finish(self, name: str) -> None:
        """Start one that does its work once, and wait for it; TrainingFailed when it fails."""
        self.begin(name)
        if status := self.children[name].wait():
            raise TrainingFailed(self.blame(name, f"exit status {status}"))

    def listen(self) -> None:
        """Start the SuperLink and wait until it answers."""
        self.begin("superlink")
        deadline = time.monotonic() + launch.PATIENCE
        while not processes.listens(self.addresses.superlink[1]):
            if self.children["superlink"].poll() is not None or time.monotonic() > deadline:
                raise TrainingFailed(self.blame("superlink", "it did not start"))
            time.sleep(0.1)

    def poll(self) -> None:
        """Start again what has died, as containers are, and give up what dies again and again: the others go on.

        Raises:
            TrainingFailed: what is given up is one of NEEDED.
        """
        now = time.monotonic()
        for name, child in list(self.children.items()):
            status, restart = child.poll(), self.services[name].restart
            if status is None and self._mute(name, now):
                processes.end(child)
            if status is None or restart == "no" or (restart == "on-failure" and status == 0) or name in self.given_up:
                continue
            if name not in self._again:
                self.deaths[name] = self.deaths.get(name, 0) + 1
                if self.deaths[name] > DEATHS:
                    self._give_up(name, status)
                    continue
                self._again[name] = now + PAUSE
            elif now >= self._again[name]:
                del self._again[name]
                _end_leftovers(child)
                self.begin(name)

    def _give_up(self, name: str, status: int) -> None:
        words = self.blame(name, f"exit status {status}, {DEATHS} times")
        if name in NEEDED:
            raise TrainingFailed(words)
        self.given_up[name] = words
        print(f"fedgauge: it goes on without {name}: {words}", file=sys.stderr)

    def _mute(self, name: str, now: float) -> bool:
        """Whether a service that lives should answer and does not; it is asked every few seconds."""
        port = self.services[name].answers
        if port is None or now < self._listened[name]:
            return False
        self._listened[name] = now + PAUSE
        return not processes.listens(port)

    def status(self, name: str) -> int | None:
        """A service's exit status, or None while it works."""
        return self.children[name].poll()

    def blame(self, name: str, what: str) -> str:
        """That a service failed, and the end of its log."""
        return launch.with_ends(f"the deployment failed: {name}: {what}", self.deployment.log(name))

    def _environment(self, name: str, service: Service) -> dict[str, str]:
        home = self.scratch / name
        home.mkdir(exist_ok=True)
        env = launch.child_environment(self.scratch, self.mark)
        extra = {k: v for k, v in service.environment.items() if self.with_ray or not k.startswith("RAY_")}
        return env | {"FLWR_HOME": str(home)} | extra

    def _write_facts(self) -> None:
        facts = {
            "mark": self.mark,
            "run": self.addresses.run,
            "dashboard": self.addresses.dashboard_address,
            "pids": {name: child.pid for name, child in self.children.items()},
        }
        write_bytes(self.deployment.folder / FACTS, json.dumps(facts, indent=1).encode())  # whole for whoever looks


def _end_leftovers(child: subprocess.Popen[bytes]) -> None:
    """What a service that died had started in its session would hold its port, or answer in its place."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:  # nobody is left
        return
