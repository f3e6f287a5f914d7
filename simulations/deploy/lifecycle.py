"""Start a deployment: what one of its containers does once, and all its processes on this machine, without containers."""

import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_rows import EMPTY
from fedgauge.server.store.run import NotResumable, Run, RunBusy
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.deploy.folder import Deployment, state_of_training
from fedgauge.simulations.deploy.supervisor import FACTS, LocalDeployment
from fedgauge.simulations.live.progress import ObservationRow, absences, participation
from fedgauge.simulations.live.view import Log, View
from fedgauge.simulations.live.views import view_of
from fedgauge.simulations.run import launch, processes
from fedgauge.simulations.run.launch import TrainingFailed
from fedgauge.simulations.run.simulate import INTERRUPTED, POLL, Interrupt, resume

REGISTERED = "already in use"  # what Flower says of a key that it knows
WITHOUT_AUDIT = 60.0  # seconds that `start` waits for an attack service which is not there


# ----------------------------------------------------------------------------------------- once, in a container or here


def register(deployment: Deployment, superlink: str) -> None:
    """Make the clients' public keys known to the SuperLink; one that is known stays so.

    Raises:
        TrainingFailed: the SuperLink refuses one, or does not answer.
    """
    with _control(deployment, superlink) as (_, env):
        for client in range(deployment.clients):
            key = deployment.public_key(client)
            command = ["flwr", "supernode", "register", str(key.resolve()), "fedgauge", "--name", f"client-{client}"]
            try:
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=launch.PATIENCE)
            except subprocess.TimeoutExpired as error:
                raise TrainingFailed(f"{superlink} does not answer") from error
            if done.returncode and REGISTERED not in done.stdout + done.stderr:
                said = (done.stderr.strip() or done.stdout.strip())[-500:]
                raise TrainingFailed(f"{key.name} could not be registered at {superlink}: {said}")


def start(deployment: Deployment, superlink: str, name: str, interrupt: Interrupt) -> int:
    """Train a run of this name to its end, and wait until it is attacked; returns the exit status.

    Raises:
        SpecError: the run is complete.
        LedgerError: it was interrupted and cannot go on.
        TrainingFailed: the federation ended badly.
    """
    run, resumed = deployment.begin(name)
    scenario = resume(run, "deployment") if resumed else run.scenario()
    with run.ledger() as ledger:
        with run.lock("training"):  # the attack service follows for as long as this is held
            _train(deployment, superlink, run, ledger, scenario, interrupt)
        _wait_for_attacks(run, ledger, scenario, interrupt)
    return INTERRUPTED if interrupt.asked else 0


def _train(
    deployment: Deployment, superlink: str, run: Run, ledger: Ledger, scenario: Scenario, interrupt: Interrupt
) -> None:
    ledger.set_meta(state="training")
    state = "failed"

    def told(what: str) -> str:
        return launch.blame(run, f"the federation failed: {what}", "flower.log")

    try:
        with _control(deployment, superlink) as (scratch, env):
            launch.write_app(scratch, run, scenario)
            submission = launch.Submission(scratch, run.log("flower.log"), env)
            try:
                while submission.process.poll() is None and not interrupt.asked:
                    time.sleep(POLL)
                if interrupt.asked:
                    submission.stop()  # else it would train on without us
                    state = "interrupted"
                elif (status := submission.status(told)) != "finished:completed":
                    raise TrainingFailed(told(status))
                elif why := _nobody(ledger):
                    ledger.set_meta(**{EMPTY: why})
                    raise TrainingFailed(why)
                else:
                    state = "trained"
            finally:
                processes.end(submission.process)
    finally:
        ledger.set_meta(state=state)


def _nobody(ledger: Ledger) -> str:
    """That no client gave an update in any round, and why; empty where one did."""
    seen = ledger.observations()
    if any(o["status"] == "accepted" for o in seen):
        return ""
    return f"no round got an update: {participation(seen) or 'no client was there'}"


def _wait_for_attacks(run: Run, ledger: Ledger, scenario: Scenario, interrupt: Interrupt) -> None:
    """Until the queue is empty, or nobody has worked on it for a while: it then waits for `fedgauge audit`."""
    seen = time.monotonic()
    while scenario.audit.curious and not interrupt.asked and ledger.meta().get("replay") != "mismatch":
        progress = ledger.progress()
        if not progress.queued + progress.leased:
            return
        if run.holder("audit") is not None:
            seen = time.monotonic()
        elif time.monotonic() - seen > WITHOUT_AUDIT:
            return
        time.sleep(POLL)


@contextmanager
def _control(deployment: Deployment, superlink: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """A scratch folder and an environment in which Flower's commands speak to the SuperLink, by TLS."""
    certificate = str((deployment.folder / "tls" / "ca.crt").resolve())
    with tempfile.TemporaryDirectory(prefix="fedgauge-") as named:
        scratch = Path(named)
        launch.write_home(scratch, {"address": superlink, "root-certificates": certificate})
        mark = os.environ.get(processes.MARK, uuid.uuid4().hex)  # of the local start that we belong to
        yield scratch, launch.child_environment(scratch, mark) | {"FLWR_HOME": str(scratch / "home")}


# ------------------------------------------------------------------------------------------- everything on this machine


def up(
    deployment: Deployment, console: Console, interrupt: Interrupt, log: Log = "auto", new: bool = False
) -> tuple[Run, int]:
    """Start everything here, have the run trained and attacked to its end, end everything; the run and its exit status.

    Args:
        new: begin another run, be the last one finished or not.

    Raises:
        TrainingFailed: the federation, or a service, ended badly.
        Busy: it is up already.
        SpecError, LedgerError: the last run cannot go on.
    """
    with deployment.lock():
        run, resumed = deployment.begin(deployment.next_run(new))
        scenario = run.scenario()
        if resumed:
            _check_resumable(deployment, run)
        with (
            LocalDeployment(deployment, run.name, scenario.audit.executor == "ray") as local,
            run.ledger() as ledger,
            view_of(run, ledger, scenario, console, log).shown() as view,
        ):
            view.note = f"waiting for the SuperLink and {deployment.clients} SuperNodes"
            if resumed:
                view.say(f"fedgauge: {run.name} goes on where it stopped")
            _start_all(local, run, interrupt)
            if interrupt.asked and "start" not in local.children:
                return run, INTERRUPTED
            view.say(f"fedgauge: watch it at {local.addresses.dashboard_address} (its token: secrets/dashboard)")
            ended = _follow(local, view, interrupt)
            view.say("fedgauge: the services are being ended")
            return run, ended


def _check_resumable(deployment: Deployment, run: Run) -> None:
    """Refuse a run that cannot go on before anything is started; NotResumable says what can be done instead."""
    try:
        resume(run, "deployment")
    except NotResumable as error:
        command = f"fedgauge deploy up {shlex.quote(str(deployment.folder))} --local --new"
        raise NotResumable(f"{error}. Begin another run with: {command}") from error
    except RunBusy:  # what a killed start has left ends within a minute: `start` asks again, once all is up
        return


def _start_all(local: LocalDeployment, run: Run, interrupt: Interrupt) -> None:
    local.listen()
    local.finish("register")
    after = [name for name in local.services if name not in ("superlink", "register", "attack")]
    for name in after:
        if not interrupt.asked:
            local.begin(name)
    while not interrupt.asked and run.holder("training") is None and local.status("start") is None:
        time.sleep(POLL)
    if not interrupt.asked and run.scenario().audit.curious:
        local.begin("attack")


def _follow(local: LocalDeployment, view: View, interrupt: Interrupt) -> int:
    """Look after the services until the run has ended; its exit status."""
    told, lacking = False, AbsenceReporter(view)
    while (status := local.status("start")) is None:
        if view.note and view.run_progress.rounds:
            view.note = ""
        view.update()
        lacking.tell()
        if not interrupt.asked:
            local.poll()
        elif not told:
            told = True
            local.children["start"].send_signal(signal.SIGTERM)
        time.sleep(POLL)
    lacking.tell()
    view.run_progress.coming = False
    _park(local, view, interrupt)
    if interrupt.asked:
        return INTERRUPTED
    if status:
        raise TrainingFailed(_why(local, view.run_progress.ledger, status))
    _check_attacked(local, view.run_progress.ledger)
    return 0


def _check_attacked(local: LocalDeployment, ledger: Ledger) -> None:
    """TrainingFailed where attacks are left that nothing but a dead service kept from being done."""
    progress = ledger.progress()
    if (left := progress.queued + progress.leased) and ledger.meta().get("replay") != "mismatch":
        words = f"{left} attacks were not done; fedgauge audit {local.deployment.folder / 'runs' / local.addresses.run}"
        raise TrainingFailed(local.blame("attack", words))


class AbsenceReporter:
    """Tells of each round from now on who gave no update."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.ledger = view.run_progress.ledger
        self.round = max((o["round"] for o in self.ledger.observations()), default=0)

    def tell(self) -> None:
        """Tell what is new."""
        by_round: dict[int, list[ObservationRow]] = {}
        for seen in self.ledger.observations_since(self.round + 1):
            by_round.setdefault(seen["round"], []).append(seen)
        for round, all_of_it in sorted(by_round.items()):
            if words := absences(round, all_of_it):
                self.view.say(f"fedgauge: {words}")
            self.round = round


def _why(local: LocalDeployment, ledger: Ledger, status: int) -> str:
    """Why a run failed: nobody took part, the SuperLink died, or what `start` says."""
    if ledger.meta().get("state") == "failed" and (why := ledger.meta().get(EMPTY)):
        return why
    if local.deaths.get("superlink") or local.status("superlink") is not None:
        return launch.with_ends("the SuperLink died, and the training with it", local.deployment.log("superlink"))
    return local.blame("start", f"exit status {status}")


def _park(local: LocalDeployment, view: View, interrupt: Interrupt) -> None:
    """Wait for the attack service: it ends when the queue is empty; after an interrupt with what is in flight."""
    told = False
    while "attack" in local.children and local.status("attack") is None:
        if not interrupt.asked:
            local.poll()
        elif not told:
            told = True
            local.children["attack"].send_signal(signal.SIGTERM)
        view.update()
        time.sleep(POLL)


def status(deployment: Deployment) -> tuple[dict[str, bool], list[str]]:
    """Which services of a local start live, and how its last run stands, in lines."""
    pids = _facts(deployment).get("pids", {})
    living = set(processes.marked(str(_facts(deployment).get("mark", "-"))))
    alive = {name: pid in living for name, pid in pids.items()} if isinstance(pids, Mapping) else {}
    lines = []
    for run in deployment.runs()[-1:]:
        with run.ledger(readonly=True) as ledger:
            rounds, progress, meta = ledger.last_round(), ledger.progress(), ledger.meta()
            rows = sum(1 for _ in ledger.scores())
        lines.append(
            f"{run.name}: {state_of_training(run) or 'not begun'}, round {rounds} of {meta.get('rounds', '?')}"
        )
        waiting = progress.queued + progress.leased
        lines.append(f"attacks: {progress.done} done, {waiting} to come, {progress.failed} failed; {rows} score rows")
    return alive, lines


def down(deployment: Deployment, patience: float = 60.0) -> list[int]:
    """Ask a local start to end, then end what it may have left behind; the ids of the latter.

    Args:
        patience: seconds; after them a start that still finishes its attacks in flight is left to do so.
    """
    holder = deployment.holder()
    if holder is not None:
        os.kill(holder, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while deployment.holder() is not None and time.monotonic() < deadline:
        time.sleep(0.2)
    if deployment.holder() is not None:
        return []
    mark = str(_facts(deployment).get("mark", ""))
    return processes.sweep(mark) if re.fullmatch(r"[0-9a-f]{32}", mark) else []


def _facts(deployment: Deployment) -> dict[str, object]:
    path = deployment.folder / FACTS
    found: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    return found
