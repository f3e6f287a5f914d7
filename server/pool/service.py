"""The attack service: leases waves from the ledger, has workers attack them, and writes their scores.

It runs in a process of its own, during the training or after it, and needs the run folder but not Flower. If it dies,
training goes on; if training dies, it finishes what is on the tape.
"""

import os
import time
from collections.abc import Callable

import torch

from fedgauge.attacks.base import ClientState, Observation, Wave
from fedgauge.attacks.grading.replay import ReplayCheck, replay
from fedgauge.server.pool.assumed_training import TrainingCheck
from fedgauge.server.pool.executors import LocalExecutor, Result, WorkerDied, last_line
from fedgauge.server.pool.ray_executor import RayExecutor, cluster_devices
from fedgauge.server.pool.worker import Task
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import UNKEEPABLE
from fedgauge.server.store.ledger_types import Lease
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import AuditOptions, Scenario
from fedgauge.server.store.tape import TapeError
from fedgauge.server.store.tape_source import TapeSource, UploadMismatch

NO_REPLAY = "not possible in a deployment: only a client's own data, which stays there, can recompute its update"
NOT_REPLAYABLE = "no recorded update can be recomputed: a state or altered weights in a secure sum prevent it"
ATTEMPTS = 3  # for a wave whose worker dies; the last one is on the CPU

Executor = LocalExecutor | RayExecutor


def attack_devices(options: AuditOptions, in_cluster: bool) -> list[torch.device]:
    """The devices that attacks will run on, [] where a cluster decides; SpecError if one of them cannot be had."""
    here = not in_cluster or options.executor == "local"
    return options.devices_here() if here else cluster_devices(options.devices)


def make_executor(options: AuditOptions) -> Executor:
    """The executor that a scenario names; if RAY_ADDRESS is set, its workers run in that cluster.

    Raises:
        SpecError: there is no such device.
    """
    address = os.environ.get("RAY_ADDRESS")
    devices = attack_devices(options, in_cluster=address is not None)
    if options.executor == "local":
        return LocalExecutor(devices[0], options.precision)
    return RayExecutor(options.workers, address, devices, options.precision)


def serve(
    run: Run,
    executor: Executor,
    scenario: Scenario | None = None,
    follow: Callable[[], bool] = lambda: False,
    stop: Callable[[], bool] = lambda: False,
    tick: Callable[[], None] = lambda: None,
    force: bool = False,
) -> None:
    """Attack until the queue is empty and no job can arrive any more; attack nothing if the replay check fails.

    Args:
        scenario: the run's, if the caller has read it already.
        follow: says whether new jobs may still arrive.
        stop: says whether to take no more work; running tasks are finished.
        tick: called between steps.
        force: attack even after a failed replay check.

    Raises:
        RunBusy: another attack service works on this run.
    """
    scenario = scenario or run.scenario()
    with run.lock("audit"), run.ledger() as ledger:
        ledger.release()
        source = TapeSource(scenario.federation, run=run, ledger=ledger)
        flying: dict[int, Lease] = {}
        replayed = ledger.meta().get("replay") == "ok"  # otherwise check again: the difference may be repaired
        check = TrainingCheck(source) if ledger.foreign and not replayed else None  # of a user's own app
        coming = False
        while True:
            # asked before leasing: the next turn finds a job that arrives in between
            coming = follow()
            if coming and ledger.foreign:  # a tap only records
                ledger.enqueue(scenario.plan)
            if not replayed:
                replayed = check.begin(coming) if check else _check_replay(source, scenario, coming)
                if ledger.meta().get("replay") == "mismatch" and not force:
                    tick()
                    return
            if scenario.tape.keep == "none" and replayed:  # including what an earlier service did not get to delete
                for round, clients in ledger.deletable().items():
                    run.tape().forget(round, clients)
                    ledger.mark_deleted(round)
            while len(flying) < executor.slots and not stop() and (lease := ledger.lease()) is not None:
                if check is not None and lease.attack.role != "baseline":
                    check.compare(lease.round, lease.clients)
                if (loaded := _load(source, lease)) is not None:
                    lease, task = loaded
                    flying[lease.jobs[0]] = lease
                    executor.submit(lease.jobs[0], task)
            tick()
            if flying:
                if (done := executor.next_done(timeout=0.5)) is not None:
                    _settle(run, ledger, flying.pop(done[0]), done[1])
            elif stop() or (not coming and not ledger.progress().queued):
                break
            else:
                time.sleep(0.2)


def _check_replay(source: TapeSource, scenario: Scenario, coming: bool) -> bool:
    """Recompute the first update on the tape that can be, and compare, before anything is attacked; True when that is decided."""
    ledger = source.ledger
    if ledger.deployed:
        ledger.set_meta(replay="unknown", replay_detail=NO_REPLAY)
        return True
    first = _replayable(ledger, scenario)
    try:
        if first is not None:
            check: ReplayCheck = replay(scenario.federation, source.observation(*first))
            detail = f"cosine {check.cosine:.7f}, relative error {check.relative_error:.1e}: {check.verdict}"
            ledger.set_meta(replay="ok" if check.ok else "mismatch", replay_detail=detail)
        elif coming or not source.taped():
            return False
        else:
            ledger.set_meta(replay="unknown", replay_detail=NOT_REPLAYABLE)
    except TapeError as error:
        ledger.set_meta(replay="unknown", replay_detail=str(error))
    return True


def _replayable(ledger: Ledger, scenario: Scenario) -> tuple[int, int, str] | None:
    """Return round, client and digest of the first update on the tape that can be recomputed without a client's state.

    If the chain is stateful, that is a client's first update ever, whether or not the server accepted it.
    """
    started: set[int] = set()
    for o in ledger.observations():
        taped = o["status"] == "accepted" and o["digest"] and not _mixed(scenario, o["round"], o["client"])
        if taped and (o["client"] not in started or not scenario.federation.chain.remembers):
            return o["round"], o["client"], o["digest"]
        started.add(o["client"])
    return None


def _mixed(scenario: Scenario, round: int, client: int) -> bool:
    """Check if a secure sum adds updates computed at different weights; the tape keeps only one of these."""
    members = scenario.protocol.group(client)
    for aimed in scenario.server_attack:
        altered = [aimed.applies_to(round, c) for c in members]
        own = [aimed.server_attack.for_member(place) for place in range(len(members))]
        if any(altered) and not (all(altered) and all(attack == own[0] for attack in own)):
            return True
    return False


def _load(source: TapeSource, lease: Lease) -> tuple[Lease, Task] | None:
    """A lease and its task, read from the run's files.

    Jobs with a damaged file, or with an upload that is not the model's, fail at once, say so, and leave the lease.
    """
    run, ledger = source.run, source.ledger
    seen: list[Observation] = []
    memories: dict[int, ClientState] = {}
    for client, digest in zip(lease.clients, lease.digests, strict=True):
        try:
            observation = source.observation(lease.round, client, digest)
            if client in lease.memories:
                left, written = lease.memories[client]
                memories[client] = run.read_memory(left, client, lease.attack.name, written)
            seen.append(observation)
        except (TapeError, UploadMismatch) as error:
            ledger.fail(lease.of([client]), str(error))
    if not seen:
        return None
    lease, last = lease.of([o.client for o in seen]), lease.attempt >= ATTEMPTS
    try:
        wave = Wave.stack(seen)
    except Exception as error:  # somebody else's tape may hold updates of several forms
        _give_up(ledger, lease, error)
        return None
    protocol, others = source.federation.protocol.to_json(), dict(lease.others)
    return lease, Task(protocol, lease.attack, lease.seed, wave, others, memories, ledger.deployed, last)


def _settle(run: Run, ledger: Ledger, lease: Lease, result: Result) -> None:
    if isinstance(result, Exception):
        _give_up(ledger, lease, result)
        return
    rows, reasons, memories, name = {}, {}, {}, lease.attack.name
    try:
        for one in result.audited:
            if tensors := one.reconstruction.tensors():
                run.write_reconstruction(lease.round, one.client, name, tensors)
            # written before its job is marked done, so that a finished job always has its memory
            if one.memory is not None:
                memories[one.client] = run.write_memory(lease.round, one.client, name, one.memory)
            rows[one.client], reasons[one.client] = one.rows, one.reconstruction.reason or None
        ledger.finish(lease, rows, reasons, memories, result.computed_on)
    except (*UNKEEPABLE, KeyError) as error:  # a user's attack gave what no ledger, or no file of tensors, holds
        _give_up(ledger, lease, error)


def _give_up(ledger: Ledger, lease: Lease, error: Exception) -> None:
    """Try again if it may end differently, then attack each update by itself, then fail."""
    message = ": ".join(filter(None, [type(error).__name__, last_line(error)]))
    if isinstance(error, WorkerDied) and lease.attempt < ATTEMPTS:
        ledger.retry(lease, message)
    # alone, each shows whether it is to blame; the same wave would raise the same error again
    elif len(lease.jobs) > 1:
        ledger.retry(lease, message, split=True)
    else:
        ledger.fail(lease, message)
