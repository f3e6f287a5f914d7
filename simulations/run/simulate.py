"""One simulation from beginning to end: train and attack side by side."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from types import FrameType

from rich.console import Console

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.live.view import View, view_of
from fedgauge.simulations.run.exit_status import INTERRUPTED
from fedgauge.simulations.run.launch import AuditFailed, OwnProcess, TrainingFailed, attack_service, training_process

POLL = 0.3  # seconds between two readings of the run


class Interrupt:
    """Ctrl-C as a flag: the first asks for an orderly stop, the second stops at once."""

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


def simulate(
    run: Run, scenario: Scenario, console: Console, interrupt: Interrupt, quiet: bool = False, in_memory: bool = False
) -> None:
    """Train and attack. After an interrupt the run is incomplete, and what is left to attack is on the tape.

    Args:
        in_memory: train in one process, without Flower's simulation engine; every bit is the same.

    Raises:
        TrainingFailed: the federation failed; the updates that it had sent are still attacked.
        AuditFailed: the attack service died; the training was completed.
        KeyboardInterrupt: a second interrupt; the attacks in flight are lost.
    """
    with run.ledger() as ledger, view_of(run, console, quiet, scenario).shown() as view, ExitStack() as ending:
        service: OwnProcess | None = None
        failed: TrainingFailed | None = None
        try:
            with run.lock("training"):  # the service follows while this lock is held
                if scenario.audit.curious:
                    service = ending.enter_context(closing(attack_service(run)))
                loads = "the training" if in_memory else "Flower's simulation engine and the clients"
                view.say(f"fedgauge: waiting for {loads} to load")
                _train(run, ledger, view, interrupt, in_memory)
        except TrainingFailed as error:
            failed = error
        status = _drain(service, view, interrupt) if service is not None else 0
        if failed is not None:
            raise failed
        if status == INTERRUPTED:  # `fedgauge stop` after the training signals the service only
            interrupt.asked = True
        elif service is not None and status and not interrupt.asked:
            raise AuditFailed(service.blame("the attack service died"))


def _train(run: Run, ledger: Ledger, view: View, interrupt: Interrupt, in_memory: bool) -> None:
    ledger.set_meta(state="training")
    state = "failed"
    try:
        with closing(training_process(run, in_memory)) as training:
            while training.status() is None and not interrupt.asked:
                view.update()
                time.sleep(POLL)
            if not interrupt.asked:
                if training.status() != 0:
                    raise TrainingFailed(training.blame("the federation failed"))
                state = "trained"
    except TrainingFailed:
        if not interrupt.asked:  # a training that the user ended has not failed
            raise
    except BrokenPipeError:  # the reader of our output has gone: treat it as a Ctrl-C
        interrupt.asked = True
        raise
    finally:
        ledger.set_meta(state="interrupted" if interrupt.asked and state == "failed" else state)


def _drain(service: OwnProcess, view: View, interrupt: Interrupt) -> int:
    """Wait until the service has finished the queue or, after an interrupt, the attacks in flight; return its exit status."""
    parked = False
    while (status := service.status()) is None:
        view.update()
        if interrupt.asked and not parked:
            parked = True
            if view.reading.ledger.progress().leased:
                view.say("fedgauge: attacks in flight are finished first (Ctrl-C again: at once)")
            service.park()
        time.sleep(POLL)
    return status
