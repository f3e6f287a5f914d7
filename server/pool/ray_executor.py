"""Attack workers as Ray actors, on this machine or in a cluster."""

import atexit
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, chdir
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedgauge.attacks.engine.devices import CPU, Precision
from fedgauge.client.components import SpecError
from fedgauge.server.child_processes import die_with_parent, paths_from_here, scratch_folder
from fedgauge.server.pool.executors import Result, WorkerDied, last_line
from fedgauge.server.pool.ray_security import ray_access
from fedgauge.server.pool.worker import Task, TaskResult

LOOPBACK = "127.0.0.1"
JOINING = 60.0  # seconds that a Ray cluster may take to answer
VISIBLE = "CUDA_VISIBLE_DEVICES"
CUDA = torch.device("cuda")  # every GPU


@cache
def _secrets() -> dict[str, str]:
    """The environment of this process's own Ray; made once, as Ray reads its certificates once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="fedgauge-ray-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return ray_access(folder)


class RayExecutor:
    """Ray actors, each on one core or one GPU; a dead actor is replaced by one of its kind.

    Args:
        workers: actors on the CPU of this machine, if it is among the devices; a cluster has one on each of its cores.
        address: "host:port" of a cluster's head, which this machine joins as a node without cores; None: start Ray on this
            machine, only for this user.
        devices: of this machine; of a cluster those of `cluster_devices`.
        precision: of products on GPUs.

    Raises:
        RuntimeError: this process imported Ray before, with settings by which others could reach it.
        ConnectionError: no cluster answers at the address, or it has another token.
        SpecError: the cluster has no GPU, and GPUs are wanted.
    """

    def __init__(
        self,
        workers: int,
        address: str | None = None,
        devices: Sequence[torch.device] = (CPU,),
        precision: Precision = "ieee",
    ) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without it Ray warns of a coming change
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._node: subprocess.Popen[bytes] | None = None
        self._scratch = scratch_folder("fedgauge-ray-")  # removed at the end
        names = self._connect(workers, address, devices)
        self._grows = address is not None and "cpu" in names

        class Actor:
            """Defined in this method, so that Ray sends it by value."""

            def __init__(self, name: str, visible: str | None) -> None:
                if visible is not None:  # before CUDA reads it
                    os.environ[VISIBLE] = visible
                import ray

                from fedgauge.server.pool.worker import Worker  # torch loads while Flower starts, not in the first wave

                if name == "cuda":
                    name = f"cuda:{ray.get_gpu_ids()[0]}"
                self._worker = Worker() if name == "cpu" else Worker(torch.device("cuda", 0), precision, name)

            def pid(self) -> int:
                return os.getpid()

            def attack(self, task: Task) -> TaskResult:
                return self._worker.attack(task)

        # Ray itself retries and restarts nothing: the ledger counts attempts, and a restarting actor would refuse every
        # task it is given meanwhile and so use them up
        self._actor: Any = self._ray.remote(max_restarts=0, max_task_retries=0)(Actor)
        self._visible = {name: _visible(name) for name in names}
        self._idle = deque((name, self._begin(name)) for name in names)
        self._flying: dict[Any, tuple[int, str, Any]] = {}
        self._on_cpu = names.count("cpu")

    @property
    def slots(self) -> int:
        """One wave for each worker: more in flight hold memory and make nothing faster. A core that joins a cluster gets one."""
        if self._grows:
            for _ in range(self._cores() - self._on_cpu):
                self._idle.append(("cpu", self._begin("cpu")))
                self._on_cpu += 1
        return len(self._idle) + len(self._flying)

    def _cores(self) -> int:
        """The cores of the cluster; 1 before the first has joined."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 0)))

    def _begin(self, name: str) -> Any:
        """A new actor on a device. A cluster chooses its GPU; here we do, as only then it is known which is which."""
        if name == "cuda":  # a core is left to each GPU's worker where there are fewer cores than GPUs
            return self._actor.options(num_cpus=0, num_gpus=1).remote(name, None)
        return self._actor.options(num_cpus=1).remote(name, self._visible[name])

    def _connect(self, workers: int, address: str | None, devices: Sequence[torch.device]) -> list[str]:
        """Start Ray here or join the cluster; where that fails, nothing of it is left. Returns each actor's device."""
        # Ray reads it when it is imported
        os.environ.update(paths_from_here() | (_secrets() if address is None else {}))
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        with ExitStack() as failing:
            failing.callback(self._leave)
            import ray

            self._ray = ray
            with chdir(self._scratch):  # Ray's workers look for every package in their driver's current folder first
                if address is not None:
                    self._join(address, quiet)
                    names = self._names_in_cluster(devices)
                else:
                    names = [str(device) for device in devices for _ in range(workers if device == CPU else 1)]
                    self._start(len(names), quiet)
            failing.pop_all()
            return names

    def _names_in_cluster(self, devices: Sequence[torch.device]) -> list[str]:
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        if CUDA in devices and not gpus:
            self._ray.shutdown()
            raise SpecError('[audit] devices: "cuda" needs a GPU, and the Ray cluster has none')
        wanted = devices or [CUDA if gpus else CPU]
        return gpus * (CUDA in wanted) * ["cuda"] + self._cores() * (CPU in wanted) * ["cpu"]

    def _start(self, workers: int, quiet: Mapping[str, Any]) -> None:
        # a folder inside ours, as Ray opens its own to everybody, with the sockets of its store in it
        below = f"{self._scratch}/r"
        self._ray.init(address="local", num_cpus=workers, include_dashboard=False, _temp_dir=below, **quiet)
        if (at := self._ray.util.get_node_ip_address()) != LOOPBACK:
            self._ray.shutdown()
            raise RuntimeError(f"Ray was imported too early and listens at {at}, not at {LOOPBACK}")

    def pids(self) -> list[int]:
        """The idle workers' process ids; waits until each is up."""
        return [self._ray.get(worker.pid.remote()) for _, worker in self._idle]

    def submit(self, ticket: int, task: Task) -> None:
        name, worker = self._idle.popleft()
        self._flying[worker.attack.remote(task)] = (ticket, name, worker)

    def next_done(self, timeout: float) -> tuple[int, Result] | None:
        done, _ = self._ray.wait(list(self._flying), num_returns=1, timeout=timeout)
        if not done:
            return None
        ticket, name, worker = self._flying.pop(done[0])
        result: Result
        try:
            result = self._ray.get(done[0])
        except Exception as error:  # the wave failed, not the executor
            result = error
            raised = isinstance(error, self._ray.exceptions.RayTaskError)  # by the attack; the worker is alive
            if raised and isinstance(cause := getattr(error, "cause", None), Exception):
                result = cause  # as it was, not in Ray's wrapping
            if isinstance(error, self._ray.exceptions.RayError) and not raised:
                result = WorkerDied(f"{type(error).__name__}: {last_line(error)}")
                self._ray.kill(worker)
                worker = self._begin(name)
        self._idle.append((name, worker))
        return ticket, result

    def close(self) -> None:
        self._ray.shutdown()
        self._leave()

    def _join(self, address: str, quiet: Mapping[str, Any]) -> None:
        """Connect to a cluster: a driver must run on one of its nodes, so this machine becomes a node without cores."""
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--address", address, "--block"]
        command += ["--num-cpus", "0", "--num-gpus", "0", "--disable-usage-stats"]
        nowhere = subprocess.DEVNULL
        # Ray ends a driver that loses the cluster's head at once, and then nothing else would end the node
        dying = die_with_parent if sys.platform == "linux" else None
        self._node = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, preexec_fn=dying)
        deadline = time.monotonic() + JOINING
        while True:
            try:
                self._ray.init(address=address, **quiet)
                return
            except ConnectionError as error:
                refused = self._node.poll() is not None  # another token or version
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


def cluster_devices(wanted: str | Sequence[str]) -> list[torch.device]:
    """The devices that a setting names in a Ray cluster: every GPU, cores, or both; none for "auto".

    Raises:
        SpecError: it names single GPUs, which the cluster gives to its workers as it likes.
    """
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    if names == ["auto"]:
        return []
    if not names or set(names) - {"cpu", "cuda"} or len(set(names)) < len(names):
        allowed = '"auto", "cpu", "cuda" or ["cuda", "cpu"]'
        raise SpecError(f"[audit] devices: a Ray cluster chooses the GPU of each worker: {allowed}, got {wanted!r}")
    return [torch.device(name) for name in names]


def _visible(name: str) -> str:
    """Return CUDA's name of a GPU that this process, which may see only some, calls cuda:0 and so on; else ""."""
    if ":" not in name:
        return ""
    index = torch.device(name).index
    seen = os.environ.get(VISIBLE)
    return seen.split(",")[index].strip() if seen else str(index)
