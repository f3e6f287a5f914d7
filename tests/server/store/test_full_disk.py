"""A full disk costs observations, each with its reason, and never a round."""

import errno
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from fedgauge.server.app import federate
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store import checkpoint, tape
from fedgauge.server.store.run import Run
from fedgauge.simulations.run.in_memory import train
from tests.forks import forked

FULL = f"not recorded: {os.strerror(errno.ENOSPC)}"


def trained(kit: Any, folder: Path) -> Run:
    run: Run = kit.make_run(folder, kit.scenario(clients=3, rounds=3), tape=False)
    federate(run, kit.grid(run.scenario()))
    return run


def fill(monkeypatch: pytest.MonkeyPatch, *full: str) -> None:
    """Let the disk be full for files whose name has one of these in it."""
    replacing = tape.replacing

    def full_for_some(path: Path) -> Any:
        if any(part in path.name for part in full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replacing(path)

    monkeypatch.setattr(tape, "replacing", full_for_some)


def rows(run: Run) -> dict[tuple[int, int], tuple[str, str, bool]]:
    with run.ledger() as ledger:
        return {(o["round"], o["client"]): (o["status"], o["reason"], bool(o["digest"])) for o in ledger.observations()}


def test_a_full_disk_is_reported_and_the_rest_is_attacked(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(kit, tmp_path / "whole")
    with monkeypatch.context() as patched:
        fill(patched, "round-00002-client-00001", "round-00003.safetensors")
        run = trained(kit, tmp_path / "full")
    assert run.model.read_bytes() == whole.model.read_bytes()
    lost = {(2, 1), (3, 0), (3, 1), (3, 2)}
    assert rows(run) == {key: ("accepted", FULL, False) if key in lost else row for key, row in rows(whole).items()}
    assert sorted(p.name for p in (run.folder / "tape").glob("round-00003*")) == [], "no update without its weights"
    with run.ledger() as ledger:
        assert ledger.progress().queued == (9 - len(lost)) * 4
    serve(run, LocalExecutor())
    with run.ledger() as ledger:
        assert (ledger.progress().failed, ledger.progress().queued) == (0, 0)


def test_weights_without_an_update_are_deleted(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, "client")
    run = trained(kit, tmp_path / "full")
    assert set(rows(run).values()) == {("accepted", FULL, False)}
    assert list((run.folder / "tape").iterdir()) == []


def train_limited(run: Run, size: int) -> None:
    """Train where no file may be larger, and exit with the error's number."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        train(run)
    except OSError as error:
        sys.exit(error.errno)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's files by RLIMIT_FSIZE")
def test_a_real_limit_of_the_system_is_survived(kit: Any, tmp_path: Path) -> None:
    """The kernel's own refusal: files larger than the ledger's cannot be written, neither tape nor checkpoint nor model."""
    changes = dict(clients=2, rounds=2, model={"use": "mlp", "hidden": [300]})  # 950 kB of weights
    run = kit.make_run(tmp_path / "run", kit.scenario(**changes), tape=False)
    child = forked(train_limited, run, 700_000)
    child.join()
    assert child.exitcode == errno.EFBIG, "for the model, at the end"
    found = rows(run)
    assert set(found) == {(r, c) for r in (1, 2) for c in (0, 1)}
    assert set(found.values()) == {("accepted", f"not recorded: {os.strerror(errno.EFBIG)}", False)}
    with run.ledger() as ledger:
        assert [r["round"] for r in ledger.rounds()] == [0, 1, 2]
        assert ("checkpoint", 2) in {(problem.code, problem.round) for problem in ledger.problems()}
    assert checkpoint.Checkpoint.read(run.folder) is None
    assert not [p for p in run.folder.rglob(".part-*")], "what was written half is private, too"
