"""What every test stands on: one thread, no network, a cache of its own, and small real federations."""

import fedgauge.client  # isort: skip  # mends torchvision before anything can import it

import fcntl
import gc
import os
import random
import re
import shutil
import sqlite3
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import HealthCheck, settings

from fedgauge.attacks.base import Wave
from fedgauge.attacks.source import FederationSource
from fedgauge.client.data_folder import data_folder
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from tests import small_runs

assert fedgauge.client  # the import is the point
gc.disable()  # until all tests are collected: nothing of them is garbage
# a shared machine may take any time over an example, and over making one. Fresh seeds would let a test fail on a change that
# has nothing to do with it, so each test derives its seed from its own code
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray reads it when it is imported: only the loopback address
# torch.manual_seed would note the stack for GPUs that never come, longer than it seeds
if not torch.cuda.is_available():
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        vars(kind).update(manual_seed_all=lambda seed: None)


class Unsynced(sqlite3.Connection):
    """A ledger in this process. No test cuts the power, and to be safe from that would take most of a small test's time."""

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql in ("PRAGMA journal_mode = WAL", "PRAGMA query_only = ON"):
            super().execute("PRAGMA synchronous = OFF")
        return super().execute(sql.replace("synchronous = NORMAL", "synchronous = OFF"), *values)


sqlite3.connect = partial(sqlite3.connect, factory=Unsynced)
os.environ["HF_HUB_OFFLINE"] = "1"  # a hub call without network would retry for 30 seconds

_cache = pytest.StashKey[tempfile.TemporaryDirectory[str]]()

LOCAL_SGD = {"use": "local_sgd", "rate": 0.1}
MakeFederation = Callable[..., Federation]


def pytest_configure(config: pytest.Config) -> None:
    # a partition that an older version of the code left in the user's cache would hide a mistake in today's
    config.stash[_cache] = tempfile.TemporaryDirectory(prefix="fedgauge-tests-")
    os.environ["XDG_STATE_HOME"] = config.stash[_cache].name
    if "PYTEST_XDIST_WORKER" not in os.environ:  # which has the variables from its parent, and shares what is cached
        os.environ["XDG_CACHE_HOME"] = config.stash[_cache].name
        # torch reuses code compiled for wider registers after ATEN_CPU_CAPABILITY has narrowed them, and fails to compile
        compiled = Path.home() / ".cache" / "fedgauge" / f"tests-{torch.backends.cpu.get_cpu_capability()}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    # datasets sorts with an argument that pyarrow 25 renames; it does so in flwr-datasets' shard partitioner
    config.addinivalue_line("filterwarnings", "ignore:Specifying null_placement in SortOptions:FutureWarning")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test-full` need not import files of which all tests are in `make test`."""
    if config.option.markexpr == "full" and collection_path.match("test_*.py"):
        return True if re.search(r"mark\.(full|product)", collection_path.read_text()) is None else None
    return None


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_cache].cleanup()


def _covering(
    cases: Sequence[pytest.Function], values: int, given: Sequence[pytest.Function] = ()
) -> list[pytest.Function]:
    """Few cases by which so many values of different arguments meet, if they don't in given ones; a checksum says who is first."""
    met = {
        case: set(combinations(((name, id(value)) for name, value in sorted(case.callspec.params.items())), values))
        for case in cases
    }
    missing = set().union(*met.values()).difference(*(met[case] for case in given))
    left = sorted(set(cases).difference(given), key=lambda case: zlib.crc32(case.nodeid.encode()))
    chosen: list[pytest.Function] = []
    while missing:
        best = max(left, key=lambda case: len(met[case] & missing))
        missing -= met[best]
        left.remove(best)
        chosen.append(best)
    return chosen


@pytest.hookimpl(wrapper=True)  # what is marked before `-m` looks, and ordered after it
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Leave each two values of a product to `make test-full`, beside each value in `make test`, and put slow files first."""
    products = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("product"):
            products[item.nodeid.partition("[")[0]].append(item)
    for cases in products.values():
        normal = _covering(cases, 1)
        full = _covering(cases, 2, normal)
        for case in full:
            case.add_marker(pytest.mark.full)
        for case in set(cases).difference(normal, full):
            items.remove(case)
    yield
    slow = sorted({item.path for item in items if item.get_closest_marker("slow")}, reverse=True)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    waiting = max(1, workers // 2)
    # worksteal begins with equal parts of the list: half of the workers get the slow files, so that the others use the cores
    parts = [[item for path in slow[k::waiting] for item in items if item.path == path] for k in range(waiting)]
    parts += [[]] * (workers - waiting)
    rest = iter([item for item in items if item.path not in slow])
    items[:] = [
        i for k, p in enumerate(parts) for i in (*p, *islice(rest, max(0, (len(items) + k) // workers - len(p))))
    ]


def pytest_collection_finish() -> None:
    """Flower's strategies collect garbage after every array: they need not look at all of torch and all tests each time."""
    gc.enable()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """What a test or a fixture draws without a generator of its own does not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


pytest_fixture_setup = pytest_runtest_call


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Fills a folder once for all workers of pytest-xdist: the first one to ask fills it, the others wait for it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder, done = root / f"shared-{name}", root / f"shared-{name}.done"
        with (root / f"shared-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return make


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors gain nothing from threads, and equal bits need one."""
    torch.set_num_threads(1)


@pytest.fixture
def double() -> Iterator[None]:
    """In float64 rounding hides no mistake."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def identity() -> Iterator[None]:
    """Outside a run, Flower's messages need to know who writes them."""
    before = TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    yield
    TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = before


@pytest.fixture
def local_data() -> Path:
    """The folder of local data; a test that asks for it is skipped where there is none."""
    folder = data_folder()
    if folder is None:
        pytest.skip("needs local data: set FEDGAUGE_DATA, or put shared/data beside the project")
    return folder


@pytest.fixture
def local_file(local_data: Path) -> Callable[[str], Path]:
    """The first file of local data that a pattern finds; a test that asks for what is not there is skipped."""

    def find(pattern: str) -> Path:
        found = sorted(local_data.glob(pattern))
        if not found:
            pytest.skip(f"needs {pattern} in the local data folder (FEDGAUGE_DATA)")
        return found[0]

    return find


@pytest.fixture
def no_local_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in the place of local data."""
    folder = tmp_path / "no-data"
    folder.mkdir()
    monkeypatch.setenv("FEDGAUGE_DATA", str(folder))
    return folder


@pytest.fixture(scope="session")
def tables() -> Callable[..., dict[str, Any]]:
    """The protocol's tables of a small federation: mnist5k, LeNet, two clients, one example, one step; changed by name."""

    def make(**changes: Any) -> dict[str, Any]:
        small: dict[str, Any] = {
            "seed": 0,
            "rounds": 3,
            "clients": 2,
            "data": {"use": "mnist5k"},
            "model": {"use": "lenet"},
            "chain": [LOCAL_SGD],
        }
        for key, value in changes.items():
            merged = isinstance(value, Mapping) and isinstance(small.get(key), Mapping)
            small[key] = {**small[key], **value} if merged else value
        return small

    return make


@pytest.fixture(scope="session")
def make_federation(tables: Callable[..., dict[str, Any]]) -> MakeFederation:
    """Builds the small federation, with changed tables: `make_federation(model={"use": "mlp"})`."""

    def make(**changes: Any) -> Federation:
        return Federation(Protocol.from_tables(tables(**changes)))

    return make


@pytest.fixture(scope="session")
def observe() -> Callable[..., Wave]:
    """What the server sees of some clients in the first round of a federation, as one wave."""

    def make(fed: Federation, clients: tuple[int, ...] = (0,), round: int = 1) -> Wave:
        return FederationSource(fed).wave(clients, round)

    return make


# ------------------------------------------------------------------------------------------------ runs without Flower


@pytest.fixture(scope="session")
def make_scenario() -> Callable[..., Scenario]:
    """Builds a small scenario whose audit runs in this process; tables changed by name."""
    return small_runs.scenario


@pytest.fixture(scope="session")
def make_taped() -> Callable[..., Run]:
    """Writes a run as training leaves it: real updates on the tape, the last client's replies refused, jobs queued."""
    return small_runs.taped


@pytest.fixture(scope="session")
def attacked_run(
    tmp_path_factory: pytest.TempPathFactory, make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run]
) -> Run:
    """A complete run, really attacked; not to be changed."""
    run = make_taped(tmp_path_factory.mktemp("runs") / "complete", make_scenario())
    serve(run, LocalExecutor())
    return run
