"""One simulation from beginning to end: train and attack side by side, then tell what was seen."""

import json
import re
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Literal

from rich.console import Console

from fedgauge.attacks.grading.audit import NO_TRUTH
from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.attacks.plan import AttackPlan
from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_rows import DEPLOYMENT
from fedgauge.server.store.run import NotResumable, Run, RunBusy
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import write_bytes
from fedgauge.simulations.live.view import Log, View
from fedgauge.simulations.live.views import view_of
from fedgauge.simulations.run.environment import environment, package
from fedgauge.simulations.run.launch import AuditFailed, AuditService, TrainingFailed, TrainingProcess

POLL = 0.3  # seconds between looks at the run
INTERRUPTED = 130  # the exit status of a command that was asked to stop, by the shells' convention
DECISIVE = ("fedgauge", "torch", "numpy", "flwr")  # packages of which another version may train other bits
RESTARTS = 2  # of an attack service that dies
Mode = Literal["simulation", "deployment"]


class Interrupt:
    """Ctrl-C as a flag: the first asks to stop in order, the second stops at once."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def caught(self) -> Iterator["Interrupt"]:
        """Handle SIGINT and SIGTERM while inside."""
        handlers = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def new_run(scenario: Scenario, name: str, runs: Path) -> Run:
    """A fresh run folder under runs/, named by time and scenario, with its plan in the ledger."""
    stem = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9_-]+', '-', name)}"
    attempt, folder = 1, runs / stem
    while folder.exists():
        attempt += 1
        folder = runs / f"{stem}-{attempt}"
    return create_run(scenario, folder)


def create_run(scenario: Scenario, folder: Path, mode: Mode = "simulation") -> Run:
    """A fresh run in this folder, with its plan in the ledger.

    Raises:
        SpecError: a deployment cannot do what the scenario says.
    """
    if mode == DEPLOYMENT:
        check_deployable(scenario)
    run = Run.create(folder, scenario)
    write_bytes(folder / "environment.json", json.dumps(environment(), indent=2).encode())
    with run.ledger() as ledger:
        ledger.set_meta(rounds=str(scenario.protocol.rounds))
        if mode == DEPLOYMENT:
            ledger.set_meta(mode=mode)
        if scenario.audit.curious:
            ledger.add_attacks(scenario.plan, cards(scenario, scenario.plan, mode))
    return run


def resume(run: Run, mode: Mode = "simulation") -> Scenario:
    """The scenario of a run whose training is to go on, its ledger and tape brought to its last checkpoint.

    What follows is `simulate`, as for a new run: the server goes on from the checkpoint by itself.

    Args:
        mode: by which it is to go on.

    Raises:
        NotResumable: it is complete, of the other mode, another version trained it, or its checkpoint does not let it.
        Busy: somebody still trains it.
    """
    from fedgauge.server.store.checkpoint import starting_point  # imports Flower, which an audit does without

    if (server := run.holder("server")) is not None:
        raise RunBusy(
            f"{run.folder}: process {server} still trains it; one whose driver was killed ends within a minute"
        )
    with run.lock("training"), run.ledger() as ledger:
        _same_mode(run, ledger, mode)
        scenario = run.scenario()
        if run.model.exists():
            waiting = ledger.progress().queued + ledger.progress().leased
            left = f"; {waiting} attacks wait: fedgauge audit {run.folder}" if waiting else ""
            raise NotResumable(f"{run.folder} is complete: its {scenario.protocol.rounds} rounds are trained{left}")
        _same_versions(run)
        starting_point(run, ledger, scenario)
    return scenario


def _same_mode(run: Run, ledger: Ledger, mode: Mode) -> None:
    if ledger.deployed and mode != DEPLOYMENT:
        raise NotResumable(
            f"{run.folder} is a deployment's run, which a simulation must not go on with; go on with: {again(run, ledger)}"
        )


def again(run: Run, ledger: Ledger) -> str:
    """With what a run that never got to a first round begins again, and a deployment's goes on."""
    if not ledger.deployed:
        return "fedgauge run"
    folder = run.folder.absolute().parent.parent
    if not (folder / "keys").exists():  # a strategy of ours mounted in somebody's own server
        return "the server that began it"
    return f"fedgauge deploy up {shlex.quote(str(folder))} --local"


def _same_versions(run: Run) -> None:
    path = run.folder / "environment.json"
    try:
        then = json.loads(path.read_text())["packages"]
        changed = {name: (then.get(name), version) for name in DECISIVE if then.get(name) != (version := package(name))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotResumable(f"{path} does not say which versions trained this run: {error}") from error
    for name, (before, now) in changed.items():
        raise NotResumable(
            f"{run.folder} was begun with {name} {before}, and this is {name} {now}: its rounds would not be of one "
            f"training. Resume it with {name} {before}, or begin another one"
        )


def check_deployable(scenario: Scenario) -> None:
    """Refuse what only a simulation can do; SpecError says what."""
    if scenario.protocol.secure_sum is not None:
        raise SpecError("[secure_sum] is of simulations, where the server stands in for it: leave it out")
    for planned in scenario.plan.attacks:
        if planned.labels == "given":
            raise SpecError(f"[[attack]] {planned.name}: {NO_TRUTH}")


def cards(scenario: Scenario, plan: AttackPlan, mode: str = "simulation") -> dict[str, str]:
    """The knowledge card of each attack of a plan; in a deployment it says who graded."""
    found = {planned.name: knowledge_card(scenario.federation, planned, server=scenario.server) for planned in plan.attacks}
    if mode != DEPLOYMENT:
        return found
    assumed = "; assumed of the clients, each of whom does what its own file says"
    return {p.name: found[p.name] + assumed + ("" if p.is_limit else "; not graded") for p in plan.attacks}


def simulate(run: Run, scenario: Scenario, console: Console, interrupt: Interrupt, log: Log = "auto") -> None:
    """Train and attack; the run is complete unless `interrupt` was asked: then the rest is on the tape.

    Raises:
        TrainingFailed: the federation ended badly; what it had sent is still attacked.
        AuditFailed: the attack service kept dying; training went on.
        KeyboardInterrupt: a second interrupt; what was in flight is lost.
    """
    with (
        run.ledger() as ledger,
        view_of(run, ledger, scenario, console, log).shown() as view,
        closing(AuditSupervisor(run, view, interrupt)) as supervisor,
    ):
        try:
            with run.lock("training"):  # the service follows for as long as this is held
                if scenario.audit.curious:
                    supervisor.start()
                _train(run, ledger, scenario, supervisor, interrupt)
        except TrainingFailed:
            supervisor.drain()
            raise
        supervisor.drain()
        supervisor.verify()


def _train(run: Run, ledger: Ledger, scenario: Scenario, supervisor: "AuditSupervisor", interrupt: Interrupt) -> None:
    supervisor.view.note = "waiting for Flower to load its server, its simulation engine and the clients"
    ledger.set_meta(state="training")
    state = "failed"
    try:
        with TrainingProcess(run, scenario) as training:
            while not training.finished() and not interrupt.asked:
                supervisor.poll()
                time.sleep(POLL)
            if not interrupt.asked:
                training.verify()
                state = "trained"
    except TrainingFailed:
        if not interrupt.asked:  # what a user ends while we ask how it went has not failed
            raise
    except BrokenPipeError:  # who read our events wants no more: as good as a Ctrl-C
        interrupt.asked = True
        raise
    finally:
        supervisor.view.run_progress.coming = False
        ledger.set_meta(state="interrupted" if interrupt.asked and state == "failed" else state)


class AuditSupervisor:
    """Looks after the attack service: shows how it stands, starts it again when it dies, ends it."""

    def __init__(self, run: Run, view: View, interrupt: Interrupt) -> None:
        self.run = run
        self.view = view
        self.interrupt = interrupt
        self.service: AuditService | None = None
        self.restarts = 0

    def start(self) -> None:
        """Start the attack service."""
        self.service = AuditService(self.run)

    def poll(self) -> bool:
        """Update the view, bring a dead service back; whether the service works."""
        if self.view.note and self.view.run_progress.rounds:
            self.view.note = ""
        self.view.update()
        return self._at_work()

    def drain(self) -> None:
        """Wait for the service to finish the queue, or after an interrupt what is in flight."""
        parked = False
        while self.poll():
            if self.interrupt.asked and not parked and self.service is not None:
                parked = True
                if self.view.run_progress.ledger.progress().leased:
                    self.view.say("fedgauge: attacks in flight are finished first (Ctrl-C again: at once)")
                self.service.park()
            time.sleep(POLL)

    def verify(self) -> None:
        """Ask how the service ended; AuditFailed when it is dead and no longer started again."""
        status = self.service.status() if self.service is not None else 0
        if status == INTERRUPTED:  # `fedgauge stop`, after the training: it spoke to the service alone
            self.interrupt.asked = True
        elif self.service is not None and status != 0 and not self.interrupt.asked:
            raise AuditFailed(self.service.blame())

    def close(self) -> None:
        """End the service, whatever it is doing."""
        if self.service is not None:
            self.service.close()

    def _at_work(self) -> bool:
        # one that died is started again, a few times, unless the user wants an end anyway
        status = self.service.status() if self.service is not None else 0
        dead = status not in (None, 0, INTERRUPTED)
        if dead and self.restarts < RESTARTS and not self.interrupt.asked:
            self.restarts += 1
            self.close()
            self.start()
            return True
        return status is None
