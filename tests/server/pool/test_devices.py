"""Waves on devices: the CPU's scores on each, and a device that fails costs no row and says why."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave
from fedgauge.attacks.engine.devices import CPU
from fedgauge.client.components import SpecError, allowing
from fedgauge.server.pool import worker
from fedgauge.server.pool.executors import LocalExecutor, Result, WorkerDied
from fedgauge.server.pool.ray_executor import RayExecutor, _visible, cluster_devices
from fedgauge.server.pool.service import ATTEMPTS, make_executor, serve
from fedgauge.server.pool.worker import Task, Worker
from fedgauge.server.store.ledger_types import Progress
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import AuditOptions
from tests.separate_device import DEVICE, separate_device
from tests.server.pool.score_rows import progress, score_rows

IG = {"use": "inverting_gradients", "iterations": 4}
HERE = f"{__name__}:fails_there"
ERRORS = {
    "one problem": MemoryError("a single problem does not fit into memory: CUDA out of memory"),
    "the wave": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "lost": RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"),
    "foreign": TypeError("can't convert cuda:0 device type tensor to numpy"),
}


@dataclass(frozen=True)
class fails_there(Attack):
    """Raises what it is told to, on every device but the CPU."""

    error: str = ""
    tried: ClassVar[list[tuple[int, ...]]] = []

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if next(iter(wave.params.values())).device != CPU:
            self.tried.append(wave.clients)
            raise ERRORS[self.error]
        return [Reconstruction(None, None, 0.0, 1, 0.0, "diverged", "as told") for _ in wave.clients]


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    fails_there.tried.clear()
    with allowing(["tests"]):
        yield


def computed(run: Run) -> set[tuple[str, str, int]]:
    """Attack, device, and how many jobs were computed there."""
    query = (
        "SELECT a.name attack, substr(computed_on, 1, instr(computed_on, ' ') - 1) device, count(*) jobs"
        " FROM jobs j JOIN attacks a ON a.id = j.attack_id WHERE computed_on NOTNULL GROUP BY 1, 2"
    )
    with run.ledger() as ledger:
        return {(r["attack"], r["device"], r["jobs"]) for r in ledger._db.execute(query)}


def reasons(run: Run) -> dict[str, str]:
    with run.ledger() as ledger:
        return {r["attack"]: r["reason"] for r in ledger.reasons()}


def close(one: Run, other: Run) -> None:
    """The same rows, none of them twice, with the same values."""
    here, there = score_rows(one), score_rows(other)
    assert [r[:6] for r in here] == [r[:6] for r in there] and len({r[:5] for r in here}) == len(here) > 0
    values = [[float.fromhex(r[6]) for r in rows if r[6] is not None] for rows in (here, there)]
    assert values[0] == pytest.approx(values[1], rel=1e-3)


# ----------------------------------------------------------------------------------------------------- where waves are


def test_waves_on_a_device_have_the_cpus_scores_and_name_the_device(kit: Any, tmp_path: Path) -> None:
    scenario = kit.scenario(attack=[IG, {"use": "analytic"}], audit={"executor": "local", "wave": 2})
    here, there = (kit.make_run(tmp_path / name, scenario) for name in ("here", "there"))
    serve(here, LocalExecutor())
    with separate_device() as device:
        serve(there, LocalExecutor(device))
    close(here, there)
    assert {(a, d) for a, d, _ in computed(here)} == {
        (a, "cpu") for a in ("inverting_gradients", "analytic", "mean_image", "class_mean_image", "random_image")
    }
    assert computed(there) == {
        ("inverting_gradients", str(DEVICE), 4),
        *((a, "cpu", 4) for a in ("analytic", "mean_image", "class_mean_image", "random_image")),
    }, "what is faster on the CPU stays there"
    with there.ledger() as ledger:
        assert {words.split()[0] for words in ledger.devices()} == {"cpu", str(DEVICE)}


class Sharing(LocalExecutor):
    """Two devices that take waves from the same queue."""

    slots = 2

    def __init__(self) -> None:
        super().__init__()
        self.workers = [Worker(DEVICE, name=name) for name in ("cuda:0", "cuda:2")]
        self.held: list[tuple[int, Task, Worker]] = []

    def submit(self, ticket: int, task: Task) -> None:
        self.held.append((ticket, task, self.workers.pop()))

    def next_done(self, timeout: float) -> tuple[int, Result] | None:
        ticket, task, idle = self.held.pop()  # the later wave ends first
        self.workers.append(idle)
        return ticket, idle.attack(task)


def test_two_devices_share_waves_and_score_as_one(kit: Any, tmp_path: Path) -> None:
    scenario = kit.scenario(attack=[IG], audit={"executor": "local", "wave": 1})
    one, two = (kit.make_run(tmp_path / name, scenario) for name in ("one", "two"))
    with separate_device() as device:
        serve(one, LocalExecutor(device))
        serve(two, Sharing())
    assert score_rows(one) == score_rows(two)
    on = {d: n for a, d, n in computed(two) if a == "inverting_gradients"}
    assert set(on) == {"cuda:0", "cuda:2"} and sum(on.values()) == 4, "each result names its own device"


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("one problem", "attacked on the CPU: a single problem"),
        ("the wave", "attacked on the CPU: the batch of updates"),
        ("lost", "attacked on the CPU: lazy:0 raised RuntimeError: CUDA error"),
        ("foreign", "attacked on the CPU: lazy:0 raised TypeError"),
    ],
)
def test_a_wave_that_fails_on_a_device_is_attacked_on_the_cpu_with_its_reason(
    kit: Any, tmp_path: Path, error: str, why: str
) -> None:
    table = {"use": HERE, "error": error, "iterations": 1}
    scenario = kit.scenario(attack=[table, IG], audit={"executor": "local", "wave": 2})
    whole, run = (kit.make_run(tmp_path / name, scenario) for name in ("whole", "run"))
    serve(whole, LocalExecutor())
    with separate_device() as device:
        serve(run, LocalExecutor(device))
    close(whole, run)
    assert progress(run) == Progress(done=20)
    told, lost = reasons(run), error == "lost"
    assert told["fails_there"].startswith(why) and told["fails_there"].endswith("; as told")
    assert fails_there.tried == ([(0, 1)] if lost else [(0, 1), (2, 3)]), "after a CUDA error nothing is tried there"
    where = {(a, d) for a, d, _ in computed(run)}
    assert ("fails_there", "cpu") in where and ("fails_there", str(DEVICE)) not in where
    assert ("inverting_gradients", "cpu" if lost else str(DEVICE)) in where
    assert ("CUDA error" in told.get("inverting_gradients", "")) == lost
    assert "mean_image" not in told, "it is the CPU's in any case"


def test_an_operator_without_equal_bits_is_allowed_and_that_is_on_record(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    plain = worker.attack_wave

    def refuse(task: Task, device: torch.device = CPU, precision: Any = "ieee", same: bool = True) -> Any:
        asked.append((device.type, same))
        if device != CPU and same:
            raise RuntimeError("scatter_add_cuda_kernel does not have a deterministic implementation")
        return plain(task)

    monkeypatch.setattr(worker, "attack_wave", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    run = kit.make_run(tmp_path / "run", kit.scenario(attack=[IG], audit={"executor": "local", "wave": 4}))
    serve(run, LocalExecutor(torch.device("cuda", 0), "tf32"))
    assert asked[:2] == [("cuda", True), ("cuda", False)]
    with run.ledger() as ledger:
        version = f"torch {torch.__version__}"
        assert ledger.devices() == [f"cuda:0 H100, TF32 products, {version}, operators that may change the last bits"]
        assert ledger.reasons() == []


class Deadly(LocalExecutor):
    """Loses its worker whenever a wave is attacked on the device."""

    def next_done(self, timeout: float) -> tuple[int, Result] | None:
        ticket, task = self._waiting[0]
        if "inverting" not in task.planned.name or task.last:
            return super().next_done(timeout)
        self._waiting.popleft()
        return ticket, WorkerDied("ActorDiedError: killed")


def test_the_last_attempt_at_a_wave_that_ends_its_workers_is_on_the_cpu(kit: Any, tmp_path: Path) -> None:
    scenario = kit.scenario(attack=[IG], audit={"executor": "local", "wave": 4})
    whole, run = (kit.make_run(tmp_path / name, scenario) for name in ("whole", "run"))
    serve(whole, LocalExecutor())
    with separate_device() as device:
        serve(run, Deadly(device))
    assert score_rows(run) == score_rows(whole)
    assert reasons(run).keys() == {"inverting_gradients"} and "CPU" in reasons(run)["inverting_gradients"]
    with run.ledger() as ledger:
        tried = ledger._db.execute("SELECT max(attempts) attempts FROM jobs").fetchone()["attempts"]
    assert tried == ATTEMPTS


# ------------------------------------------------------------------------------------------------------ which there are


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


class FakeRay(RayExecutor):
    """Records what it was asked for."""

    def __init__(self, *asked: Any) -> None:
        self.asked = asked


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        ("auto", ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda", ["cuda:0", "cuda:1", "cuda:2"]),
        ("cpu", ["cpu"]),
        (("cuda:2", "cpu"), ["cuda:2", "cpu"]),
    ],
)
def test_the_named_devices_get_workers(
    three_gpus: None, monkeypatch: pytest.MonkeyPatch, devices: Any, names: list[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("fedgauge.server.pool.service.RayExecutor", FakeRay)
    made = make_executor(AuditOptions(workers=4, devices=devices, precision="tf32"))
    assert isinstance(made, FakeRay)
    assert made.asked == (4, None, [torch.device(name) for name in names], "tf32")
    local = make_executor(AuditOptions(executor="local", devices=devices))
    assert isinstance(local, LocalExecutor) and str(local._worker.device) == names[0], "in one process, the first"


@pytest.mark.parametrize("devices", ["cuda:3", "gpu"])
def test_a_device_that_is_not_there_is_a_mistake(three_gpus: None, devices: Any) -> None:
    with pytest.raises(SpecError):
        make_executor(AuditOptions(executor="local", devices=devices))


def test_a_gpu_has_the_number_that_cuda_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _visible("cuda:1") == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-8f2c,6")
    assert [_visible(f"cuda:{i}") for i in range(3)] == ["4", "GPU-8f2c", "6"]
    assert _visible("cpu") == _visible("cuda") == ""


class FakeCluster:
    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.cores = 3.0
        self.left = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cores, **({"GPU": float(self.gpus)} if self.gpus else {})}

    def shutdown(self) -> None:
        self.left = True


@pytest.mark.parametrize(
    ("wanted", "gpus", "names"),
    [
        ("auto", 2, ["cuda", "cuda"]),
        ("auto", 0, ["cpu"] * 3),
        ("cpu", 2, ["cpu"] * 3),
        ("cuda", 2, ["cuda", "cuda"]),
        (("cpu", "cuda"), 2, ["cuda", "cuda", "cpu", "cpu", "cpu"]),
        ("cuda", 0, None),
        (("cuda", "cpu"), 0, None),
    ],
)
def test_a_cluster_has_a_worker_for_each_gpu(wanted: Any, gpus: int, names: list[str] | None) -> None:
    executor = FakeRay()
    executor._ray = FakeCluster(gpus)
    with nullcontext() if names else pytest.raises(SpecError):
        assert executor._names_in_cluster(cluster_devices(wanted)) == names
    assert executor._ray.left == (names is None)


def test_a_cluster_has_a_worker_for_each_core_and_for_those_that_join(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(0)
    cluster.cores = 0.0  # the containers of the workers start later
    monkeypatch.setattr(RayExecutor, "_connect", lambda self, workers, *_: self._names_in_cluster([CPU]))
    monkeypatch.setattr(RayExecutor, "_begin", lambda self, name: object())
    monkeypatch.setattr(RayExecutor, "_ray", cluster, raising=False)
    cluster.remote = lambda **_: lambda actor: actor  # type: ignore[attr-defined]
    executor = RayExecutor(workers=2, address="ray-head:6379")
    assert executor.slots == 1, "a second one would wait for a core for ever, and hold its wave"
    cluster.cores = 4.0
    assert executor.slots == len(executor._idle) == 4
    executor._leave()


@pytest.mark.parametrize("wanted", ["cuda:0", ("cuda:0", "cuda:1"), ("auto", "cpu"), (), ("cpu", "cpu")])
def test_a_cluster_chooses_its_gpus_itself(wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(SpecError):
        make_executor(AuditOptions(devices=wanted))
