"""Starts a deployment on this machine without containers, follows its run, and ends it."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
import uuid
from contextlib import ExitStack, closing, suppress

from rich.console import Console

from fedgauge.client.files import replacing
from fedgauge.server.child_processes import scratch_folder
from fedgauge.server.store.run import NotResumable, Run, RunBusy
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.deploy.services import Addresses, link, services
from fedgauge.simulations.deploy.submission import PATIENCE
from fedgauge.simulations.deploy.train import register, start
from fedgauge.simulations.live.log import Log
from fedgauge.simulations.live.view import view_of
from fedgauge.simulations.run import launch, processes
from fedgauge.simulations.run.create import resume
from fedgauge.simulations.run.exit_status import INTERRUPTED
from fedgauge.simulations.run.launch import TrainingFailed
from fedgauge.simulations.run.simulate import POLL, Interrupt

FACTS = "up.json"  # a local start's file for `down`
PAUSE = 10.0  # seconds between two starts of a SuperNode


class LocalDeployment:
    """The processes of a deployment on this machine's loopback address, with the commands of docker-compose.yml.

    Ray's cluster is none of them: its nodes would listen on every interface. The attack service starts a Ray of its own.
    """

    def __init__(self, deployment: Deployment, run: str) -> None:
        self.deployment = deployment
        self.addresses = Addresses.local(str(deployment.folder.resolve()), run, deployment.clients)
        self.commands = services(self.addresses, deployment.clients)
        self.mark = uuid.uuid4().hex
        self.scratch = scratch_folder()
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.begun: dict[str, float] = {}

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
        self.children[name] = processes.start(self.commands[name], log, self._environment(name))
        self.begun[name] = time.monotonic()
        facts = {"mark": self.mark, "pids": {service: child.pid for service, child in self.children.items()}}
        with replacing(self.deployment.folder / FACTS) as file:
            file.write(json.dumps(facts).encode())

    def restart_supernodes(self) -> None:
        """Start the SuperNodes that ended again, as Docker does.

        A SuperLink that was killed takes its SuperNodes of before for connected, and refuses their keys until it misses them.
        """
        for name, begun in list(self.begun.items()):
            if name.startswith("supernode") and self.status(name) is not None and time.monotonic() > begun + PAUSE:
                with suppress(ProcessLookupError):  # what it had started
                    os.killpg(self.children[name].pid, signal.SIGKILL)
                self.begin(name)

    def listen(self) -> None:
        """Start the SuperLink, and register the clients' keys."""
        self.begin("superlink")
        deadline = time.monotonic() + PATIENCE
        while not processes.listens(self.addresses.superlink[1]):
            if self.status("superlink") is not None or time.monotonic() > deadline:
                raise TrainingFailed(self.blame("superlink", "it did not start"))
            time.sleep(0.1)
        register(self.deployment, link(self.addresses))

    def check(self, *names: str) -> None:
        """Check that these services have not failed.

        Raises:
            TrainingFailed: one of them has.
        """
        for name in names:
            status = self.status(name)
            if status or (status == 0 and name != "attack"):  # the attack service ends when all is attacked
                raise TrainingFailed(self.blame(name, f"exit status {status}"))

    def status(self, name: str) -> int | None:
        """A service's exit status, or None while it works."""
        return self.children[name].poll()

    def blame(self, name: str, what: str) -> str:
        return launch.with_ends(f"the deployment failed: {name}: {what}", self.deployment.log(name))

    def _environment(self, name: str) -> dict[str, str]:
        home = self.scratch / name
        home.mkdir(exist_ok=True)
        return launch.child_environment(self.scratch, self.mark) | {"FLWR_HOME": str(home)}


def up(
    deployment: Deployment, console: Console, interrupt: Interrupt, log: Log = "auto", new: bool = False
) -> tuple[Run, int]:
    """Start every process here, train and attack the run, and end them; returns the run and its exit status.

    Args:
        new: start another run, even if the last one is unfinished.

    Raises:
        TrainingFailed: the federation failed, or a service without which it cannot go on.
        RunBusy: the deployment is already up.
        SpecError, LedgerError: the last run cannot be continued.
    """
    with Run(deployment.folder).lock("up"):  # the same kind of lock as a run's
        run, resumed = deployment.begin(deployment.next_run(new), here=True)
        if resumed:
            _check_resumable(deployment, run)
        scenario = run.scenario()
        with (
            closing(LocalDeployment(deployment, run.name)) as local,
            view_of(run, console, log, scenario).shown() as view,
        ):
            view.note = f"waiting for the SuperLink and {deployment.clients} SuperNodes"
            if resumed:
                view.say(f"fedgauge: {run.name} continues where it stopped")

            def look_on() -> None:
                view.update()
                if scenario.audit.curious and "attack" not in local.children and run.at_work("training"):
                    local.begin("attack")
                if not interrupt.asked:  # a client may die, and the attack service while the clients train
                    local.check("superlink", "serverapp")
                    local.restart_supernodes()
                    if "attack" in local.children and run.model.exists():
                        local.check("attack")

            local.listen()
            for name in ("serverapp", "dashboard", *(name for name in local.commands if name.startswith("supernode"))):
                local.begin(name)
            view.say(
                f"fedgauge: watch it at http://127.0.0.1:{local.addresses.dashboard}/ (its token: secrets/dashboard)"
            )
            ended = (
                INTERRUPTED
                if interrupt.asked
                else start(deployment, link(local.addresses), run.name, interrupt, look_on)
            )
            if interrupt.asked and (service := local.children.get("attack")):
                service.terminate()  # it finishes the attacks in flight
                while service.poll() is None:
                    view.update()
                    time.sleep(POLL)
            view.say("fedgauge: ending the services")
            return run, ended


def _check_resumable(deployment: Deployment, run: Run) -> None:
    """Refuse a run that cannot be continued before any process starts; NotResumable says what to do instead."""
    try:
        resume(run, "deployment")
    except NotResumable as error:
        command = f"fedgauge deploy up {shlex.quote(str(deployment.folder))} --local --new"
        raise NotResumable(f"{error}. Start another run with: {command}") from error
    except RunBusy:  # leftovers of a killed start end within a minute; `start` checks again once all services are up
        return


def down(deployment: Deployment) -> list[int]:
    """Ask a local start to end, then end processes that it left behind; returns their ids.

    A start that finishes its attacks for more than a minute continues.
    """
    lock, deadline = Run(deployment.folder), time.monotonic() + 60.0
    if (holder := lock.holder("up")) is not None:
        with suppress(ProcessLookupError):
            os.kill(holder, signal.SIGTERM)
    while lock.at_work("up"):
        if time.monotonic() > deadline:
            return []
        time.sleep(0.2)
    facts = deployment.folder / FACTS
    return processes.sweep(json.loads(facts.read_text())["mark"]) if facts.exists() else []
