"""Starts a deployment on this machine without containers, follows its run, and ends it."""

import json
import os
import shlex
import signal
import time
from contextlib import closing, suppress

from rich.console import Console

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import EMPTY
from fedgauge.server.store.run import NotResumable, Run, RunBusy
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.deploy.supervisor import FACTS, LocalDeployment
from fedgauge.simulations.deploy.train import not_attacked
from fedgauge.simulations.live.log import Log
from fedgauge.simulations.live.view import View, view_of
from fedgauge.simulations.run import launch, processes
from fedgauge.simulations.run.create import resume
from fedgauge.simulations.run.exit_status import INTERRUPTED
from fedgauge.simulations.run.launch import TrainingFailed
from fedgauge.simulations.run.simulate import POLL, Interrupt


def up(
    deployment: Deployment, console: Console, interrupt: Interrupt, log: Log = "auto", new: bool = False
) -> tuple[Run, int]:
    """Start every process here, let the run be trained and attacked, and end them; returns the run and its exit status.

    Args:
        new: start another run, even if the last one is unfinished.

    Raises:
        TrainingFailed: the federation or a service failed.
        RunBusy: the deployment is already up.
        SpecError, LedgerError: the last run cannot be continued.
    """
    with Run(deployment.folder).lock("up"):  # the same kind of lock as a run's
        run, resumed = deployment.begin(deployment.next_run(new), here=True)
        if resumed:
            _check_resumable(deployment, run)
        with (
            closing(LocalDeployment(deployment, run.name)) as local,
            view_of(run, console, log, run.scenario()).shown() as view,
        ):
            view.note = f"waiting for the SuperLink and {deployment.clients} SuperNodes"
            if resumed:
                view.say(f"fedgauge: {run.name} continues where it stopped")
            _start_all(local, run, interrupt)
            if interrupt.asked and "start" not in local.children:
                return run, INTERRUPTED
            view.say(
                f"fedgauge: watch it at http://127.0.0.1:{local.addresses.dashboard}/ (its token: secrets/dashboard)"
            )
            ended = _follow(local, run, view, interrupt)
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


def _start_all(local: LocalDeployment, run: Run, interrupt: Interrupt) -> None:
    local.listen()
    local.finish("register")
    after = [name for name in local.services if name not in ("superlink", "register", "attack")]
    for name in after:
        if not interrupt.asked:
            local.begin(name)
    while not interrupt.asked and not run.at_work("training") and local.status("start") is None:
        time.sleep(POLL)
    if not interrupt.asked and run.scenario().audit.curious:
        local.begin("attack")


def _follow(local: LocalDeployment, run: Run, view: View, interrupt: Interrupt) -> int:
    """Supervise the services until the run has ended; returns INTERRUPTED or 0."""
    ledger = view.reading.ledger
    status = _await_end(local, "start", view, interrupt)
    # after a complete training it ends when the queue is empty, after an interrupt with the attacks in flight
    if "attack" in local.children and (interrupt.asked or run.model.exists()):
        _await_end(local, "attack", view, interrupt)
    if interrupt.asked:
        return INTERRUPTED
    meta = ledger.meta()
    if meta.get("state") != "trained":
        raise TrainingFailed(_why(local, ledger, status))
    if (left := ledger.progress().waiting) and meta.get("replay") != "mismatch":
        raise TrainingFailed(local.blame("attack", not_attacked(run, left)))
    return 0


def _await_end(local: LocalDeployment, name: str, view: View, interrupt: Interrupt) -> int:
    """Supervise the services until this one has ended; an interrupt signals it."""
    signalled = False
    while (status := local.status(name)) is None:
        view.update()
        if not interrupt.asked:
            local.poll()
        elif not signalled:
            signalled = True
            local.children[name].send_signal(signal.SIGTERM)
        time.sleep(POLL)
    return status


def _why(local: LocalDeployment, ledger: Ledger, status: int) -> str:
    """Return the cause of a failed training: no update, a dead SuperLink, or the message of `start`."""
    if ledger.meta().get("state") == "failed" and (why := ledger.meta().get(EMPTY)):
        return why
    if local.deaths.get("superlink") or local.status("superlink") is not None:
        return launch.with_ends("the SuperLink died, and the training with it", local.deployment.log("superlink"))
    return local.blame("start", f"exit status {status}")


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
