"""The ledger: one SQLite file a run, with rounds, observations, jobs and scores; every write is one transaction."""

import hashlib
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from fedgauge.attacks.grading.audit import OBJECTIVE, WHOLE_BATCH, ScoreRecord
from fedgauge.attacks.plan import BASELINES, LIMITS, AttackPlan, PlannedAttack

APPLICATION = 0x666C656B  # "flek": marks a file as a fedgauge ledger
DEPLOYMENT = "deployment"  # the run's mode, where it is no simulation
EMPTY = "empty"  # in the meta, why a run that has all its rounds has failed: no client gave an update in any
UNGRADED = "not_graded"  # status of a row for what a deployment's clients were asked to grade, and did not
_WORDS = 300  # of a client, at most
PATIENCE = 30.0  # seconds that a connection waits for others to be done

_MIGRATIONS: tuple[str, ...] = (
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
    "ALTER TABLE jobs ADD COLUMN graded TEXT",  # in a deployment: who scored it and how exactly, or why nobody did
)
# a wave of an attack with memory waits until the earlier rounds of all its clients have ended
_READY = (
    "NOT (SELECT remembers FROM attacks WHERE id = j.attack_id) OR NOT EXISTS (SELECT 1 FROM jobs own JOIN jobs earlier"
    " ON earlier.attack_id = own.attack_id AND earlier.client = own.client AND earlier.round < own.round"
    " WHERE own.state = 'queued' AND own.round = j.round AND own.attack_id = j.attack_id AND own.wave = j.wave"
    " AND earlier.state IN ('queued', 'leased'))"
)
# finished counts the jobs that ended, in their order, so that a reader can ask for what is new; ended: seconds since 1970
_END = "finished = (SELECT coalesce(max(finished), 0) + 1 FROM jobs), ended = (julianday('now') - 2440587.5) * 86400"

ScoreRow = tuple[int, int, str, int, str, str, float | None]  # round, client, attack, example, metric, status, value
ObservationStatus = Literal["accepted", "rejected", "missing"]


def _sent(digest: str) -> str:
    """The part of an observation's digest that is of the weights that were sent."""
    return digest.rpartition(":")[0]


def sanitised(words: object) -> str:
    """A client's words, for ledger, terminal and page: one line of some length, without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(words)[: 2 * _WORDS])[:_WORDS].strip()


class LedgerError(Exception):
    """The ledger's file is missing, foreign, damaged or of another version; the message names it."""


@dataclass(frozen=True)
class Participation:
    """What became of one client in one round."""

    client: int
    status: ObservationStatus
    reason: str = ""
    examples: int | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Lease:
    """A wave of jobs taken from the queue: one attack on some clients of one round.

    memories: of an attack with memory, by client: the round in which it was left, and its digest; none of a client never met.
    """

    jobs: tuple[int, ...]
    attack: PlannedAttack
    seed: int
    round: int
    clients: tuple[int, ...]
    digests: tuple[str, ...]
    others: Mapping[int, int]
    attempt: int
    memories: Mapping[int, tuple[int, str]] = field(default_factory=dict)

    def of(self, clients: Collection[int]) -> "Lease":
        """The part of the wave that is of some clients."""
        kept = [i for i, client in enumerate(self.clients) if client in clients]
        return replace(
            self,
            jobs=tuple(self.jobs[i] for i in kept),
            clients=tuple(self.clients[i] for i in kept),
            digests=tuple(self.digests[i] for i in kept),
        )


@dataclass(frozen=True)
class Ungraded:
    """A job that is done and whose reconstruction nobody has scored yet.

    Args:
        other: the client against whose truth it is graded too, as a baseline.
        open: whether attacks of the same round are still to come.
    """

    id: int
    attack: str
    round: int
    client: int
    other: int | None
    status: str
    seconds: float
    open: int


@dataclass(frozen=True)
class Progress:
    """Counts of jobs by state."""

    queued: int = 0
    leased: int = 0
    done: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        return self.queued + self.leased + self.done + self.failed


def _reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write."""
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    # whoever is the last to close the file locks it for a moment
    opened = sqlite3.connect(uri, uri=True, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        opened.execute("PRAGMA schema_version")
    except sqlite3.OperationalError as error:
        opened.close()
        if "unable to open" not in str(error):
            raise
        # in a folder that we may not write a reader cannot make WAL's own files
        waiting = Path(f"{path}-wal")
        if waiting.exists() and waiting.stat().st_size:
            raise LedgerError(
                f"{path} has rows beside it ({waiting.name}) that need a folder one may write in"
            ) from error
        opened = sqlite3.connect(uri + "&immutable=1", uri=True, isolation_level=None, check_same_thread=False)
    return opened


class Ledger:
    """A connection to one run's ledger; several processes may hold one at the same time."""

    def __init__(self, path: Path, create: bool = False, readonly: bool = False) -> None:
        """Open, and bring an older schema up to date.

        Args:
            readonly: write nothing, not even a newer schema, wait a second at most, and serve any thread, one at a time.

        Raises:
            LedgerError: the file is missing, not a ledger, damaged, locked, or written by a newer fedgauge (readonly: by
                another one).
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
            if version > len(_MIGRATIONS):
                raise LedgerError(
                    f"{path} has ledger version {version}; this fedgauge reads up to {len(_MIGRATIONS)}: update fedgauge"
                )
            if readonly:
                if version < len(_MIGRATIONS):
                    raise LedgerError(
                        f"{path} has ledger version {version}, of an older fedgauge; bring it up to date with: "
                        f"fedgauge report {path.parent}"
                    )
                return
            self._write_ahead()
            self._db.execute("PRAGMA synchronous = NORMAL")
            if version < len(_MIGRATIONS):
                self._migrate()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._unreadable(error) from error

    def _write_ahead(self) -> None:
        """SQLite refuses the change of mode at once, without its timeout, while another connection opens the file."""
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
            for i, script in enumerate(_MIGRATIONS[version:], version + 1):
                for statement in script.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {i}")
            db.execute(f"PRAGMA application_id = {APPLICATION}")

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()
        if isinstance(error, UnicodeDecodeError):  # SQLite's own words quote what is damaged
            raise self._unreadable(error) from error
        if not isinstance(error, sqlite3.DatabaseError):
            return
        # other subclasses are mistakes of ours; damage speaks through these two, in many words
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

    # ------------------------------------------------------------------------------------------------ what happened

    def set_meta(self, **values: str) -> None:
        """Facts of the whole run: its state, its replay check."""
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def meta(self) -> dict[str, str]:
        """All facts of the run."""
        return {row["key"]: row["value"] for row in self._db.execute("SELECT key, value FROM meta")}

    @property
    def deployed(self) -> bool:
        """Whether the run is a deployment's: what the clients trained on is not here."""
        return self.meta().get("mode") == DEPLOYMENT

    def record_round(self, round: int, accuracy: float, loss: float, seconds: float, intercept_seconds: float) -> None:
        """Test accuracy and loss after a round (0: before training), and what the round and its interception took."""
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?)",
                (round, accuracy, loss, seconds, intercept_seconds),
            )

    def record_intake(self, round: int, seen: Sequence[Participation], plan: AttackPlan | None = None) -> None:
        """What became of each client in a round, and the jobs that the plan makes of it, in one transaction."""
        with self._transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO observations VALUES (?, ?, ?, ?, ?, ?)",
                [(round, s.client, s.status, sanitised(s.reason), s.examples, s.digest) for s in seen],
            )
            if plan is not None:
                self._enqueue(
                    db, plan, round, {s.client: s.digest for s in seen if s.status == "accepted" and s.digest}
                )

    def rewind(self, round: int) -> None:
        """Forget the rounds from one on: they are trained again."""
        with self._transaction() as db:
            db.execute("DELETE FROM scores WHERE job_id IN (SELECT id FROM jobs WHERE round >= ?)", (round,))
            for table in ("jobs", "observations", "rounds"):
                db.execute(f"DELETE FROM {table} WHERE round >= ?", (round,))

    # --------------------------------------------------------------------------------------------------------- jobs

    def add_attacks(self, plan: AttackPlan, cards: Mapping[str, str]) -> None:
        """Make the plan's attacks known, each with its knowledge card; LedgerError when a name means something else."""
        with self._transaction() as db:
            for planned in plan.attacks:
                known = db.execute("SELECT planned, seed FROM attacks WHERE name = ?", (planned.name,)).fetchone()
                spec = planned.to_json()
                if known is None:
                    values = (planned.name, spec, cards[planned.name], plan.seed, planned.is_stateful)
                    insert = "INSERT INTO attacks (name, planned, knowledge, seed, remembers) VALUES (?, ?, ?, ?, ?)"
                    db.execute(insert, values)
                elif (known["planned"], known["seed"]) != (spec, plan.seed):
                    raise LedgerError(
                        f"{self.path} already has an attack called {planned.name!r} with other settings; give it a new name"
                    )

    def enqueue(self, plan: AttackPlan) -> None:
        """Jobs for every observation on the tape that the plan attacks; ones that exist are kept."""
        with self._transaction() as db:
            taped = "SELECT round, client, digest FROM observations WHERE status = 'accepted' AND digest IS NOT NULL"
            rounds: dict[int, dict[int, str]] = {}
            for row in db.execute(taped).fetchall():
                rounds.setdefault(row["round"], {})[row["client"]] = row["digest"]
            for round, digests in sorted(rounds.items()):
                self._enqueue(db, plan, round, digests)

    def _enqueue(self, db: sqlite3.Connection, plan: AttackPlan, round: int, digests: Mapping[int, str]) -> None:
        targets = plan.targets(round, digests)
        ids = {row["name"]: row["id"] for row in db.execute("SELECT name, id FROM attacks")}
        for planned in plan.attacks:
            for i, client in enumerate(targets):
                other = targets[(i + 1) % len(targets)] if len(targets) > 1 else None
                identity = (round, client, digests[client], planned.to_json(), plan.seed)
                key = hashlib.sha256(repr(identity).encode()).hexdigest()
                # the wave is fixed here: how fast workers are must not change which problems advance together
                db.execute(
                    "INSERT INTO jobs (key, attack_id, round, client, other, wave) SELECT ?1, ?2, ?3, ?4, ?5, ?6"
                    " WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE key BETWEEN ?1 AND ?1 || ':g')",  # g: after all digests
                    (key, ids[planned.name], round, client, other, i // plan.wave),
                )

    def release(self) -> None:
        """Give leased jobs back to the queue: their worker's pool is gone."""
        with self._transaction() as db:
            db.execute("UPDATE jobs SET state = 'queued', attempts = attempts - 1 WHERE state = 'leased'")

    def lease(self) -> Lease | None:
        """Take the next wave: earliest round first, attacks in the plan's order; None when nothing is queued that may begin.

        Of an attack with memory the whole wave waits for the earlier rounds of its clients: it is packed as it was queued.
        Those of a wave whom a malicious server sent other weights come after it: a wave shares its weights.
        """
        with self._transaction() as db:
            first = db.execute(
                f"SELECT round, attack_id, wave FROM jobs j WHERE state = 'queued' AND ({_READY})"
                " ORDER BY round, attack_id, wave LIMIT 1"
            ).fetchone()
            if first is None:
                return None
            jobs = db.execute(
                "SELECT j.id, j.key, j.client, j.other, j.attempts, o.digest FROM jobs j"
                " JOIN observations o USING (round, client) WHERE j.state = 'queued'"
                " AND j.round = ? AND j.attack_id = ? AND j.wave = ? ORDER BY j.client",
                tuple(first),
            ).fetchall()
            jobs = [j for j in jobs if _sent(j["digest"]) == _sent(jobs[0]["digest"])]
            db.executemany(
                "UPDATE jobs SET state = 'leased', attempts = attempts + 1 WHERE id = ?", [(j["id"],) for j in jobs]
            )
            query = "SELECT planned, seed, remembers FROM attacks WHERE id = ?"
            attack = db.execute(query, (first["attack_id"],)).fetchone()
            memories = self._remember(db, jobs, first) if attack["remembers"] else {}
        return Lease(
            jobs=tuple(j["id"] for j in jobs),
            attack=PlannedAttack.from_json(attack["planned"]),
            seed=attack["seed"],
            round=first["round"],
            clients=tuple(j["client"] for j in jobs),
            digests=tuple(j["digest"] for j in jobs),
            others={j["client"]: j["other"] for j in jobs if j["other"] is not None},
            attempt=max(j["attempts"] for j in jobs) + 1,
            memories=memories,
        )

    @staticmethod
    def _remember(db: sqlite3.Connection, jobs: Sequence[sqlite3.Row], wave: sqlite3.Row) -> dict[int, tuple[int, str]]:
        """What is remembered of a wave's clients; its digest becomes a part of their jobs' keys."""
        memories = {}
        for job in jobs:
            last = db.execute(
                "SELECT round, memory FROM jobs WHERE attack_id = ? AND client = ? AND round < ? AND memory IS NOT NULL"
                " ORDER BY round DESC, id DESC LIMIT 1",
                (wave["attack_id"], job["client"], wave["round"]),
            ).fetchone()
            if last is not None:
                memories[job["client"]] = (last["round"], last["memory"])
            key = job["key"].partition(":")[0] + ":" + (last["memory"] if last is not None else "")
            db.execute("UPDATE jobs SET key = ? WHERE id = ?", (key, job["id"]))
        return memories

    def finish(
        self,
        lease: Lease,
        rows: Mapping[int, Iterable[ScoreRecord]],
        reasons: Mapping[int, str] | None = None,
        memories: Mapping[int, str] | None = None,
    ) -> None:
        """Write a wave's scores and mark its jobs done, in one transaction.

        Args:
            rows: by the attacked client.
            reasons: by client, why an attack's status is what it is, where the attack says so.
            memories: by client, the digest of what an attack with memory keeps of it, which is on the disk by now. A job that
                fails leaves none: what was remembered before it is handed on.
        """
        with self._transaction() as db:
            for job, client in zip(lease.jobs, lease.clients, strict=True):
                self._write_scores(db, job, rows[client])
                values = ((reasons or {}).get(client), (memories or {}).get(client), job)
                db.execute(f"UPDATE jobs SET state = 'done', error = ?, memory = ?, {_END} WHERE id = ?", values)

    def retry(self, lease: Lease, error: str) -> None:
        """Put a wave back into the queue, as it was."""
        with self._transaction() as db:
            for job in lease.jobs:
                db.execute("UPDATE jobs SET state = 'queued', error = ? WHERE id = ?", (error, job))

    def split(self, lease: Lease, error: str) -> None:
        """Put a wave's jobs back into the queue, each as a wave of its own."""
        with self._transaction() as db:
            for job in lease.jobs:  # below 0 no plan numbers its waves
                db.execute("UPDATE jobs SET state = 'queued', error = ?, wave = -id WHERE id = ?", (error, job))

    def fail(self, lease: Lease, error: str) -> None:
        """Mark a wave's jobs failed, each with a row that says so."""
        with self._transaction() as db:
            for job, client in zip(lease.jobs, lease.clients, strict=True):
                db.execute(f"UPDATE jobs SET state = 'failed', error = ?, {_END} WHERE id = ?", (error, job))
                row = ScoreRecord(lease.round, client, lease.attack.name, WHOLE_BATCH, "psnr", None, "failed", 0.0)
                self._write_scores(db, job, [row])

    def ungraded(self) -> list[Ungraded]:
        """Jobs that are done without scores, as a deployment's are, in their order."""
        rows = self._db.execute(
            "SELECT j.id, a.name attack, j.round, j.client, j.other, s.status, s.seconds, EXISTS (SELECT 1 FROM jobs w"
            " WHERE w.round = j.round AND w.state IN ('queued', 'leased')) open FROM jobs j JOIN attacks a ON a.id = j.attack_id"
            " JOIN scores s ON s.job_id = j.id AND s.metric = ? WHERE j.state = 'done' AND j.graded IS NULL"
            " ORDER BY j.round, j.client, a.id",
            (OBJECTIVE,),
        )
        return [Ungraded(**dict(row)) for row in rows]

    def grade(self, job: int, rows: Sequence[ScoreRecord], words: str) -> None:
        """Scores of a job that was done before, and who gave them, or why nobody did."""
        with self._transaction() as db:
            self._write_scores(db, job, rows)
            newer = (
                "(SELECT max(finished) + 1 FROM jobs)" if rows else "finished"
            )  # readers ask for what has ended since
            db.execute(f"UPDATE jobs SET graded = ?, finished = {newer} WHERE id = ?", (words, job))

    def graded(self) -> list[sqlite3.Row]:
        """Who scored the jobs that are done, or why nobody did: attack, words (NULL: not yet), and of how many jobs."""
        return self._db.execute(
            "SELECT a.name attack, j.graded words, count(*) jobs FROM jobs j JOIN attacks a ON a.id = j.attack_id"
            " WHERE j.state = 'done' GROUP BY a.id, j.graded ORDER BY a.id, count(*) DESC, j.graded"
        ).fetchall()

    def set_cards(self, cards: Mapping[str, str]) -> None:
        """Other words on the knowledge cards of some attacks."""
        with self._transaction() as db:
            db.executemany("UPDATE attacks SET knowledge = ? WHERE name = ?", [(c, name) for name, c in cards.items()])

    @staticmethod
    def _write_scores(db: sqlite3.Connection, job: int, rows: Iterable[ScoreRecord]) -> None:
        db.executemany(
            "INSERT INTO scores VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(job, r.attack, r.client, r.example, r.metric, r.round, r.value, r.status, r.seconds) for r in rows],
        )

    # ------------------------------------------------------------------------------------------------------ reading

    def progress(self) -> Progress:
        """How the jobs stand."""
        counts = {r["state"]: r["n"] for r in self._db.execute("SELECT state, count(*) n FROM jobs GROUP BY state")}
        if unknown := counts.keys() - {f.name for f in fields(Progress)}:
            raise LedgerError(f"{self.path} is damaged: it has jobs in the state {unknown.pop()!r}")
        return Progress(**counts)

    def deletable(self) -> dict[int, list[int]]:
        """By round, the clients whose updates are on the tape and of whom no attack is still to come."""
        rows = self._db.execute(
            "SELECT round, client FROM observations o WHERE digest IS NOT NULL AND NOT EXISTS (SELECT 1 FROM jobs j"
            " WHERE j.round = o.round AND j.state IN ('queued', 'leased')) ORDER BY round, client"
        )
        found: dict[int, list[int]] = {}
        for row in rows:
            found.setdefault(row["round"], []).append(row["client"])
        return found

    def mark_deleted(self, round: int) -> None:
        """The updates of a round are deleted from the tape."""
        with self._transaction() as db:
            db.execute("UPDATE observations SET digest = NULL WHERE round = ?", (round,))

    def errors(self) -> list[str]:
        """The distinct errors of failed jobs."""
        return [r[0] for r in self._db.execute("SELECT DISTINCT error FROM jobs WHERE state = 'failed' ORDER BY 1")]

    def reasons(self, state: Literal["done", "failed"] = "done") -> list[sqlite3.Row]:
        """What was said of jobs that are done (or failed), the commonest first: attack, reason, and of how many jobs."""
        return self._db.execute(
            "SELECT a.name attack, j.error reason, count(*) jobs FROM jobs j JOIN attacks a ON a.id = j.attack_id"
            " WHERE j.state = ? AND j.error IS NOT NULL GROUP BY a.id, j.error ORDER BY count(*) DESC, a.id, j.error",
            (state,),
        ).fetchall()

    def rounds(self) -> list[sqlite3.Row]:
        """Every round recorded: round, accuracy, loss, seconds, intercept_seconds."""
        return self._db.execute("SELECT * FROM rounds ORDER BY round").fetchall()

    def observations(self) -> list[sqlite3.Row]:
        """Every client seen, rejected or missed: round, client, status, reason, examples, digest."""
        return self._db.execute("SELECT * FROM observations ORDER BY round, client").fetchall()

    def attacks(self) -> list[sqlite3.Row]:
        """The attacks: name, planned, knowledge, seed."""
        return self._db.execute("SELECT name, planned, knowledge, seed FROM attacks ORDER BY id").fetchall()

    def so_far(self, metric: str, cap: float) -> tuple[float | None, float | None]:
        """Best and mean value of all attacks but baselines and limits, each capped in the mean; None before the first."""
        others = (*BASELINES, *LIMITS)
        query = (
            "SELECT max(s.value), avg(min(s.value, ?)) FROM scores s JOIN jobs j ON j.id = s.job_id"
            " JOIN attacks a ON a.id = j.attack_id WHERE s.metric = ? AND s.attack = a.name"
            f" AND s.value IS NOT NULL AND a.name NOT IN ({', '.join('?' * len(others))})"
        )
        best, mean = self._db.execute(query, (cap, metric, *others)).fetchone()
        return best, mean

    def scores(self, metric: str | None = None) -> Iterator[sqlite3.Row]:
        """Score rows in a stable order: round, client, attack, example, metric, value, status, seconds, knowledge."""
        yield from self._db.execute(
            "SELECT s.round, s.client, s.attack, s.example, s.metric, s.value, s.status, s.seconds, a.knowledge"
            " FROM scores s JOIN jobs j ON j.id = s.job_id JOIN attacks a ON a.id = j.attack_id"
            " WHERE ?1 IS NULL OR s.metric = ?1 ORDER BY s.round, s.client, s.attack, s.example, s.metric",
            (metric,),
        )

    # ---------------------------------------------------------------------------------------- reading what is new alone

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All that is read inside is of one moment; LedgerError where the file cannot be read."""
        try:
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            raise self._unreadable(error) from error

    def last_round(self) -> int:
        """The last round recorded; 0 before the first."""
        last: int | None = self._db.execute("SELECT max(round) FROM rounds").fetchone()[0]
        return last or 0

    def finished(self) -> int:
        """Where the jobs that have ended stand by now: 0 before the first, and more with each."""
        last: int | None = self._db.execute("SELECT max(finished) FROM jobs").fetchone()[0]
        return last or 0

    def scores_since(self, finished: int) -> Iterator[ScoreRow]:
        """Score rows of the jobs that ended, or were graded, after `finished` was told; no objectives, which grade nothing."""
        query = (
            "SELECT s.round, s.client, s.attack, s.example, s.metric, s.status, s.value"
            " FROM jobs j JOIN scores s ON s.job_id = j.id WHERE j.finished > ? AND s.metric != ?"
        )
        rows = self._db.cursor()
        rows.row_factory = None  # plain tuples: a large run has many
        yield from rows.execute(query, (finished, OBJECTIVE))

    def rounds_since(self, round: int) -> list[sqlite3.Row]:
        """Every round recorded from one on: round, accuracy, loss, seconds, intercept_seconds."""
        return self._db.execute("SELECT * FROM rounds WHERE round >= ? ORDER BY round", (round,)).fetchall()

    def observations_since(self, round: int) -> list[sqlite3.Row]:
        """Every client seen, rejected or missed from a round on: round, client, status, reason, examples, digest."""
        query = "SELECT * FROM observations WHERE round >= ? ORDER BY round, client"
        return self._db.execute(query, (round,)).fetchall()

    def pace(self, last: int = 100) -> float | None:
        """Jobs a minute over the last ones that ended; None before the second, and where an older fedgauge kept no times."""
        query = "SELECT count(ended), max(ended) - min(ended) FROM jobs WHERE finished > ?"
        n, seconds = self._db.execute(query, (self.finished() - last,)).fetchone()
        return 60 * (n - 1) / seconds if n > 1 and seconds > 0 else None

    def version(self) -> tuple[int, int]:
        """Equal to an earlier one as long as nobody has written since: microseconds, whatever the size."""
        (others,) = self._db.execute("PRAGMA data_version").fetchone()
        return others, self._db.total_changes

    def unfinished(self) -> list[sqlite3.Row]:
        """Jobs that have not ended, counted: attack, round, state, jobs, waves."""
        return self._db.execute(
            "SELECT a.name attack, j.round, j.state, count(*) jobs, count(DISTINCT j.wave) waves"
            " FROM jobs j JOIN attacks a ON a.id = j.attack_id WHERE j.state IN ('queued', 'leased')"
            " GROUP BY j.state, j.round, j.attack_id"
        ).fetchall()
