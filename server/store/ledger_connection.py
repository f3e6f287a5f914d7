"""The ledger's file: how it is opened, checked, brought to the newest schema, and written in transactions."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import quote

APPLICATION = 0x666C656B  # "flek": marks a file as a fedgauge ledger
PATIENCE = 30.0  # seconds that a connection waits for another one's lock

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE rounds (
        round INTEGER PRIMARY KEY, accuracy REAL, loss REAL, seconds REAL, intercept_seconds REAL
    );
    CREATE TABLE observations (
        round INTEGER NOT NULL, client INTEGER NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
        examples INTEGER, digest TEXT,
        PRIMARY KEY (round, client)
    ) WITHOUT ROWID;
    CREATE TABLE attacks (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, planned TEXT NOT NULL, knowledge TEXT NOT NULL,
        seed INTEGER NOT NULL
    );
    CREATE TABLE jobs (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, attack_id INTEGER NOT NULL REFERENCES attacks(id),
        round INTEGER NOT NULL, client INTEGER NOT NULL, other INTEGER, wave INTEGER NOT NULL,
        state TEXT NOT NULL DEFAULT 'queued', attempts INTEGER NOT NULL DEFAULT 0, leased_at REAL, error TEXT
    );
    CREATE INDEX jobs_by_state ON jobs (state, round, attack_id, wave);
    CREATE TABLE scores (
        job_id INTEGER NOT NULL REFERENCES jobs(id), attack TEXT NOT NULL, client INTEGER NOT NULL,
        example INTEGER NOT NULL, metric TEXT NOT NULL, round INTEGER NOT NULL, value REAL, status TEXT NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (job_id, attack, client, example, metric)
    ) WITHOUT ROWID;
    CREATE INDEX scores_by_metric ON scores (metric, attack, round);
    """,
    "ALTER TABLE jobs DROP COLUMN leased_at",
    """
    ALTER TABLE jobs ADD COLUMN finished INTEGER;
    ALTER TABLE jobs ADD COLUMN ended REAL;
    UPDATE jobs SET finished = id WHERE state IN ('done', 'failed');
    CREATE INDEX jobs_by_finish ON jobs (finished, ended)
    """,
    """
    ALTER TABLE attacks ADD COLUMN remembers INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE jobs ADD COLUMN memory TEXT;
    CREATE INDEX jobs_to_come ON jobs (attack_id, client, round) WHERE state IN ('queued', 'leased');
    CREATE INDEX jobs_by_memory ON jobs (attack_id, client, round) WHERE memory IS NOT NULL
    """,
    "ALTER TABLE jobs ADD COLUMN graded TEXT",  # in a deployment: who graded it and to which precision, or why nobody did
    "ALTER TABLE rounds ADD COLUMN metrics TEXT",  # of a user's own app: what its clients and its evaluation returned, as JSON
)


class LedgerError(Exception):
    """The ledger's file is missing, foreign, damaged or of another version; the message names it."""


def _reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write."""
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    # the last connection to close the file locks it for a moment
    opened = sqlite3.connect(uri, uri=True, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        opened.execute("PRAGMA schema_version")
    except sqlite3.OperationalError as error:
        opened.close()
        if "unable to open" not in str(error):
            raise
        # in a folder without write permission a reader cannot create the files that WAL needs
        waiting = Path(f"{path}-wal")
        if waiting.exists() and waiting.stat().st_size:
            raise LedgerError(
                f"{path} cannot be read in a read-only folder: {waiting.name} still holds rows; copy the run to a writable one"
            ) from error
        opened = sqlite3.connect(uri + "&immutable=1", uri=True, isolation_level=None, check_same_thread=False)
    return opened


class LedgerFile:
    """A connection to one run's ledger; several processes may have one at the same time."""

    def __init__(self, path: Path, create: bool = False, readonly: bool = False) -> None:
        """Open the file, and bring an older schema up to date.

        Args:
            readonly: write nothing, not even a newer schema; wait for locks one second at most; any thread may use the
                connection, one at a time.

        Raises:
            LedgerError: the file is missing, not a ledger, damaged, locked, or of a newer fedgauge (readonly: of any other
                version).
        """
        self.path = path
        if not create and not path.exists():
            raise LedgerError(f"{path} is missing: {path.parent} is not a run folder")
        try:
            if readonly:
                self._db = _reader(path)
            else:
                self._db = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            fresh = self._db.execute("PRAGMA schema_version").fetchone()[0] == 0
            if fresh and not create:
                raise LedgerError(f"{path} is not a fedgauge ledger: it is empty")
            if not fresh and self._db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
                raise LedgerError(f"{path} is not a fedgauge ledger")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > len(MIGRATIONS):
                raise LedgerError(
                    f"{path} has ledger version {version}; this fedgauge reads up to {len(MIGRATIONS)}: update fedgauge"
                )
            if readonly:
                if version < len(MIGRATIONS):
                    raise LedgerError(
                        f"{path} has ledger version {version}, of an older fedgauge; bring it up to date with: "
                        f"fedgauge report {path.parent}"
                    )
                return
            self._write_ahead()
            self._db.execute("PRAGMA synchronous = NORMAL")
            if version < len(MIGRATIONS):
                self._migrate()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._unreadable(error) from error

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

    def _migrate(self) -> None:
        with self._transaction() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]  # another process may have been faster
            for i, script in enumerate(MIGRATIONS[version:], version + 1):
                for statement in script.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {i}")
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
        # other subclasses are programming errors; damage shows as one of these two, with many different messages
        if type(error) is sqlite3.DatabaseError or isinstance(error, sqlite3.OperationalError):
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
