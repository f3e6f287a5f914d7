"""The steps of one run of a deployment: register the clients' keys, train, and wait for the attacks."""

import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import EMPTY
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.outcomes import none_accepted
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.deploy.submission import Submission, ask, write_app, write_home
from fedgauge.simulations.run import launch, processes
from fedgauge.simulations.run.create import resume
from fedgauge.simulations.run.exit_status import INTERRUPTED, exit_status
from fedgauge.simulations.run.launch import TrainingFailed
from fedgauge.simulations.run.simulate import POLL, Interrupt

REGISTERED = "already in use"  # Flower's message for a key that is already registered
# seconds that `start` waits for an attack service that is not running: one that lost its Ray cluster is restarted within a
# minute, and may need another to join
WITHOUT_AUDIT = 180.0


def register(deployment: Deployment, superlink: str) -> None:
    """Register the clients' public keys at the SuperLink; a registered key stays registered.

    Raises:
        TrainingFailed: the SuperLink refuses a key, or does not answer.
    """
    with _control(deployment, superlink) as (_, env):
        for client in range(deployment.clients):
            key = deployment.public_key(client)
            try:
                name = ("--name", f"client-{client}")
                done = ask(env, "supernode", "register", str(key.resolve()), "fedgauge", *name)
                output = (done.stdout + done.stderr).strip()[-500:] if done.returncode else REGISTERED
            except subprocess.TimeoutExpired:
                output = "it does not answer"
            if REGISTERED not in output:
                raise TrainingFailed(f"{key.name} could not be registered at {superlink}: {output}")


def start(deployment: Deployment, superlink: str, name: str, interrupt: Interrupt) -> int:
    """Train the run of this name, and wait until it is attacked; returns the exit status, as `fedgauge run` does.

    Raises:
        SpecError: the run is complete.
        LedgerError: it was interrupted and cannot be continued.
        TrainingFailed: the federation failed, or no attack service worked.
    """
    run, resumed = deployment.begin(name)
    with run.lock("training"):  # the attack service follows, and compose starts it again
        while run.at_work("server") and not interrupt.asked:  # the ServerApp trains on after a killed start
            time.sleep(POLL)
    if run.model.exists():
        with run.ledger() as ledger, run.lock("training"):
            _wait_for_attacks(run, ledger, run.scenario(), interrupt)
        return INTERRUPTED if interrupt.asked else exit_status(run)
    scenario = resume(run, "deployment") if resumed else run.scenario()
    with run.ledger() as ledger:
        with run.lock("training"):  # the attack service follows while this lock is held
            _train(deployment, superlink, run, ledger, scenario, interrupt)
        _wait_for_attacks(run, ledger, scenario, interrupt)
    return INTERRUPTED if interrupt.asked else exit_status(run)


def _train(
    deployment: Deployment, superlink: str, run: Run, ledger: Ledger, scenario: Scenario, interrupt: Interrupt
) -> None:
    ledger.set_meta(state="training")
    state = "failed"

    def blame(what: str) -> str:
        return launch.with_ends(f"the federation failed: {what}", run.folder / "logs" / "flower.log")

    try:
        with _control(deployment, superlink) as (scratch, env):
            write_app(scratch, run, scenario)
            submission = Submission(scratch, run.log("flower.log"), env)
            try:
                status = submission.wait(blame, lambda: interrupt.asked)
                if interrupt.asked:
                    submission.stop()  # else it would continue without us
                    state = "interrupted"
                elif status != "finished:completed":
                    raise TrainingFailed(blame(status))
                elif why := none_accepted(ledger, ended=True):
                    ledger.set_meta(**{EMPTY: why})
                    raise TrainingFailed(why)
                else:
                    state = "trained"
            finally:
                processes.end(submission.process)
    finally:
        ledger.set_meta(state=state)


def _wait_for_attacks(run: Run, ledger: Ledger, scenario: Scenario, interrupt: Interrupt) -> None:
    """Wait until the queue is empty; TrainingFailed if no attack service has run for a while."""
    last_seen = time.monotonic()
    while scenario.audit.curious and not interrupt.asked and ledger.meta().get("replay") != "mismatch":
        if not (left := ledger.progress().waiting):
            return
        if run.at_work("audit"):
            last_seen = time.monotonic()
        elif time.monotonic() - last_seen > WITHOUT_AUDIT:
            raise TrainingFailed(f"{left} attacks were not done; continue with: fedgauge audit {run.folder}")
        time.sleep(POLL)


@contextmanager
def _control(deployment: Deployment, superlink: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """A scratch folder and an environment in which Flower's commands reach the SuperLink over TLS."""
    certificate = str((deployment.folder / "tls" / "ca.crt").resolve())
    with tempfile.TemporaryDirectory(prefix="fedgauge-") as named:
        scratch = Path(named)
        write_home(scratch, {"address": superlink, "root-certificates": certificate})
        yield scratch, launch.child_environment(scratch, uuid.uuid4().hex) | {"FLWR_HOME": str(scratch / "home")}
