"""Anything at all at two doors (updates, files): accepted or refused in words, and nothing else affected.

FEDGAUGE_FUZZ sets how many inputs are tried at each place.
"""

import io
import math
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.server.store.checkpoint import Checkpoint
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import NotResumable
from fedgauge.server.store.tape import TapeError, read_tensors, write_tensors

FUZZ = settings.get_profile("fuzz")
pytestmark = pytest.mark.slow

INTEGERS = st.one_of(st.integers(-3, 9), st.sampled_from([2**31, 2**63 - 1, 2**64 - 1, -(2**63), 10**9]))
DIMENSIONS = st.lists(st.one_of(st.integers(-2, 4), st.sampled_from([10**9, 2**31, 2**62])), max_size=4)


# ------------------------------------------------------------------------------------------------------------ updates


@st.composite
def npy(draw: st.DrawFn) -> bytes:
    """An npy file as NumPy writes it, with a header of the client's choice, or spoiled."""
    shape = draw(st.sampled_from([(2, 3), (2,), (3, 2), (), (1, 2, 3)]))
    dtype = draw(st.sampled_from(["<f4", "<f8", ">f4", "<i8", "|b1", "<c8", "<f2"]))
    buffer = io.BytesIO()
    with np.errstate(invalid="ignore"):  # of NaN as an integer
        values = np.full(shape, draw(st.floats(width=16)), np.float32).astype(dtype)
    np.save(buffer, values, allow_pickle=False)
    data = bytearray(buffer.getvalue())
    if draw(st.booleans()):
        claimed = draw(DIMENSIONS)
        descr = draw(st.sampled_from(["<f4", "|O", "<f8", "|V0", "|S0", "<U1", "|V999999999", "<m8", "x"]))
        words = repr({"descr": descr, "fortran_order": draw(st.booleans()), "shape": tuple(claimed)})
        header = draw(st.one_of(st.just(words), st.text(max_size=60))).encode() + b"\n"
        version = draw(st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"]))
        size = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
        data = bytearray(b"\x93NUMPY" + version + size + header + draw(st.binary(max_size=64)))
    for place in draw(st.lists(st.integers(0, len(data) - 1), max_size=3)):
        data[place] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.integers(0, 4)) == 0 else bytes(data)


NAMES = st.one_of(st.sampled_from(["weight", "bias", "update", "metrics", "buffers"]), st.text(max_size=5))
ARRAYS = st.builds(
    Array,
    st.text(max_size=5),
    DIMENSIONS.map(lambda dims: tuple(d for d in dims if 0 <= d < 2**31)),
    st.sampled_from(["numpy.ndarray", "numpy.ndarray", "numpy.ndarray", "pickle", ""]),
    st.one_of(npy(), npy(), st.binary(max_size=40)),
)
NUMBERS = st.one_of(st.floats(), INTEGERS)
GOOD = {k: Array(np.full(tuple(shape), 0.1, np.float32)) for k, shape in {"weight": (2, 3), "bias": (2,)}.items()}
UPDATES = st.one_of(
    st.dictionaries(NAMES, ARRAYS, max_size=3),
    st.tuples(st.sampled_from(sorted(GOOD)), ARRAYS).map(lambda spoiled: {**GOOD, spoiled[0]: spoiled[1]}),
    st.just(GOOD),
).map(ArrayRecord)
METRICS = st.one_of(
    st.builds(lambda n: {"num-examples": n}, NUMBERS),
    st.dictionaries(NAMES, st.one_of(NUMBERS, st.lists(st.floats(), max_size=3)), max_size=2).map(
        lambda more: {"num-examples": 2, **more}
    ),
).map(MetricRecord)
CONTENTS = st.one_of(
    st.builds(lambda u, m: {"update": u, "metrics": m}, UPDATES, METRICS),
    st.dictionaries(
        NAMES,
        st.one_of(UPDATES, METRICS, st.just(ConfigRecord({"client": 0, "round": 7, "code": b"\x80"}))),
        max_size=4,
    ),
)


@settings(FUZZ)
@given(content=CONTENTS)
def test_no_reply_ends_a_round_or_touches_the_honest_client(doorway: Any, content: dict[str, Any]) -> None:
    at = doorway()
    trained = at.answer(at.honest(), at.reply(1, RecordDict(content)))
    (intake,) = at.intakes
    passed = [a.client for a in intake.accepted]
    assert passed in ([0], [0, 1])
    assert [(s.client, s.status) for s in intake.refused] == ([] if 1 in passed else [(1, "rejected")])
    assert all(s.reason.strip() for s in intake.refused)
    assert all(torch.equal(intake.accepted[0].update[k], u) for k, u in at.UPDATE.items())
    assert trained is not None and all(torch.isfinite(t).all() for t in trained.values())
    if passed == [0]:
        for k, t in at.PARAMS.items():
            torch.testing.assert_close(trained[k], t + at.UPDATE[k])


# -------------------------------------------------------------------------------------------------------------- files

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2]), "c": torch.tensor(True)}


Spoil = tuple[bytes | None, list[tuple[int, int]], int | None, bytes]
# another file altogether, or bytes to change (place, value), where to cut it, and what to add
SPOILS = st.tuples(
    st.one_of(st.none(), st.none(), st.binary(max_size=64), st.sampled_from([b"PK\x03\x04", b"\x80\x04\x95", b""])),
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4),
    st.one_of(st.none(), st.none(), st.integers(0, 2**16)),
    st.binary(max_size=4),
)


def spoiled(whole: bytes, spoil: Spoil) -> bytes:
    other, changes, cut, more = spoil
    if other is not None:
        return other
    made = bytearray(whole)
    for place, value in changes:
        made[place % len(made)] = value
    return bytes(made if cut is None else made[: cut % len(made)]) + more


@pytest.fixture(scope="module")
def tape_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tape") / "t.safetensors"
    write_tensors(path, TENSORS)
    return path


@pytest.fixture(scope="module")
def checkpoint_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    state = {"m_t": {"w": np.ones(3, np.float32)}, "momentum": [np.float64(2)], "eta": 0.1, "none": None}
    Checkpoint(2, {"w": torch.ones(3)}, {}, state, (Participation(0, "accepted", "", 2, "a:b"),)).write(folder)
    return folder


@pytest.fixture(scope="module")
def ledger_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    plan = AttackPlan((PlannedAttack("dlg", {"use": "dlg"}),))
    with Ledger(path, create=True) as ledger:
        ledger.add_attacks(plan, {"dlg": "card"})
        ledger.set_meta(state="trained")
        for round in (1, 2):
            ledger.record_intake(round, [Participation(c, "accepted", "", 2, f"{round}:{c}") for c in (0, 1)], plan)
            ledger.record_round(round, 0.5, 1.0, 0.1)
        lease = ledger.lease()
        assert lease is not None
        ledger.fail(lease, "whatever")
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("VACUUM")
    db.close()
    return path


@settings(FUZZ)
@given(kind=st.sampled_from(["tape", "checkpoint", "ledger"]), spoil=SPOILS)
def test_any_file_of_a_run_is_read_or_refused_by_name(
    tmp_path: Path, tape_file: Path, checkpoint_file: Path, ledger_file: Path, kind: str, spoil: Spoil
) -> None:
    words = str(tmp_path)
    try:
        if kind == "tape":
            path = tmp_path / "t.safetensors"
            path.write_bytes(spoiled(tape_file.read_bytes(), spoil))
            assert all(t.numel() <= 10**6 for t in read_tensors(path).values())
        elif kind == "checkpoint":
            path = tmp_path / "checkpoint.json"
            path.write_bytes(spoiled((checkpoint_file / path.name).read_bytes(), spoil))
            tensors = tmp_path / "checkpoint-00002.safetensors"
            tensors.write_bytes((checkpoint_file / tensors.name).read_bytes())
            found = Checkpoint.read(tmp_path)
            assert found is not None and found.params.keys() == {"w"}
        else:
            path = tmp_path / "ledger.sqlite"
            path.write_bytes(spoiled(ledger_file.read_bytes(), spoil))
            read_all(path)
    except (TapeError, NotResumable, LedgerError) as error:
        words = str(error)
    assert str(tmp_path) in words


def read_all(path: Path) -> None:
    with Ledger(path, readonly=True) as ledger:
        seen = [ledger.meta(), ledger.rounds(), ledger.observations(), ledger.attacks(), ledger.progress()]
        seen += [list(ledger.scores()), ledger.reasons("failed"), ledger.best_so_far()]
        seen += [
            list(ledger.score_rows()),
            ledger.last_round(),
            ledger.seconds_left(),
        ]
        assert len(seen) == 11


def test_the_fuzz_reaches_what_it_is_meant_for(doorway: Any) -> None:
    """A validator that refused everything would pass all of the above."""
    at = doorway()
    content = RecordDict({"update": ArrayRecord(GOOD), "metrics": MetricRecord({"num-examples": 2})})
    at.answer(at.honest(), at.reply(1, content))
    assert [a.client for a in at.intakes[0].accepted] == [0, 1]
    assert math.prod(TENSORS["a"].shape) == 6
