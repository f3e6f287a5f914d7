"""The ledger's file: how it is opened, checked, and written in transactions."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from fedgauge.server.store import run_files, typed_rows
from fedgauge.server.store.run_files import LedgerError as LedgerError

APPLICATION = 0x666C656B  # "flek": marks a file as a fedgauge ledger
PATIENCE = 30.0  # seconds that a connection waits for another one's lock
_LONGEST = 16 << 20  # bytes of a value or row
_MOST_BYTES = 1 << 38  # of a ledger; the check of its pages takes a bit of memory for each

VERSION = 1  # of the schema; the first release starts to count
SCHEMA = """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE rounds (
        round INTEGER PRIMARY KEY, accuracy REAL, loss REAL, seconds REAL, intercept_seconds REAL, metrics TEXT
    );
    CREATE TABLE observations (
        round INTEGER NOT NULL, client INTEGER NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
        examples INTEGER, digest TEXT, alarm INTEGER, suspicion REAL, silent INTEGER,
        PRIMARY KEY (round, client)
    ) WITHOUT ROWID;
    CREATE TABLE problems (code TEXT NOT NULL, round INTEGER, client INTEGER, words TEXT NOT NULL);
    CREATE TABLE attacks (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, planned TEXT NOT NULL, knowledge TEXT NOT NULL,
        seed INTEGER NOT NULL, remembers INTEGER NOT NULL DEFAULT 0, flat INTEGER NOT NULL DEFAULT 0, training TEXT, grading TEXT
    );
    CREATE TABLE numerics (
        id INTEGER PRIMARY KEY, device TEXT NOT NULL, name TEXT NOT NULL, precision TEXT NOT NULL,
        deterministic INTEGER NOT NULL, torch TEXT NOT NULL, driver TEXT NOT NULL
    );
    CREATE TABLE jobs (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, attack_id INTEGER NOT NULL REFERENCES attacks(id),
        round INTEGER NOT NULL, client INTEGER NOT NULL, other INTEGER, wave INTEGER NOT NULL,
        state TEXT NOT NULL DEFAULT 'queued', attempts INTEGER NOT NULL DEFAULT 0, error TEXT, finished INTEGER, ended REAL,
        memory TEXT, graded TEXT, graded_to REAL, numerics_id INTEGER REFERENCES numerics(id)
    );
    CREATE INDEX jobs_by_state ON jobs (state, round, attack_id, wave);
    CREATE INDEX jobs_by_finish ON jobs (finished, ended);
    CREATE INDEX jobs_to_come ON jobs (attack_id, client, round) WHERE state IN ('queued', 'leased');
    CREATE INDEX jobs_by_memory ON jobs (attack_id, client, round) WHERE memory IS NOT NULL;
    CREATE TABLE scores (
        job_id INTEGER NOT NULL REFERENCES jobs(id), attack TEXT NOT NULL, client INTEGER NOT NULL,
        example INTEGER NOT NULL, metric TEXT NOT NULL, round INTEGER NOT NULL, value REAL, status TEXT NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (job_id, attack, client, example, metric)
    ) WITHOUT ROWID;
    CREATE INDEX scores_by_metric ON scores (metric, attack, round)
"""


def _new() -> sqlite3.Connection:
    """A database in memory with the tables of a ledger."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(SCHEMA)
    return db


@cache
def _schema() -> frozenset[tuple[str, ...]]:
    """The objects in sqlite_master of a new ledger."""
    with closing(_new()) as db:
        return _objects(db)


def _objects(db: sqlite3.Connection) -> frozenset[tuple[str, ...]]:
    """Type, name, table and definition of the objects of a database, without the statistics that ANALYZE leaves."""
    rows = db.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE type != 'table' OR name NOT GLOB 'sqlite_stat[14]'"
    )
    return frozenset(tuple(" ".join(str(value).split()) for value in row) for row in rows)


class LedgerFile:
    """A connection to one run's ledger; several processes may have one at the same time."""

    def __init__(self, path: Path, create: bool = False, readonly: bool = False) -> None:
        """Open the file.

        Args:
            create: the file and its tables, if they are missing.
            readonly: write no row; wait for locks one second at most; any thread may use the connection, one at a time.

        Raises:
            LedgerError: the file is missing, not a ledger, damaged, locked, or of another version.
        """
        self.path, self.readonly = path, readonly
        self._described: Any = None
        if not create and not os.path.lexists(path):
            raise LedgerError(f"{path} is missing: {path.parent} is not a run folder")
        try:
            self._db = self._opened(create, readonly)
            try:
                self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
                self._db.execute("PRAGMA trusted_schema = OFF")
                if readonly:
                    self._db.execute("PRAGMA query_only = ON")
                fresh = self._check(create)
                if not readonly:
                    self._write_ahead()
                    self._db.execute("PRAGMA synchronous = NORMAL")
                    if fresh:
                        self._make()
                self._db.row_factory = self._row
            except BaseException:
                self._db.close()
                raise
        except (sqlite3.DatabaseError, UnicodeDecodeError, run_files.RefusedFile) as error:
            raise self._unreadable(error) from error

    def _opened(self, create: bool, readonly: bool) -> sqlite3.Connection:
        # next to a new file SQLite still may have its journal
        waiting = 0 if create else self._check_files()
        how = "rwc" if create else "rw"
        if readonly and not waiting and not os.access(self.path.parent, os.W_OK):
            how = "ro&immutable=1"  # the file is complete, and SQLite cannot create the files by which it locks
        uri = f"file:{quote(os.fsencode(self.path.absolute()))}?mode={how}"
        # the last connection to close the file locks it for a moment
        timeout = 1.0 if readonly else PATIENCE
        # the last connection to close a ledger tidies up, which one of mode=ro cannot
        return sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False)

    def _check_files(self) -> int:
        """Return the bytes of the write-ahead log; RefusedFile if a file of the ledger is a link or no file.

        SQLite opens its files by their paths. A journal may name any file, which SQLite deletes when it plays the journal back.
        """
        _, waiting, _ = (run_files.look(Path(f"{self.path}{end}")) for end in ("", "-wal", "-shm"))
        if os.path.lexists(journal := f"{self.path}-journal"):
            raise LedgerError(
                f"{journal} is not of fedgauge, which keeps no such file: open a copy of the run without it"
            )
        return waiting.st_size if waiting else 0

    def _check(self, create: bool) -> bool:
        """Refuse a file that is no ledger of this version; returns whether it is still empty."""
        self._db.execute("BEGIN")  # all of one moment, as another process may create the tables
        fresh: bool = self._db.execute("PRAGMA schema_version").fetchone()[0] == 0
        if not (fresh and create):
            self._check_schema()
            self._check_pages()
        self._db.execute("COMMIT")
        return fresh

    def _check_schema(self) -> None:
        application, version = (
            self._db.execute(f"PRAGMA {of}").fetchone()[0] for of in ("application_id", "user_version")
        )
        if application == APPLICATION and version != VERSION:
            raise LedgerError(
                f"{self.path} has ledger version {version}, and this fedgauge reads {VERSION}: use the fedgauge that wrote it"
            )
        # views and triggers are programs, and a view may be called like a table
        if application != APPLICATION or _schema() != _objects(self._db):
            raise LedgerError(f"{self.path} is not as fedgauge makes a ledger")

    def _check_pages(self) -> None:
        """Refuse a ledger with more pages than its files hold, or whose pages are damaged or repeat."""
        pages, size = (self._db.execute(f"PRAGMA page_{what}").fetchone()[0] for what in ("count", "size"))
        held = sum(p.stat().st_size for p in (self.path, Path(f"{self.path}-wal")) if p.exists())
        fault = f"it claims {pages} pages of {size} bytes, and holds {held} bytes"
        if pages * size <= min(held, _MOST_BYTES):
            fault = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if fault != "ok":
            raise LedgerError(f"{self.path} is damaged: {' '.join(fault.split()):.200}")

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Everything read inside is of one moment; LedgerError if the file cannot be read."""
        try:
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            raise self._unreadable(error) from error

    def _row(self, cursor: Any, row: tuple[Any, ...]) -> sqlite3.Row:
        """A row by name, with every value checked."""
        self._tuple(cursor, row)
        return sqlite3.Row(cursor, row)

    def _tuple(self, cursor: Any, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """A row of which there are many, with every value checked."""
        if cursor.description is not self._described:  # once for all rows of a query
            self._described = cursor.description
            self._columns = typed_rows.columns([column[0] for column in cursor.description])
        try:
            typed_rows.check(self._columns, row)
        except typed_rows.WrongValue as error:
            raise LedgerError(f"{self.path} is damaged: {error}") from error
        return row

    def _write_ahead(self) -> None:
        """Switch to write-ahead logging; SQLite ignores its timeout here while another connection opens the file, so retry."""
        give_up = time.monotonic() + PATIENCE
        while self._db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > give_up:
                    raise
                time.sleep(0.01)

    def _make(self) -> None:
        with self._transaction() as db:
            if db.execute("PRAGMA user_version").fetchone()[0]:  # another process was faster
                return
            for statement in SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
            db.execute(f"PRAGMA application_id = {APPLICATION}")

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()
        if isinstance(error, UnicodeDecodeError):  # SQLite's message quotes what is damaged
            raise self._unreadable(error) from error
        if not isinstance(error, sqlite3.DatabaseError):
            return
        # other subclasses are programming errors; damage shows as one of the first two, with many different messages, and rows
        # that no fedgauge has written together as the third
        if type(error) is sqlite3.DatabaseError or isinstance(error, sqlite3.OperationalError | sqlite3.IntegrityError):
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> LedgerError:
        return LedgerError(f"{self.path} cannot be read as a ledger: {error}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
