"""A training that was killed at any moment goes on to the same bits, and the ledger has neither gap nor double."""

import json
import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAvg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedgauge.client import files
from fedgauge.server import app as server_app
from fedgauge.server.app import federate
from fedgauge.server.store.checkpoint import Checkpoint, starting_point
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import NotResumable, Run, RunBusy
from fedgauge.server.store.tape import read_tensors
from fedgauge.server.strategy.build import STRATEGY

USES = STRATEGY.names()
SEEN = (Participation(0, "accepted", "", 2, "a:b"), Participation(1, "missing", "no reply"))


class Killed(Exception):
    """In the place of a kill, where the processes's own end does not matter."""


def make(kit: Any, folder: Path, **changes: Any) -> Run:
    run: Run = kit.make_run(folder, kit.scenario(**{"clients": 3, **changes}), tape=False)
    return run


def train(kit: Any, run: Run, draw: int = 0, **grid: Any) -> None:
    federate(run, kit.grid(run.scenario(), draw=draw, **grid))


def stop_after(monkeypatch: pytest.MonkeyPatch, round: int) -> None:
    """Let the server die as it enters a round in the ledger: its checkpoint is the last that was written."""

    def enter(self: Any, at: int, *seen: Any) -> None:
        if at == round:
            raise Killed
        entered(self, at, *seen)

    entered = Ledger.record_intake
    monkeypatch.setattr(Ledger, "record_intake", enter)


def told(run: Run) -> dict[str, Any]:
    """All that a training leaves, less its times: rows, jobs, tape, model."""
    with run.ledger() as ledger:
        jobs = ledger._db.execute("SELECT key, attack_id, round, client, other, wave, state FROM jobs ORDER BY key")
        return {
            "rounds": [(r["round"], r["accuracy"], r["loss"]) for r in ledger.rounds()],
            "observations": [tuple(o) for o in ledger.observations()],
            "jobs": [tuple(j) for j in jobs],
            "tape": {p.name: p.read_bytes() for p in sorted((run.folder / "tape").iterdir())},
            "model": run.model.read_bytes() if run.model.exists() else None,
        }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    for part in a:
        assert a[part] == b[part], f"{part} differs"
    return True


# --------------------------------------------------------------------------------------- killed at every single write


@contextmanager
def counted(kill_at: int) -> Iterator[list[int]]:
    """Counts the moments before and after each file that appears and each transaction; at one of them the process is killed."""
    moments = [0]

    def moment() -> None:
        moments[0] += 1
        if moments[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def replace(*names: Any, **folders: int) -> None:
        moment()
        replaced(*names, **folders)
        moment()

    @contextmanager
    def transaction(self: Ledger) -> Iterator[Any]:
        with transacted(self) as db:
            yield db
            moment()
        moment()

    replaced, transacted = os.replace, Ledger._transaction
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files.os, "replace", replace)
        patched.setattr(Ledger, "_transaction", transaction)
        yield moments


def killed_at(moment: int, work: Callable[[], None]) -> bool:
    """Whether the work, in a process of its own, came so far that it was killed there."""
    child = os.fork()
    if child == 0:
        with counted(moment):
            try:
                work()
            except BaseException:  # the parent tells, by the exit status; this process must not go on as a test
                os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed by itself"
    return False


@pytest.mark.slow
def test_a_server_killed_at_any_write_goes_on_to_the_same_bits(kit: Any, tmp_path: Path) -> None:
    """SIGKILL before and after each file appears, before and after each transaction; other node ids afterwards."""
    changes = dict(strategy={"use": "FedAdam"}, clients=2, rounds=2)
    whole = make(kit, tmp_path / "whole", **changes)
    train(kit, whole)
    expected = told(whole)
    assert len(expected["rounds"]) == 3 and len(expected["observations"]) == 4 and len(expected["jobs"]) == 16
    moment, died = 0, True
    while died:
        moment += 1
        run = make(kit, tmp_path / f"killed-{moment}", **changes)
        died = killed_at(moment, lambda run=run: train(kit, run))  # type: ignore[misc]  # mypy knows no such lambda
        before = told(run)
        train(kit, run, draw=moment)
        assert same(told(run), expected), moment
        # what a kill leaves is a part of what there will be: nothing was ever there that had to be taken back
        assert set(before["observations"]) <= set(expected["observations"])
        assert set(before["jobs"]) <= set(expected["jobs"])
    assert moment == 1 + 2 * (1 + 2 * (3 + 2 + 2) + 1), "two for each write: round 0, two rounds of seven, the model"


@pytest.mark.parametrize("use", USES)
def test_every_stock_strategy_goes_on_to_the_same_bits(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    strategy: dict[str, Any] = {"use": use}
    if use == "FedAvgM":
        strategy |= {"server_momentum": 0.9, "server_learning_rate": 0.7}
    if use in ("FedAdam", "FedYogi"):
        strategy |= {"beta_1": 0.9, "beta_2": 0.99}
    whole, run = (make(kit, tmp_path / name, strategy=strategy, rounds=2) for name in ("whole", "run"))
    train(kit, whole)
    with monkeypatch.context() as patched:
        stop_after(patched, 1)
        with pytest.raises(Killed):
            train(kit, run)
    train(kit, run, draw=1)
    same(told(run), told(whole))


def test_batchnorm_statistics_go_on(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "data": {"use": "mnist5k", "batch_size": 4, "auxiliary": 64},
        "model": {"use": "convnet", "width": 1, "norm": "batch", "mode": "train"},
        "clients": 2,
        "rounds": 2,
    }
    whole, run = make(kit, tmp_path / "whole", **changes), make(kit, tmp_path / "run", **changes)
    train(kit, whole)
    with monkeypatch.context() as patched:
        stop_after(patched, 1)
        with pytest.raises(Killed):
            train(kit, run)
    first = Checkpoint.read(run.folder)
    assert first is not None and first.buffers
    train(kit, run, draw=1)
    same(told(run), told(whole))
    saved = read_tensors(run.model)
    assert any(not torch.equal(saved[k], t) for k, t in first.buffers.items())


# ---------------------------------------------------------------------------------------------- bringing a run back


@pytest.fixture
def half(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that was killed with the checkpoint of round 2 of 3 written and its rows not."""
    run = make(kit, tmp_path / "half")
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        with pytest.raises(Killed):
            train(kit, run)
    return run


def start(run: Run) -> Checkpoint | None:
    with run.ledger() as ledger:
        return starting_point(run, ledger, run.scenario())


def rounds_of(run: Run) -> tuple[set[int], set[int]]:
    with run.ledger() as ledger:
        return {r["round"] for r in ledger.rounds()}, {o["round"] for o in ledger.observations()}


def test_what_the_ledger_lacks_of_the_last_round_is_entered_once(half: Run) -> None:
    assert rounds_of(half) == ({0, 1}, {1})
    for _ in range(2):
        found = start(half)
        assert found is not None and found.round == 2
        assert rounds_of(half) == ({0, 1}, {1, 2})
        with half.ledger() as ledger:
            assert ledger.progress().queued == 2 * 3 * 4


def test_rows_whose_updates_were_deleted_meanwhile_are_not_entered_again(half: Run) -> None:
    """[tape] keep = none deletes what was attacked; entering the round again would promise files that are gone."""
    start(half)
    with half.ledger() as ledger:
        ledger.mark_deleted(2)
    start(half)
    with half.ledger() as ledger:
        assert [o["digest"] for o in ledger.observations() if o["round"] == 2] == [None] * 3


def test_files_of_a_killed_round_are_deleted(half: Run) -> None:
    left = [
        half.folder / "tape" / name
        for name in ("round-00003.safetensors", "round-00003-client-00007.safetensors", ".part-x")
    ]
    for path in left:
        path.write_bytes(b"private")
    kept = {p for p in (half.folder / "tape").iterdir() if p not in left}
    start(half)
    assert set((half.folder / "tape").iterdir()) == kept and len(kept) == 2 * (1 + 3)


def test_rounds_beyond_the_checkpoint_are_trained_again_without_a_double(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk took no checkpoint of rounds 2 and 3: the training went on, was killed, and goes on from round 1."""
    whole, run = make(kit, tmp_path / "whole", rounds=4), make(kit, tmp_path / "run", rounds=4)
    train(kit, whole)
    write = Checkpoint.write

    def full(self: Checkpoint, folder: Path) -> None:
        if self.round > 1:
            raise OSError(28, "No space left on device")
        write(self, folder)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "write", full)
        stop_after(patched, 4)
        with pytest.raises(Killed):
            train(kit, run)
    assert rounds_of(run) == ({0, 1, 2, 3}, {1, 2, 3})
    with run.ledger() as ledger:
        assert ("checkpoint", 4) in {(problem.code, problem.round) for problem in ledger.problems()}
        while (lease := ledger.lease()) is not None:  # all of them were attacked meanwhile
            ledger.fail(lease, "whatever")
    with run.lock("audit"), pytest.raises(RunBusy):
        start(run)
    train(kit, run, draw=1)
    expected = told(whole)
    with run.ledger() as ledger:
        states = {j["round"]: j["state"] for j in ledger._db.execute("SELECT round, state FROM jobs")}
        assert states == {1: "failed", 2: "queued", 3: "queued", 4: "queued"}
        assert {r["round"] for r in ledger.scores()} == {1}, "what was scored of rounds trained again is gone"
    found = told(run)
    del found["jobs"], expected["jobs"]
    same(found, expected)


def test_a_run_without_a_checkpoint_is_never_trained_over(kit: Any, tmp_path: Path) -> None:
    run = kit.make_run(tmp_path / "old", kit.scenario(), rounds=2)  # rounds, and no checkpoint
    before = told(run)
    with pytest.raises(NotResumable):
        train(kit, run)
    same(told(run), before)


def test_clients_with_a_state_cannot_resume(kit: Any, tmp_path: Path) -> None:
    def run_of(name: str, **settings: Any) -> Run:
        links = [
            {"use": "local_sgd", "rate": 0.1},
            {"use": "top_k", "keep": 0.5, **settings},
        ]
        run = make(kit, tmp_path / name, chain=links, rounds=1)
        train(kit, run)
        return run

    with pytest.raises(NotResumable):
        start(run_of("remembers"))
    assert start(run_of("forgets", error_feedback=False)) is not None


def overwrite(name: str, data: bytes) -> Callable[[Run], object]:
    return lambda run: (run.folder / name).write_bytes(data)


FACTS, TENSORS = "checkpoint.json", "checkpoint-00002.safetensors"
DAMAGES: dict[str, tuple[Callable[[Run], object], str]] = {
    "cut": (overwrite(FACTS, b'{"version": 1, "rou'), FACTS),
    "no facts": (overwrite(FACTS, b'{"version": 1}'), FACTS),
    "a list": (overwrite(FACTS, b"[]"), FACTS),
    "a list that names a refusal": (overwrite(FACTS, b'["refused"]'), FACTS),
    "deep": (overwrite(FACTS, b"[" * 100_000), FACTS),
    "a flipped bit": (lambda run: spoil(run.folder / TENSORS), TENSORS),
    "no number": (lambda run: changed_facts(run, round=float("inf")), FACTS),
    "no tensors": (lambda run: (run.folder / TENSORS).unlink(), TENSORS),
}


def changed_facts(run: Run, **facts: object) -> None:
    path = run.folder / FACTS
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_nothing_is_trained_over(half: Run, damage: str) -> None:
    spoils, words = DAMAGES[damage]
    spoils(half)
    before = told(half)
    with pytest.raises(NotResumable, match=words):
        start(half)
    same(told(half), before)


def test_a_second_server_on_a_run_is_refused_before_it_touches_anything(kit: Any, half: Run) -> None:
    before = told(half)
    with half.lock("server"), pytest.raises(RunBusy):
        train(kit, half)
    same(told(half), before)


# ------------------------------------------------------------------------------------------------ a strategy's state

DTYPES = ["float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype, shape = np.dtype(draw(st.sampled_from(DTYPES))), tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = math.prod(shape) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    made = (raw % 2 if dtype.kind == "b" else raw).view(dtype).reshape(shape)
    return np.asfortranarray(made) if made.ndim and draw(st.booleans()) else made


def record(named: dict[str, Any]) -> ArrayRecord:
    return ArrayRecord({k: Array(np.array(v, order="C")) for k, v in named.items()})


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), arrays(),
    arrays().filter(lambda a: a.size == 1).map(lambda a: a.reshape(-1)[0]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers()), inner, max_size=3),
        st.dictionaries(st.text(max_size=4), arrays(), max_size=3).map(record),
    ),
    max_leaves=8,
)  # fmt: skip


def exact(a: Any, b: Any) -> bool:
    """Equal in type, bits and order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, Array):
        return exact(a.numpy(), b.numpy())
    if isinstance(a, dict | ArrayRecord):
        return list(a) == list(b) and all(exact(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(exact, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES)
def test_every_state_of_a_strategy_is_restored_exactly(tmp_path: Path, value: Any) -> None:
    params = {"w": torch.ones(2), "a": torch.ones(1, dtype=torch.float64)}  # a file has wide types first
    Checkpoint(3, params, {}, {"kept": value}, SEEN).write(tmp_path)
    found = Checkpoint.read(tmp_path)
    assert found is not None
    assert exact(found.strategy["kept"], value)
    assert found.seen == SEEN and list(found.params) == ["w", "a"] and torch.equal(found.params["w"], torch.ones(2))


class Drawing(FedAvg):
    """A strategy that keeps a generator: another one in its place would draw other numbers."""

    def __init__(self) -> None:
        super().__init__(1.0, 0.0, 1, 0, 1)
        self.rng = random.Random(1)


def test_a_strategy_that_cannot_be_saved_trains_on_and_is_refused_later(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(kit, tmp_path / "run", rounds=2)
    monkeypatch.setattr(server_app, "build_strategy", lambda *_: Drawing())
    train(kit, run)
    assert rounds_of(run) == ({0, 1, 2}, {1, 2})
    with pytest.raises(NotResumable):
        start(run)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Checkpoint(1, {"w": torch.ones(2)}, {}, {}, SEEN).write(tmp_path)
    for failing in (1, 2):
        calls = iter(range(1, 9))

        def replace(*names: Any, calls: Any = calls, failing: int = failing) -> None:
            if next(calls) == failing:
                raise OSError(28, "No space left on device")
            os.rename(*names)

        with monkeypatch.context() as patched:
            patched.setattr(files.os, "replace", replace)
            with pytest.raises(OSError, match="space"):
                Checkpoint(2, {"w": torch.zeros(2)}, {}, {}, ()).write(tmp_path)
        found = Checkpoint.read(tmp_path)
        assert found is not None and found.round == 1 and torch.equal(found.params["w"], torch.ones(2))
    Checkpoint(2, {"w": torch.zeros(2)}, {}, {}, ()).write(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-00002.safetensors", "checkpoint.json"]
