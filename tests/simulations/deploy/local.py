"""A deployment's processes on this machine's loopback address, with the commands of docker-compose.yml."""

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import yaml

from fedgauge.server.child_processes import scratch_folder
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.deploy.train import register
from fedgauge.simulations.run import launch, processes
from fedgauge.simulations.run.simulate import Interrupt
from tests.waiting import free_port, listens, wait_for

LOOPBACK, RUN = "127.0.0.1", "a-run"
COMPOSE = Path(__file__).resolve().parents[3] / "docker-compose.yml"


class LocalDeployment:
    """Services of a deployment, each in a process group of its own; Ray's cluster has one port."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.port, self.head, self.mark = deployment, free_port(), free_port(), uuid.uuid4().hex
        self.commands = {
            name: self.command(service["command"])
            for name, service in yaml.safe_load(COMPOSE.read_text())["services"].items()
        }
        self.scratch = scratch_folder()
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def superlink(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def command(self, words: Sequence[str]) -> tuple[str, ...]:
        """The same words in the same order; only folders, hosts and ports are others."""
        whole = {"0.0.0.0": LOOPBACK, "8000": str(self.port), "8765": str(free_port()), "9094": str(free_port())}
        parts = {
            "/deployment": str(self.deployment.folder.resolve()),
            "superlink:8000": self.superlink,
            "ray-head": LOOPBACK,
            "6379": str(self.head),
            "${FEDGAUGE_RUN:-federation}": RUN,
        }
        here = [whole.get(word, word) for word in words]
        for part, other in parts.items():
            here = [other.join(word.split(part)) for word in here]
        return tuple(here)

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

    def log(self, name: str) -> Path:
        return self.scratch / f"{name.replace(' ', '-')}.log"

    def begin(self, *names: str) -> None:
        for name in names:
            self.children[name] = processes.start(self.commands[name], self.log(name), self.environment(name))

    def listen(self) -> None:
        """Start the SuperLink, and register the clients' keys."""
        self.begin("superlink")
        wait_for(lambda: listens(self.port), 90, process=self.children["superlink"])
        register(self.deployment, self.superlink)

    def status(self, name: str) -> int | None:
        """A service's exit status, or None while it works."""
        return self.children[name].poll()

    def kill(self, name: str) -> None:
        """Kill a service with what it started."""
        os.killpg(self.children[name].pid, signal.SIGKILL)

    def environment(self, name: str) -> dict[str, str]:
        home = self.scratch / name
        home.mkdir(exist_ok=True)
        return launch.child_environment(self.scratch, self.mark) | {"FLWR_HOME": str(home)}


class Watching(Interrupt):
    """An interrupt that never comes; `look_on` is called whenever it is asked for."""

    def __init__(self, look_on: Callable[[], None]) -> None:
        self.look_on = look_on

    @property
    def asked(self) -> bool:  # type: ignore[override]
        self.look_on()
        return False
