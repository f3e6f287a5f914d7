"""The ledger's file: how it is opened, checked, and written in transactions."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from sys import getsizeof
from typing import Any, ParamSpec, Self, TypeVar
from urllib.parse import quote

from fedgauge.attacks.plan import MOST_ATTACKS
from fedgauge.server.store import run_files, typed_rows
from fedgauge.server.store.run_files import LedgerError as LedgerError

APPLICATION = 0x666C656B  # "flek": marks a file as a fedgauge ledger
PATIENCE = 30.0  # seconds that a connection waits for another one's lock
_MILLION = 1_000_000
_SHORT, _LONGEST = 64 << 10, 16 << 20  # bytes of a value or row, before and after the file was checked
_MANY = 1000  # objects of a schema
_MOST_PAGES = 1 << 26  # for each of which the check takes a bit of memory: 256 GiB, as SQLite makes them
# bytes of text that a query hands out for each byte of the file, and besides: rows may share the pages of one text
_TEXT, _MORE_TEXT = 8, 16 << 20
# of SQLite's machine for each byte of the file; a long run's dearest queries take a tenth
_STEPS_OF_READERS, _STEPS_OF_WRITERS = 64, 1000
# what ANALYZE leaves
_STATISTICS = frozenset(
    ("table", name, name, f"CREATE TABLE {name}({columns})")
    for name, columns in (("sqlite_stat1", "tbl,idx,stat"), ("sqlite_stat4", "tbl,idx,neq,nlt,ndlt,sample"))
)
P = ParamSpec("P")
T = TypeVar("T")

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


class LedgerChanged(LedgerError):
    """Somebody wrote to a ledger at rest while it was read, so what was read is not of one moment: open it and read again."""


def reads_again(read: Callable[P, T]) -> Callable[P, T]:
    """Call what opens a ledger and reads it again, twice at most, if it was changed meanwhile."""

    @wraps(read)
    def patient(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(2):
            try:
                return read(*args, **kwargs)
            except LedgerChanged:
                pass  # a writer at work is seen by the next opening, which then waits for its locks
        return read(*args, **kwargs)

    return patient


class _Cursor(sqlite3.Cursor):
    """One query, with what it has handed out."""

    text, most = 0, 0  # bytes
    times = _TEXT  # of the file's bytes


class _Connection(sqlite3.Connection):
    """Connects to a file that may come from anybody: its schema is not trusted, and no query takes more steps than rows explain."""

    steps = 0  # millions, since the last query began
    most = 0

    def limit(self, path: Path, steps_a_byte: int) -> None:
        """Set the limits for a file by its bytes, with those that wait: one of few pages may look like one of 10^50 rows."""
        self.path, self.steps_a_byte = path, steps_a_byte
        self.set_progress_handler(self._step, _MILLION)
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _SHORT)  # until it is known that rows share no text
        self.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            self.execute(f"PRAGMA {pragma}")

    def _step(self) -> bool:
        self.steps += 1
        if self.steps > self.most:  # the file may have grown since it was asked last
            self.most = 4 + self.size() * self.steps_a_byte // _MILLION
        return self.steps > self.most

    def size(self) -> int:
        """Bytes of the file with those that wait."""
        return sum(os.stat(p).st_size for p in (self.path, f"{self.path}-wal") if os.path.exists(p))

    def execute(self, *query: Any) -> _Cursor:
        self.steps = 0
        cursor = self.cursor(_Cursor)
        cursor.execute(*query)
        return cursor

    def executemany(self, *query: Any) -> sqlite3.Cursor:
        self.steps = 0
        return super().executemany(*query)


def _files(path: Path, write: bool) -> int:
    """The bytes that wait in the write-ahead log; RefusedFile if a file of the ledger is a link, no file of ours, or shared.

    SQLite opens its files by their paths, and changes them in place. Played back, a journal may name any file for deletion.
    """
    waiting = run_files.look(Path(f"{path}-wal"), alone=True)
    run_files.look(path, alone=write or bool(waiting and waiting.st_size))
    run_files.look(Path(f"{path}-shm"), alone=True)
    if os.path.lexists(journal := f"{path}-journal"):
        raise LedgerError(
            f"{journal} is not of fedgauge, which keeps no such file, and may belong to a change that somebody has not ended: "
            "copy the run's folder without it, and open the copy"
        )
    return waiting.st_size if waiting else 0


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes with the file; None where there is none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


@cache
def _schema() -> frozenset[tuple[str | None, ...]]:
    """The objects in sqlite_master of a new ledger."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        db.executescript(SCHEMA)
        return _objects(db, _MANY)
    finally:
        db.close()


def columns_of(table: str) -> list[tuple[str, str]]:
    """Name and type of each column of a table, in order."""
    db = sqlite3.connect(":memory:")
    try:
        db.executescript(SCHEMA)
        return db.execute("SELECT name, type FROM pragma_table_info(?) ORDER BY cid", (table,)).fetchall()
    finally:
        db.close()


def _objects(db: sqlite3.Connection, most: int) -> frozenset[tuple[str | None, ...]]:
    """Type, name, table and definition of at most so many objects of a database; SQLite keeps a definition's own spaces."""
    rows = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchmany(most)
    return frozenset((*map(str, row[:3]), None if row[3] is None else " ".join(str(row[3]).split())) for row in rows)


class LedgerFile:
    """A connection to one run's ledger; several processes may have one at the same time."""

    def __init__(self, path: Path, create: bool = False, readonly: bool = False) -> None:
        """Open the file.

        Args:
            create: the file and its tables, if they are missing.
            readonly: write nothing; wait for locks one second at most; any thread may use the
                connection, one at a time.

        Raises:
            LedgerError: the file is missing, not a ledger, damaged, locked, or of another version.
            LedgerChanged: somebody wrote to a ledger at rest while it was read (`snapshot` and the end of `with` raise it, too).
        """
        self.path = path
        self._open(create, readonly)

    def _open(self, create: bool, readonly: bool) -> None:
        path = self.path
        self._unchanging: tuple[int, int, int] | None = None  # of a file at rest, which is read without locks
        self._described: Any = None
        if not create and not os.path.lexists(path):
            raise LedgerError(f"{path} is missing: {path.parent} is not a run folder")
        try:
            self._db = self._opened(create, readonly)
            with self._closed_on_error():
                fresh = self._check(create)
                if not readonly:
                    self._write_ahead()
                    self._db.execute("PRAGMA synchronous = NORMAL")
                    if fresh:
                        self._make()
                self._db.row_factory = self._row
                self._check_names()
        except (sqlite3.DatabaseError, UnicodeDecodeError, run_files.RefusedFile) as error:
            self._refuse_changed(error)
            raise self._unreadable(error) from error

    def _opened(self, create: bool, readonly: bool) -> _Connection:
        # beside a new file SQLite still may have its journal
        waiting = 0 if create else _files(self.path, write=not readonly)
        how = "rwc" if create else "rw"
        if readonly and not waiting:
            # nobody's rows wait, so the file is whole, and a reader needs no log of its own beside it
            self._unchanging = _stamp(self.path)
            how = "ro&immutable=1"
        uri = f"file:{quote(os.fsencode(self.path.absolute()))}?mode={how}"
        # the last connection to close the file locks it for a moment
        timeout = 1.0 if readonly else PATIENCE
        db = sqlite3.connect(
            uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=not readonly, factory=_Connection
        )
        try:
            db.limit(self.path, _STEPS_OF_READERS if readonly else _STEPS_OF_WRITERS)
            # it may not write, but whoever closes a ledger last tidies up, which a connection of mode=ro cannot
            if readonly:
                db.execute("PRAGMA query_only = ON")
                db.execute("SELECT 1 FROM sqlite_master LIMIT 1")
        except sqlite3.OperationalError as error:
            db.close()
            if readonly and "unable to open" in str(error):  # WAL needs files that cannot be made there
                raise LedgerError(
                    f"{self.path} cannot be read in a read-only folder: {self.path.name}-wal still holds rows; copy the run to "
                    "a writable one"
                ) from error
            raise
        return db

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._db.close()
            raise

    def _check(self, create: bool) -> bool:
        """Refuse a file that is no ledger of this version; returns whether it is still empty."""
        self._db.execute("BEGIN")  # all of one moment, as another process may create the tables
        fresh = self._db.execute("PRAGMA schema_version").fetchone()[0] == 0
        if fresh and not create:
            raise LedgerError(f"{self.path} is not a fedgauge ledger: it is empty")
        if not fresh and self._db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
            raise LedgerError(f"{self.path} is not a fedgauge ledger")
        version: int = self._db.execute("PRAGMA user_version").fetchone()[0]
        if not fresh and version != VERSION:
            raise LedgerError(
                f"{self.path} has ledger version {version}, and this fedgauge reads {VERSION}: open it with the version of "
                "fedgauge that wrote it, or run its scenario again"
            )
        if not fresh:
            expected = _schema()
            # views and triggers are programs, and a view may be called like a table
            found = _objects(self._db, len(expected) + len(_STATISTICS) + 1)
            if strange := expected ^ (found - _STATISTICS):
                kind, name = min((str(kind), str(name)) for kind, name, *_ in strange)
                raise LedgerError(f"{self.path} is not as fedgauge makes a ledger: see its {kind} {name:.60}")
            self._check_pages()
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
        self._db.execute("COMMIT")
        return fresh

    def _check_pages(self) -> None:
        """Refuse rows that share a text and pages that repeat: a query then reads more bytes than the file's size explains.

        Before that, refuse more pages than the file and its log have bytes for, or than any ledger has: a hole takes none.
        """
        pages, size = (self._db.execute(f"PRAGMA page_{what}").fetchone()[0] for what in ("count", "size"))
        if pages * size > (held := self._db.size()) or pages > _MOST_PAGES:
            raise LedgerError(
                f"{self.path} is damaged: it claims {pages} pages of {size} bytes, and holds {held} bytes"
            )
        if (fault := self._db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise LedgerError(f"{self.path} is damaged: {' '.join(fault.split()):.200}")

    def _check_names(self) -> None:
        """Read what queries compare and sort with every row of others: each is checked, and so is short."""
        for columns, table in (("name", "attacks"), ("*", "numerics")):
            if any(name == table for _, name, *_ in _schema()):
                # an index may say something else
                count = sum(1 for _ in self._db.execute(f"SELECT {columns} FROM {table} NOT INDEXED"))
                if count > MOST_ATTACKS and table == "attacks":  # each is compared with each
                    raise LedgerError(f"{self.path} is damaged: a run has at most {MOST_ATTACKS} attacks, got {count}")

    @property
    def stale(self) -> bool:
        """Whether somebody writes to a file that was at rest when it was opened for reading: open it again."""
        if self._unchanging is None:
            return False
        waiting = run_files.look(Path(f"{self.path}-wal"))
        return bool(waiting and waiting.st_size) or _stamp(self.path) != self._unchanging

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Everything read inside is of one moment.

        Raises:
            LedgerError: the file cannot be read.
            LedgerChanged: at the end; it was at rest, and somebody has written to it meanwhile.
        """
        if self.stale:
            self.close()
            self._open(create=False, readonly=True)
        try:
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("COMMIT")
        except Exception as error:
            self._refuse_changed(error)
            if isinstance(error, sqlite3.DatabaseError):
                raise self._unreadable(error) from error
            raise
        self._refuse_changed(None)

    def _refuse_changed(self, error: Exception | None) -> None:
        """Raise LedgerChanged if a file that is read without locks is another one now; rows that only wait leave it as it is."""
        now = _stamp(self.path)
        # a file that was deleted stays whole for whoever has it open
        if self._unchanging and now and now != self._unchanging and not isinstance(error, LedgerChanged):
            raise LedgerChanged(f"{self.path} was written to while it was read: ask again") from error

    def _row(self, cursor: Any, row: tuple[Any, ...]) -> sqlite3.Row:
        """A row by name, with every value checked."""
        self._tuple(cursor, row)
        return sqlite3.Row(cursor, row)

    def _tuple(self, cursor: Any, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """A row of which there are many, with every value checked."""
        if cursor.description is not self._described:  # once for all rows of a query
            self._described = cursor.description
            names = [column[0] for column in cursor.description]
            self._columns = typed_rows.columns(names)
            self._long = [at for at, name in enumerate(names) if name in typed_rows.LONG]
        try:
            typed_rows.check(self._columns, row)
        except typed_rows.WrongValue as error:
            raise LedgerError(f"{self.path} is damaged: {error}") from error
        if self._long:
            cursor.text += sum(getsizeof(row[at]) for at in self._long)
            if cursor.text > cursor.most:
                cursor.most = _MORE_TEXT + cursor.times * self._db.size()
            if cursor.text > cursor.most:
                raise LedgerError(
                    f"{self.path} is damaged: its rows have more text than its {self._db.size()} bytes can hold"
                )
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
        if error is None or isinstance(error, Exception):
            self._refuse_changed(error)
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
