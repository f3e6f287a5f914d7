"""Attack workers as Ray actors, on this machine or in a cluster."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgauge.server.children import die_with_parent
from fedgauge.server.pool.executors import Result, WorkerDied, last_line
from fedgauge.server.pool.private_ray import private_ray
from fedgauge.server.pool.worker import Task, TaskResult

LOOPBACK = "127.0.0.1"
JOINING = 60.0  # seconds that a Ray cluster may take to answer


class RayExecutor:
    """Ray actors, one core each; an actor whose process dies is replaced.

    Args:
        address: "host:port" of a cluster's head, which this machine joins as a node without cores; "auto": the cluster that
            this machine belongs to already; None: start Ray on this machine, for this user alone.

    Raises:
        RuntimeError: this process imported Ray before, with settings by which others could reach it.
        ConnectionError: no cluster answers at the address, or it has another token.
    """

    def __init__(self, workers: int, address: str | None = None) -> None:
        self.slots = workers  # more waves in flight would hold memory without making anything faster
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without it Ray warns of a coming change
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._node: subprocess.Popen[bytes] | None = None
        # a short path, because socket paths are limited; removed at the end
        self._scratch = tempfile.mkdtemp(prefix="fedgauge-ray-")
        self._connect(workers, address)

        class Worker:
            """Defined in this method, so that Ray sends it by value."""

            def __init__(self) -> None:
                import fedgauge.server.pool.worker  # noqa: F401  (torch loads while Flower starts, not in the first wave)

            def pid(self) -> int:
                return os.getpid()

            def attack(self, task: Task) -> TaskResult:
                from fedgauge.server.pool.worker import attack_wave

                return attack_wave(task)

        # Ray itself retries and restarts nothing: the ledger counts attempts, and a restarting actor would refuse every
        # task it is given meanwhile and so use them up
        gpus = 1 if address is not None and self._ray.cluster_resources().get("GPU") else 0
        self._actor: Any = self._ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, max_task_retries=0)(Worker)
        self._idle = deque(self._actor.remote() for _ in range(workers))
        self._flying: dict[Any, tuple[int, Any]] = {}

    def _connect(self, workers: int, address: str | None) -> None:
        """Start Ray here or join the cluster; where that fails, nothing of it is left."""
        settings = private_ray(Path(self._scratch)) if address is None else {}
        before = {key: os.environ.get(key) for key in settings}
        os.environ.update(settings)  # Ray reads it when it is imported
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            import ray

            self._ray = ray
            if address is None:
                self._start(workers, quiet)
            else:
                self._join(address, quiet)
        except BaseException:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value
            self._leave()
            raise

    def _start(self, workers: int, quiet: Mapping[str, Any]) -> None:
        # a folder inside ours, as Ray opens its own to everybody, with the sockets of its store in it
        below = f"{self._scratch}/r"
        self._ray.init(address="local", num_cpus=workers, include_dashboard=False, _temp_dir=below, **quiet)
        if (at := self._ray.util.get_node_ip_address()) != LOOPBACK:
            self._ray.shutdown()
            raise RuntimeError(
                f"Ray was imported before the attack workers were asked for, and listens at {at}; expected "
                f"{LOOPBACK}: set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before Ray is imported"
            )

    def pids(self) -> list[int]:
        """The idle workers' process ids; waits until each is up."""
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
        except Exception as error:  # the wave failed, not the executor
            result = error
            raised = isinstance(error, self._ray.exceptions.RayTaskError)  # by the attack; the worker is alive
            if raised and isinstance(cause := getattr(error, "cause", None), Exception):
                result = cause  # as it was, not in Ray's wrapping
            if isinstance(error, self._ray.exceptions.RayError) and not raised:
                result = WorkerDied(f"{type(error).__name__}: {last_line(error)}")
                self._ray.kill(worker)
                worker = self._actor.remote()
        self._idle.append(worker)
        return ticket, result

    def close(self) -> None:
        self._ray.shutdown()
        self._leave()

    def _join(self, address: str, quiet: Mapping[str, Any]) -> None:
        """Connect to a cluster: a driver must run on one of its nodes, so this machine becomes a node without cores."""
        if address != "auto":
            command = [
                sys.executable,
                "-P",
                "-m",
                "ray.scripts.scripts",
                "start",
                "--address",
                address,
                "--num-cpus",
                "0",
            ]
            command += ["--num-gpus", "0", "--disable-usage-stats", "--block"]
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
                refused = self._node is not None and self._node.poll() is not None  # another token or version
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
