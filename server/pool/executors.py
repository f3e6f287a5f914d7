"""The attack service: leases waves from the ledger, has workers attack them, writes their scores.

It is a process of its own beside the training, or after it: it needs the run folder and nothing of Flower. If it dies,
training goes on; if training dies, it finishes what is on the tape.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.replay import ReplayCheck, replay
from fedgauge.client.update import StatefulTransform
from fedgauge.server.children import die_with_parent
from fedgauge.server.pool.worker import Task, TaskResult, attack_wave
from fedgauge.server.store.ledger import Lease, Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError, as_arrays, as_tensors

Result = TaskResult | Exception
NO_REPLAY = (
    "not possible in a deployment: an update can be recomputed from a client's own data alone, which stays there"
)
ATTEMPTS = 3  # of a wave whose worker dies
JOINING = 60.0  # seconds that a Ray cluster may take to answer


class WorkerDied(Exception):
    """The process that attacked a wave is gone; it says nothing about the wave, unless it happens again."""


class Executor(Protocol):
    """Runs tasks somewhere; an exception is a result, not the end."""

    slots: int  # how many tasks may be in flight

    def submit(self, ticket: int, task: Task) -> None:
        """Start a task."""

    def next_done(self, timeout: float) -> tuple[int, Result] | None:
        """A finished task's ticket and result; None when there is none within the timeout (seconds)."""

    def close(self) -> None:
        """End what it started."""


class LocalExecutor:
    """One wave at a time, in this process."""

    slots = 1

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Task]] = deque()

    def submit(self, ticket: int, task: Task) -> None:
        self._waiting.append((ticket, task))

    def next_done(self, timeout: float) -> tuple[int, Result] | None:
        if not self._waiting:
            return None
        ticket, task = self._waiting.popleft()
        try:
            return ticket, attack_wave(task)
        except Exception as error:  # any failure of an attack is a row with a status, never the end of the pool
            return ticket, error

    def close(self) -> None:
        self._waiting.clear()


class RayExecutor:
    """Ray actors, one core each; one whose process dies is replaced.

    Args:
        address: of a cluster's head, "host:port", to which this machine is joined as a node without cores; "auto": of the
            cluster that this machine belongs to already; None: a Ray of its own, here.
    """

    def __init__(self, workers: int, address: str | None = None) -> None:
        import ray

        self._ray = ray
        self.slots = workers  # more waves in flight would hold memory without making anything faster
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change to come
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._node: subprocess.Popen[bytes] | None = None
        # short, as sockets live below it, and removed at the end
        self._scratch = tempfile.mkdtemp(prefix="fedgauge-ray-")
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if address is None:
                ray.init(address="local", num_cpus=workers, include_dashboard=False, _temp_dir=self._scratch, **quiet)
            else:
                self._join(address, quiet)
        except BaseException:
            self._leave()
            raise

        class Worker:
            """Defined here, so that it travels by value."""

            def __init__(self) -> None:
                import fedgauge.server.pool.worker  # noqa: F401  (torch loads while Flower starts, not in the first wave)

            def pid(self) -> int:
                return os.getpid()

            def attack(self, task: Task) -> TaskResult:
                from fedgauge.server.pool.worker import attack_wave

                return attack_wave(task)

        # nothing is retried or restarted by Ray itself: attempts are counted in the ledger, and an actor that restarts
        # refuses whatever it is given meanwhile, which would use them up
        gpus = 1 if address is not None and ray.cluster_resources().get("GPU") else 0
        self._actor: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, max_task_retries=0)(Worker)
        self._idle = deque(self._actor.remote() for _ in range(workers))
        self._flying: dict[Any, tuple[int, Any]] = {}

    def pids(self) -> list[int]:
        """The idle workers' process ids, waiting until each is up."""
        return [self._ray.get(worker.pid.remote()) for worker in self._idle]

    def submit(self, ticket: int, task: Task) -> None:
        worker = self._idle.popleft()
        self._flying[worker.attack.remote(task)] = (ticket, worker)

    def next_done(self, timeout: float) -> tuple[int, Result] | None:
        done, _ = self._ray.wait(list(self._flying), num_returns=1, timeout=timeout)
        if not done:
            return None
        ticket, worker = self._flying.pop(done[0])
        result: Result
        try:
            result = self._ray.get(done[0])
        except Exception as error:  # the wave's failure, not the pool's
            result = error
            raised = isinstance(error, self._ray.exceptions.RayTaskError)  # by the attack, in a worker that lives
            if isinstance(error, self._ray.exceptions.RayError) and not raised:
                result = WorkerDied(f"{type(error).__name__}: {_last_line(error)}")
                self._ray.kill(worker)
                worker = self._actor.remote()
        self._idle.append(worker)
        return ticket, result

    def close(self) -> None:
        self._ray.shutdown()
        self._leave()

    def _join(self, address: str, quiet: Mapping[str, Any]) -> None:
        """Connect to a cluster: a driver stands on one of its nodes, so this machine becomes one that has no cores."""
        if address != "auto":
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", address, "--num-cpus", "0"]
            command += ["--num-gpus", "0", "--disable-usage-stats", "--block"]
            nowhere = subprocess.DEVNULL
            # a driver that loses its head is ended by Ray on the spot: nothing of ours is left to end the node
            dying = die_with_parent if sys.platform == "linux" else None
            self._node = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, preexec_fn=dying)
        deadline = time.monotonic() + JOINING
        while True:
            try:
                self._ray.init(address=address, **quiet)
                return
            except ConnectionError as error:
                refused = self._node is not None and self._node.poll() is not None  # of another token, or version
                if refused or time.monotonic() > deadline:
                    raise ConnectionError(f"no Ray cluster answers at RAY_ADDRESS = {address}: {error}") from error
                time.sleep(1.0)

    def _leave(self) -> None:
        if self._node is not None:
            self._node.terminate()
            try:
                self._node.wait(10.0)
            except subprocess.TimeoutExpired:
                self._node.kill()
        shutil.rmtree(self._scratch, ignore_errors=True)


def make_executor(kind: str, workers: int) -> Executor:
    """The executor a scenario names; with RAY_ADDRESS in the environment its workers are in that cluster."""
    return RayExecutor(workers, os.environ.get("RAY_ADDRESS")) if kind == "ray" else LocalExecutor()


def serve(
    run: Run,
    executor: Executor,
    scenario: Scenario | None = None,
    follow: Callable[[], bool] = lambda: False,
    stop: Callable[[], bool] = lambda: False,
    tick: Callable[[], None] = lambda: None,
    force: bool = False,
) -> None:
    """Attack until the queue is empty and nothing more is to come; nothing at all where the replay check fails.

    Args:
        scenario: the run's, where the caller has read it.
        follow: whether new jobs may still arrive.
        stop: whether to take no more work; what is in flight is finished.
        tick: called between steps.
        force: attack after a failed replay check, too.

    Raises:
        Busy: another pool is at work on this run.
    """
    scenario = scenario or run.scenario()
    protocol = scenario.protocol.to_json()
    with run.lock("audit"), run.ledger() as ledger:
        ledger.release()
        flying: dict[int, Lease] = {}
        replayed = ledger.meta().get("replay") == "ok"  # else it is done again: what differed may have been mended
        tickets = 0
        while True:
            coming = follow()  # asked before leasing: a job that arrives in between is found in the next turn
            if not replayed:
                replayed = _check_replay(run, ledger, scenario, coming)
                if ledger.meta().get("replay") == "mismatch" and not force:
                    tick()
                    return
            if scenario.tape.keep == "none" and replayed:  # also what an earlier pool had no time to
                _forget(run, ledger)
            while len(flying) < executor.slots and not stop() and (lease := ledger.lease()) is not None:
                loaded = _load(run, ledger, lease, protocol)
                if loaded is not None:
                    flying[tickets := tickets + 1], task = loaded
                    executor.submit(tickets, task)
            tick()
            if flying:
                if (done := executor.next_done(timeout=0.5)) is not None:
                    _settle(run, ledger, flying.pop(done[0]), done[1])
            elif stop() or (not coming and not ledger.progress().queued):
                break
            else:
                time.sleep(0.2)


def _check_replay(run: Run, ledger: Ledger, scenario: Scenario, coming: bool) -> bool:
    """Compare one recomputed update with the tape's first that can be, before anything is attacked."""
    if ledger.deployed:
        ledger.set_meta(replay="unknown", replay_detail=NO_REPLAY)
        return True
    first = _replayable(ledger, scenario)
    if first is None:
        if not any(o["status"] == "accepted" and o["digest"] for o in ledger.observations()):
            return False
        words = "the chain has a memory, so only a client's first update can be recomputed, and none is on the tape"
        if not _remembers(scenario):
            if coming:  # of a later round whose clients all get the honest weights
                return False
            words = "of every sum on the tape a client was sent other weights than the tape keeps of it"
        ledger.set_meta(replay="unknown", replay_detail=words)
        return True
    try:
        found: ReplayCheck = replay(scenario.federation, run.tape().read(*first))
        words = f"cosine {found.cosine:.7f}, relative error {found.relative_error:.1e}: {found.verdict}"
        ledger.set_meta(replay="ok" if found.ok else "mismatch", replay_detail=words)
    except TapeError as error:
        ledger.set_meta(replay="unknown", replay_detail=str(error))
    return True


def _replayable(ledger: Ledger, scenario: Scenario) -> tuple[int, int, str] | None:
    """Round, client and digest of the first update on the tape that needs no memory.

    Where the chain has a memory, that is the first that its client computed, whether or not that one was accepted.
    """
    met: set[int] = set()
    for o in ledger.observations():
        taped = o["status"] == "accepted" and o["digest"] and not _mixed(scenario, o["round"], o["client"])
        if taped and (o["client"] not in met or not _remembers(scenario)):
            return o["round"], o["client"], o["digest"]
        if not scenario.protocol.misses(o["client"], o["round"]):  # else the client did not even start
            met.add(o["client"])
    return None


def _mixed(scenario: Scenario, round: int, client: int) -> bool:
    """Whether a secure sum is of updates at different weights, of which the tape has one's."""
    members = scenario.protocol.members(client, round)
    return any(len({aimed.aim.applies_to(round, c) for c in members}) > 1 for aimed in scenario.server_attack)


def _remembers(scenario: Scenario) -> bool:
    return any(isinstance(link, StatefulTransform) for link in scenario.federation.chain.links)


def _load(run: Run, ledger: Ledger, lease: Lease, protocol: str) -> tuple[Lease, Task] | None:
    """A lease and its task from the run's files; jobs with a damaged one fail at once, with its name, and leave the lease."""
    seen: list[Observation] = []
    memories: dict[int, dict[str, Any]] = {}
    for client, digest in zip(lease.clients, lease.digests, strict=True):
        try:
            observation = run.tape().read(lease.round, client, digest)
            if client in lease.memories:
                left, written = lease.memories[client]
                memories[client] = as_arrays(run.read_memory(left, client, lease.attack.name, written))
            seen.append(observation)
        except TapeError as error:
            ledger.fail(lease.of([client]), str(error))
    if not seen:
        return None
    lease = lease.of([o.client for o in seen])
    return lease, Task(
        protocol=protocol,
        planned=lease.attack.to_json(),
        seed=lease.seed,
        round=lease.round,
        clients=lease.clients,
        others=dict(lease.others),
        params=as_arrays(seen[0].params),
        buffers=as_arrays(seen[0].buffers),
        updates=tuple(as_arrays(o.update) for o in seen),
        memories=memories,
        blind=ledger.deployed,
    )


def _settle(run: Run, ledger: Ledger, lease: Lease, result: Result) -> None:
    if isinstance(result, Exception):
        _give_up(ledger, lease, result)
        return
    for client, images in result.images.items():
        if images:
            run.write_reconstruction(lease.round, client, lease.attack.name, as_tensors(images))
    memories = {  # written before the jobs are done: who finds one done finds what it left
        client: run.write_memory(lease.round, client, lease.attack.name, as_tensors(memory))
        for client, memory in result.memories.items()
    }
    ledger.finish(lease, result.rows, result.reasons, memories)


def _give_up(ledger: Ledger, lease: Lease, error: Exception) -> None:
    """Another attempt where it may end differently, then each observation alone, then a failure."""
    words = ": ".join(filter(None, [type(error).__name__, _last_line(error)]))
    if isinstance(error, WorkerDied) and lease.attempt < ATTEMPTS:
        ledger.retry(lease, words)
    elif len(lease.jobs) > 1:  # whose fault it is shows now; what an attack raises, the same wave would raise again
        ledger.split(lease, words)
    else:
        ledger.fail(lease, words)


def _last_line(error: Exception) -> str:
    """What happened, in the words of an error that may be a whole traceback."""
    return (str(error).strip().splitlines() or [""])[-1]


def _forget(run: Run, ledger: Ledger) -> None:
    """Delete the updates of every round whose attacks are over."""
    for round, clients in ledger.deletable().items():
        run.tape().forget(round, clients)
        ledger.mark_deleted(round)
