"""Ray workers: rows for every job however often a worker is killed, and a door for nobody else."""

import gc
import http.client
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedgauge.server.pool.executors import LocalExecutor, Result
from fedgauge.server.pool.ray_executor import RayExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.pool.worker import Task
from fedgauge.server.store.ledger_types import Progress
from fedgauge.server.store.run import Run
from tests.hostile_folder import hostile
from tests.listening import LOOPBACK, listening
from tests.waiting import wait_for

# that Ray workers score what one process scores, to the bit, is in test_run.py
pytestmark = [pytest.mark.slow, pytest.mark.full]

IG = {"use": "inverting_gradients", "iterations": 60}
AUDIT = {"executor": "ray", "wave": 2}


def descendants() -> dict[int, str]:
    """Every process below this one, with its command line."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # ended while we looked
            found[child.pid] = " ".join(child.cmdline())
    return found


@contextmanager
def quietly() -> Iterator[None]:
    """Ray leaves files open and lets go of its daemons' handles while they run; neither is ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of who starts the workers: somebody else has put a package called fedgauge there."""
    return hostile(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def ray_executor(theirs: Path) -> Iterator[RayExecutor]:
    """One worker for this module; Ray takes seconds to start."""
    before = set(descendants())
    with pytest.MonkeyPatch.context() as patch, quietly():
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # somebody's cluster: not for us
        patch.chdir(theirs)
        executor = RayExecutor(1)
    scratch = Path(executor._scratch)
    yield executor
    with quietly():
        executor.close()
    wait_for(lambda: descendants().keys() <= before, 60)  # Ray's processes do not outlive the pool
    assert not scratch.exists(), "Ray's files outlive the pool"


class Murderous:
    """Ray's worker, killed by SIGKILL while it holds a wave with a certain client, as often as it is told to.

    It is the pool's own executor with a machine under it that fails. The worker is stopped before it is given the wave,
    so that no wave is done before its worker is dead, however fast or busy the machine is.
    """

    def __init__(self, executor: RayExecutor, client: int, times: int) -> None:
        self.executor = executor
        self.client = client
        self.left = times
        self.kills: list[int] = []
        self.slots = executor.slots

    def submit(self, ticket: int, task: Task) -> None:
        doomed = self.client in task.wave.clients and "inverting" in task.planned.name and self.left > 0
        if doomed:
            self.left -= 1
            self.kills.append(self.executor.pids()[0])
            os.kill(self.kills[-1], signal.SIGSTOP)
        self.executor.submit(ticket, task)
        if doomed:
            os.kill(self.kills[-1], signal.SIGKILL)

    def next_done(self, timeout: float) -> tuple[int, Result] | None:
        return self.executor.next_done(timeout)

    def close(self) -> None:
        raise AssertionError("the pool does not close what it was given")


def scores(run: Run) -> dict[tuple[Any, ...], float | None]:
    with run.ledger() as ledger:
        rows = list(ledger.scores())
    found = {(r["round"], r["client"], r["attack"], r["example"], r["metric"]): r["value"] for r in rows}
    assert len(found) == len(rows), "a score is there twice"
    return found


def attempts(run: Run) -> dict[tuple[str, int], tuple[str, int]]:
    query = "SELECT a.name, j.client, j.state, j.attempts FROM jobs j JOIN attacks a ON a.id = j.attack_id"
    with run.ledger() as ledger:
        return {(r["name"], r["client"]): (r["state"], r["attempts"]) for r in ledger._db.execute(query)}


@pytest.fixture
def run(kit: Any, tmp_path: Path) -> Run:
    made: Run = kit.make_run(tmp_path / "run", kit.scenario(attack=[IG], audit=AUDIT))
    return made


def test_an_attack_with_memory_goes_through_the_rounds_in_order_in_workers_too(
    kit: Any, tmp_path: Path, ray_executor: RayExecutor
) -> None:
    table = {"use": "feedback_blending", "attack": IG["use"], "fit": 1e9, "iterations": 20}
    local, there = (
        kit.make_run(tmp_path / name, kit.scenario(attack=[table], audit=AUDIT), rounds=3) for name in ("local", "ray")
    )
    serve(local, LocalExecutor())
    serve(there, ray_executor)
    assert scores(local).keys() == scores(there).keys()
    for client in range(4):
        for round in (1, 2, 3):
            here, found = (r.read_memory(round, client, "feedback_blending") for r in (local, there))
            assert int(here["images"]) == int(found["images"]) == round
            assert float((here["blend"] - found["blend"]).abs().mean()) < 0.01


def test_a_worker_killed_while_it_holds_a_wave_costs_an_attempt_and_no_row(
    kit: Any, tmp_path: Path, run: Run, ray_executor: RayExecutor
) -> None:
    whole = kit.make_run(tmp_path / "whole", kit.scenario(attack=[IG], audit=AUDIT))
    serve(whole, LocalExecutor())
    murderous = Murderous(ray_executor, 0, times=1)
    serve(run, murderous)
    assert len(murderous.kills) == 1
    assert scores(run).keys() == scores(whole).keys()
    with run.ledger() as ledger:
        assert ledger.progress() == Progress(done=16)
    tried = attempts(run)
    assert {k: v for k, v in tried.items() if v != ("done", 1)} == {
        ("inverting_gradients", 0): ("done", 2),
        ("inverting_gradients", 1): ("done", 2),
    }


def test_workers_load_nothing_from_the_folder_in_which_they_were_started(
    ray_executor: RayExecutor, theirs: Path
) -> None:
    """Ray by itself puts it first on its workers' path, whatever `-P` says."""
    import ray

    assert len(ray_executor.pids()) == 1, "it has loaded our modules"
    assert not (theirs / "ran").exists()
    looked_in = ray.get(
        ray.remote(lambda: [os.path.realpath(place) for place in sys.path]).options(num_cpus=0).remote()
    )
    assert str(theirs.resolve()) not in looked_in and os.getcwd() not in looked_in


INTRUDER = """
import sys
import ray
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=20)
    print("inside")
except ray.exceptions.AuthenticationError:
    print("refused")
"""
STRANGER = """
import os, sys
import encodings.idna, grpc
def knock(port, method):
    call = grpc.insecure_channel(f"127.0.0.1:{port}").stream_stream(method, lambda x: x, lambda x: x)
    try:
        return str(list(call(iter([b""]), timeout=20)))
    except grpc.RpcError as error:
        return error.code().name
knock(1, "/nobody/Listens")  # gRPC imports more when it is first used
if os.getuid() == 0:  # a file that only we may read is no file for him
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(*sorted({knock(port, method) for port in sys.argv[1].split() for method in sys.argv[2:]}))
"""
METHODS = (
    "/ray.rpc.syncer.RaySyncer/StartSync",  # at which Ray ends, token or none, where it comes without a node's id
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


def test_no_other_user_or_machine_reaches_the_workers(ray_executor: RayExecutor) -> None:
    """Whoever reaches Ray's head, node or agent without certificate and token runs code as we, or ends them."""
    import ray

    ray_executor.pids()  # all are up
    found = listening([os.getpid(), *descendants()])
    assert {address for address, _ in found} == {LOOPBACK}
    token, key = (Path(os.environ[name]) for name in ("RAY_AUTH_TOKEN_PATH", "RAY_TLS_SERVER_KEY"))
    for secret in (token, key):
        assert secret.stat().st_mode & 0o077 == 0 == secret.parent.stat().st_mode & 0o077
    assert not any(token.read_text() in command for command in descendants().values())

    head = ray.get_runtime_context().gcs_address

    def prints(program: str, *arguments: str, without: str = "RAY_AUTH", **extra: str) -> str:
        outside = {k: v for k, v in os.environ.items() if not k.startswith(without)}
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, env=outside | extra, capture_output=True, text=True, timeout=300).stdout.strip()

    assert prints(INTRUDER, head, without="none") == "inside", "what is asked below can be answered"
    assert prints(INTRUDER, head, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64) == "refused", "certificate, no token"
    ports = " ".join(str(port) for _, port in sorted(found))
    assert prints(STRANGER, ports, *METHODS, without="RAY_") == "UNAVAILABLE", "no handshake succeeds"
    assert prints(INTRUDER, head, without="none") == "inside", "all live on"
    answers = []
    for _, port in sorted(found):
        agent = http.client.HTTPConnection(LOOPBACK, port, timeout=10)
        try:
            agent.request("POST", "/get_or_create_runtime_env")
            answers.append(agent.getresponse().status)
        except (http.client.HTTPException, OSError):  # gRPC's ports speak no HTTP/1
            continue
        finally:
            agent.close()
    assert answers == [401], "the agent that starts workers"


def test_ray_that_does_not_start_leaves_nothing_behind(
    tmp_path: Path, ray_executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError):  # the module's own is at work in this process
        RayExecutor(1)
    assert list(tmp_path.iterdir()) == []
    assert len(ray_executor.pids()) == 1, "which goes on"
