"""The ledger's file is opened, checked and brought up to date; readers change nothing."""

import sqlite3
from pathlib import Path

import pytest

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import LedgerError
from tests.server.store.ledgers import filled, plan_of, rows_of


@pytest.mark.parametrize(
    "data", [b"garbage" * 100, b"SQLite format 3\x00" + b"\xff" * 500, b"", b"x", "another's", "a folder", "nothing"]
)
def test_what_is_no_ledger_is_named_and_unchanged(path: Path, data: bytes | str) -> None:
    """A run whose ledger was lost must not look like one in which nothing happened."""
    if data == "a folder":
        path.mkdir()
    elif data == "another's":
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE mine (x)")
        db.close()
    elif isinstance(data, bytes):
        path.write_bytes(data)
    before = {p: p.is_file() and p.read_bytes() for p in path.parent.iterdir()}
    with pytest.raises(LedgerError, match=str(path)):
        Ledger(path)
    assert {p: p.is_file() and p.read_bytes() for p in path.parent.iterdir()} == before


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("version", [0, 1, 99])
def test_a_ledger_of_another_version_is_refused_and_unchanged(path: Path, version: int, readonly: bool) -> None:
    Ledger(path, create=True).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=str(version)):
        Ledger(path, readonly=readonly)
    assert path.read_bytes() == before


def test_a_reader_finds_every_row_and_learns_of_each_change(path: Path) -> None:
    with filled(path, plan_of("a", "b", wave=2), rounds=2) as ledger, Ledger(path, readonly=True) as reader:
        versions = [reader.version]
        while (lease := ledger.lease()) is not None:
            if lease.round == 2 and lease.attack.name == "b":
                ledger.fail(lease, "died")
            else:
                ledger.finish(lease, rows_of(lease))
            versions.append(reader.version)
            assert versions[-1] == reader.version != versions[-2]
        found = list(reader.score_rows())
        whole = [(r[0], r[1], r[2], r[3], r[4], r[6], r[5]) for r in ledger.scores()]
        assert sorted(found, key=str) == sorted(whole, key=str)
        assert [o["round"] for o in reader.observations(2)] == [2] * 4
        assert reader.seconds_left() is not None


def test_a_reader_cannot_write_and_does_not_wait(path: Path) -> None:
    with filled(path, plan_of("a")) as ledger:
        with Ledger(path, readonly=True) as reader, pytest.raises(sqlite3.OperationalError) as refused:
            reader.set_meta(state="mine")
        assert refused.value.sqlite_errorcode == sqlite3.SQLITE_READONLY
        ledger._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        ledger.set_meta(state="locked")
        with pytest.raises(LedgerError):
            Ledger(path, readonly=True)


def test_a_snapshot_is_of_one_moment_and_the_next_is_newer(path: Path) -> None:
    """Also if the ledger was at rest when the reader opened it."""
    Ledger(path, create=True).close()
    with Ledger(path, readonly=True) as reader:
        with reader.snapshot():
            assert reader.last_round() == 0
            with Ledger(path) as writer:
                writer.record_round(2, 0.9, 1.0, 1.0)
                writer.set_meta(state="trained")
            assert (reader.last_round(), reader.meta()) == (0, {})
        with reader.snapshot():
            assert (reader.last_round(), reader.meta()) == (2, {"state": "trained"})


def test_a_reader_of_a_run_at_rest_changes_nothing(path: Path) -> None:
    filled(path, plan_of("a")).close()
    before = path.read_bytes(), path.stat().st_mtime_ns
    with Ledger(path, readonly=True) as reader:
        assert reader.progress().queued == 4
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
