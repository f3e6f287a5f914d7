"""The ledger's file: opened, checked, and written in transactions."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Self
from urllib.parse import quote

from fedgauge.server.store import run_files
from fedgauge.server.store.run_files import LedgerError as LedgerError

APPLICATION = 0x666C656B  # "flek": marks a file as a fedgauge ledger
PATIENCE = 30.0  # seconds that a connection waits for another one's lock
_LONGEST = 16 << 20  # bytes of a value or row
_MOST_BYTES = 1 << 38  # of a ledger

MOST = 2**21 - 1  # rounds, clients, examples: the columns that `Scores` packs into one number

# of rows whose values are of another type, or are there already
UNKEEPABLE = (
    *(sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError),
    *(OverflowError, UnicodeEncodeError),
)
VERSION = 5  # of the schema
# SQLite checks types and bounds at each writing, and of a ledger from elsewhere when it is opened
_PLACE = f"INTEGER NOT NULL CHECK ({{}} BETWEEN 0 AND {MOST})"
_ROUND, _CLIENT = f"round {_PLACE.format('round')}", f"client {_PLACE.format('client')}"
SCHEMA = f"""
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE rounds (
        {_ROUND} PRIMARY KEY, accuracy REAL, loss REAL, seconds REAL
    ) STRICT;
    CREATE TABLE observations (
        {_ROUND}, {_CLIENT}, status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
        examples INTEGER, digest TEXT, alarm INTEGER, silent INTEGER,
        PRIMARY KEY (round, client)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE problems (
        code TEXT NOT NULL, round INTEGER CHECK (round BETWEEN 0 AND {MOST}), client INTEGER, words TEXT NOT NULL
    ) STRICT;
    CREATE TABLE attacks (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
        role TEXT NOT NULL CHECK (role IN ('attack', 'baseline', 'limit', 'estimate')), metric TEXT NOT NULL,
        planned TEXT NOT NULL, knowledge TEXT NOT NULL, seed INTEGER NOT NULL, remembers INTEGER NOT NULL DEFAULT 0,
        flat INTEGER NOT NULL DEFAULT 0, training TEXT, grading TEXT
    ) STRICT;
    CREATE TABLE jobs (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, attack_id INTEGER NOT NULL REFERENCES attacks(id),
        {_ROUND}, {_CLIENT}, other INTEGER CHECK (other BETWEEN 0 AND {MOST}), wave INTEGER NOT NULL,
        state TEXT NOT NULL DEFAULT 'queued', attempts INTEGER NOT NULL DEFAULT 0, error TEXT, finished INTEGER,
        memory TEXT, graded TEXT, graded_to REAL, computed_on TEXT
    ) STRICT;
    CREATE INDEX jobs_by_state ON jobs (state, round, attack_id, wave);
    CREATE INDEX jobs_by_finish ON jobs (finished);
    CREATE INDEX jobs_to_come ON jobs (attack_id, client, round) WHERE state IN ('queued', 'leased');
    CREATE INDEX jobs_by_memory ON jobs (attack_id, client, round) WHERE memory IS NOT NULL;
    CREATE TABLE scores (
        job_id INTEGER NOT NULL REFERENCES jobs(id), attack TEXT NOT NULL, {_CLIENT},
        example INTEGER NOT NULL CHECK (example BETWEEN -1 AND {MOST}), metric TEXT NOT NULL, {_ROUND}, value REAL,
        status TEXT NOT NULL, seconds REAL NOT NULL,
        PRIMARY KEY (job_id, attack, client, example, metric)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX scores_by_metric ON scores (metric, attack, round)
"""


@cache
def _schema() -> frozenset[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        return _objects(db)


def _objects(db: sqlite3.Connection) -> frozenset[tuple[str, ...]]:
    rows = db.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE type != 'table' OR name NOT GLOB 'sqlite_stat[14]'"
    )
    return frozenset(tuple(" ".join(str(value).split()) for value in row) for row in rows)


class LedgerFile:
    """Connection to the ledger of one run; several processes may be connected."""

    def __init__(self, path: Path, create: bool = False, readonly: bool = False) -> None:
        """Open the file.

        Args:
            create: create missing tables, while no other process opens it.
            readonly: write no row, and wait for locks at most one second.

        Raises:
            LedgerError: the file is missing, not a ledger, damaged, locked, or of another version.
        """
        self.path, self.readonly = path, readonly
        if sqlite3.sqlite_version_info < (3, 37):
            raise LedgerError(f"{path} needs SQLite 3.37 or newer; this Python has {sqlite3.sqlite_version}")
        with self._damage(), ExitStack() as opening:
            if create and not (path.exists() and path.stat().st_size):
                with closing(sqlite3.connect(path)) as db:
                    db.execute("PRAGMA journal_mode = WAL")
                    marks = f"PRAGMA user_version = {VERSION}; PRAGMA application_id = {APPLICATION}"
                    db.executescript(f"BEGIN; {SCHEMA}; {marks}; COMMIT")
            self._db = opening.enter_context(closing(self._opened()))
            self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
            self._db.execute("PRAGMA trusted_schema = OFF")
            with self.snapshot():
                self._check()
            self._db.execute("PRAGMA query_only = ON" if readonly else "PRAGMA synchronous = NORMAL")
            self._db.row_factory = sqlite3.Row
            opening.pop_all()

    def _opened(self) -> sqlite3.Connection:
        # SQLite follows links, and a journal may name any file, which SQLite deletes
        held, waiting, _ = (run_files.look(Path(f"{self.path}{end}")) for end in ("", "-wal", "-shm"))
        if held and held.st_size > _MOST_BYTES:
            raise LedgerError(f"{self.path} has {held.st_size} bytes; the limit is {_MOST_BYTES}")
        if os.path.lexists(journal := f"{self.path}-journal"):
            raise LedgerError(f"{journal} is not from fedgauge: open a copy of the run without it")
        how = "rw"  # also to read, as a connection of mode=ro cannot clean up
        if self.readonly and not (waiting and waiting.st_size) and not os.access(self.path.parent, os.W_OK):
            how = "ro&immutable=1"  # the folder is read-only
        uri = f"file:{quote(os.fsencode(self.path.absolute()))}?mode={how}"
        timeout = 1.0 if self.readonly else PATIENCE
        return sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False)

    def _check(self) -> None:
        """Refuse another version, tables that fedgauge does not make (views and triggers are programs), and damaged pages."""
        application, version = (
            self._db.execute(f"PRAGMA {of}").fetchone()[0] for of in ("application_id", "user_version")
        )
        if application == APPLICATION and version != VERSION:
            fault = f"has ledger version {version}, and this fedgauge reads {VERSION}: use the fedgauge that wrote it"
        elif application != APPLICATION or _schema() != _objects(self._db):
            fault = "is not as fedgauge makes a ledger"
        elif (found := self._db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            fault = f"is damaged: {' '.join(found.split()):.200}"
        else:
            return
        raise LedgerError(f"{self.path} {fault}")

    @property
    def version(self) -> int:
        """A number that changes with each change by another connection."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read everything inside at one moment.

        Raises:
            LedgerError: the file cannot be read.
        """
        with self._damage(), self._db:
            self._db.execute("BEGIN")
            yield

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()
        # other subclasses are programming errors
        damage = UnicodeDecodeError, sqlite3.OperationalError, sqlite3.IntegrityError
        if error is not None and (isinstance(error, damage) or type(error) is sqlite3.DatabaseError):
            with self._damage():
                raise error

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (UnicodeDecodeError, sqlite3.DatabaseError) as error:
            raise LedgerError(f"{self.path} cannot be used as a ledger: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._db:  # commits, or takes back after an exception
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db
