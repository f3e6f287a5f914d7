"""Clients that lie, files and names made to deceive: each refused, told, and nothing else affected."""

import io
import json
import math
import os
import pickle
import resource
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.client.components import SpecError
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.checkpoint import Checkpoint
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import NotResumable, Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import Tape, TapeError, read_tensors
from fedgauge.simulations.cli.main import main

METRICS = MetricRecord({"num-examples": 2})


class Exploding:
    """What a pickle would run: the test process ends loudly if anything unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (86,)


PICKLE = pickle.dumps(Exploding())


def npy_of_shape(shape: str, body: bytes = b"", descr: str = "<f4") -> bytes:
    words = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words + body


def update(at: Any, **spoiled: bytes) -> RecordDict:
    arrays = {k: Array(t.numpy()) for k, t in at.UPDATE.items()}
    arrays |= {k: Array("float32", (2,), "numpy.ndarray", data) for k, data in spoiled.items()}
    return RecordDict({"update": ArrayRecord(arrays), "metrics": METRICS})


def reason(at: Any, content: RecordDict) -> str:
    """Why client 1 is refused; client 0 must be accepted beside it."""
    at.answer(at.honest(), at.reply(1, content))
    (intake,) = at.intakes
    assert [a.client for a in intake.accepted] == [0]
    ((status, words),) = {(s.status, s.reason) for s in intake.refused}
    assert status == "rejected"
    return words  # type: ignore[no-any-return]  # of a fixture


# ------------------------------------------------------------------------------------------------------------ updates


@pytest.mark.parametrize("shape", ["(1000000000,)", "(2, 1000000000)"])
def test_a_shape_of_a_billion_in_a_header_is_refused_before_memory_is_taken(doorway: Any, shape: str) -> None:
    """The process may not have more than a little memory beyond what it has: NumPy would ask for 4 GB at once."""
    at = doorway()
    hostile = update(at, bias=npy_of_shape(shape, bytes(64)))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, hard))
    try:
        words = reason(at, hostile)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert words.startswith("bias cannot be ")


def test_a_zip_bomb_and_a_pickle_are_refused_unread(doorway: Any) -> None:
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("arr_0.npy", bytes(50_000_000))
    objects = io.BytesIO()
    np.save(objects, np.array([Exploding(), Exploding()], dtype=object), allow_pickle=True)  # written, never read
    for data in (bomb.getvalue(), PICKLE, objects.getvalue()):
        at = doorway()
        assert reason(at, update(at, bias=data)).startswith("bias cannot be ")


def test_an_update_belongs_to_its_sender_whatever_client_it_claims(doorway: Any) -> None:
    """Who a client is follows from the node that the SuperLink heard, not from what the reply says."""
    at = doorway()
    content = update(at)
    content["metrics"] = MetricRecord({"num-examples": 7, "client": 0, "src_node_id": 1, "partition-id": 0})
    content["who"] = ConfigRecord({"client": 0})
    at.answer(at.honest(), at.reply(1, content))
    assert [(a.client, a.examples) for a in at.intakes[0].accepted] == [(0, 2), (1, 7)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_poisons_no_weight(doorway: Any, value: float) -> None:
    at = doorway()
    content = update(at)
    content["metrics"] = MetricRecord({"num-examples": 2, "train_loss": value})
    trained = at.answer(at.honest(), at.reply(1, content))
    assert trained is not None and all(torch.isfinite(t).all() for t in trained.values())


# -------------------------------------------------------------------------------------------------------------- files

FILES = {"pickle": PICKLE, "zip": b"PK\x03\x04" + PICKLE, "torch": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + PICKLE}


@pytest.mark.parametrize("kind", FILES)
def test_a_crafted_file_in_any_place_of_a_run_is_named_and_runs_nothing(
    tmp_path: Path, make_scenario: Any, kind: str
) -> None:
    """Tape, reconstruction, memory, checkpoint, ledger: if one were unpickled, this process would be gone."""
    data = FILES[kind]
    path = tmp_path / "crafted.safetensors"
    path.write_bytes(data)
    with pytest.raises(TapeError):
        read_tensors(path)
    tape = Tape(tmp_path)
    tape._update(1, 0).write_bytes(data)
    with pytest.raises(TapeError):
        tape.read(1, 0)
    (tmp_path / "checkpoint.json").write_bytes(data)
    with pytest.raises(NotResumable):
        Checkpoint.read(tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(data)
    with pytest.raises(LedgerError):
        Ledger(tmp_path / "ledger.sqlite")
    weights = {"use": "mlp", "hidden": [4], "weights": str(path)}
    tables = dict(make_scenario().tables)
    with pytest.raises(SpecError):
        Scenario.from_tables({**tables, "model": weights})


def test_the_pickle_would_have_been_noticed(tmp_path: Path) -> None:
    """The control: a process that does unpickle it ends with the status by which we would know."""
    (tmp_path / "p").write_bytes(PICKLE)
    program = f"import pickle; pickle.load(open({str(tmp_path / 'p')!r}, 'rb'))"  # in a process that it ends
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 86


@pytest.fixture
def elsewhere(tmp_path: Path, make_taped: Any, make_scenario: Any) -> Run:
    """A run folder that came from elsewhere: what its ledger says was not written by us."""
    attack = {"use": "inverting_gradients", "iterations": 2}
    run: Run = make_taped(tmp_path / "deep" / "runs" / "theirs", make_scenario(attack=[attack]), rounds=1)
    return run


@pytest.mark.parametrize("name", ["x/../../../../outside", "/outside", "a\0b"])
def test_an_attacks_name_in_a_foreign_ledger_writes_nothing_outside_the_run(
    tmp_path: Path, elsewhere: Run, name: str
) -> None:
    with elsewhere.ledger() as ledger, ledger._transaction() as db:
        row = db.execute("SELECT planned FROM attacks WHERE name = 'inverting_gradients'").fetchone()
        spec = json.dumps({**json.loads(row["planned"]), "name": name})
        db.execute("UPDATE attacks SET name = ?, planned = ? WHERE name = 'inverting_gradients'", (name, spec))
    before = sorted(p for p in tmp_path.rglob("*") if p.is_dir())
    with pytest.raises(LedgerError):
        serve(elsewhere, LocalExecutor(), force=True)
    assert sorted(p for p in tmp_path.rglob("*") if p.is_dir()) == before
    outside = [p for p in tmp_path.rglob("*") if p.is_file() and not p.is_relative_to(elsewhere.folder)]
    assert outside == []
    with elsewhere.ledger() as ledger:
        assert not any(r["attack"] == name and r["example"] != WHOLE_BATCH for r in ledger.scores("psnr"))


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("command", [["report"], ["audit"]])
@pytest.mark.parametrize("name", ["..", "../elsewhere", "/", "link"])
def test_a_runs_name_that_leads_elsewhere_is_refused_and_writes_nothing(
    tmp_path: Path, command: list[str], name: str
) -> None:
    runs = tmp_path / "a" / "runs"
    runs.mkdir(parents=True)
    (tmp_path / "a" / "elsewhere").mkdir()
    (runs / "link").symlink_to(tmp_path / "a" / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    assert main([*command, name, "--runs", str(runs)]) == 2
    assert sorted(tmp_path.rglob("*")) == before
