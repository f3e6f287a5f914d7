"""The job queue: attacks are planned, waves leased, and scores or errors written."""

import hashlib
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Literal

from fedgauge.attacks.base import LIMITS
from fedgauge.attacks.modality.membership import HELD, MEMBER
from fedgauge.attacks.plan import AttackPlan
from fedgauge.attacks.score_rows import OBJECTIVE, WHOLE_BATCH, ScoreRecord
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.ledger_reads import LedgerReads
from fedgauge.server.store.ledger_types import FinishedJob, Lease, Progress, planned_of
from fedgauge.server.store.tape import by_weights

# a wave of a stateful attack waits until the earlier rounds of all its clients have ended
_READY = (
    "NOT (SELECT remembers FROM attacks WHERE id = j.attack_id) OR NOT EXISTS (SELECT 1 FROM jobs own JOIN jobs earlier"
    " ON earlier.attack_id = own.attack_id AND earlier.client = own.client AND earlier.round < own.round"
    " WHERE own.state = 'queued' AND own.round = j.round AND own.attack_id = j.attack_id AND own.wave = j.wave"
    " AND earlier.state IN ('queued', 'leased'))"
)
# of a finished job
_FACTS = (
    "SELECT j.id, a.name attack, j.round, j.client, j.other, o.digest, coalesce(s.status, '') status,"
    " coalesce(s.seconds, 0.0) seconds, j.graded IS NULL blind, EXISTS (SELECT 1 FROM jobs w WHERE w.round = j.round"
    " AND w.state IN ('queued', 'leased')) open FROM jobs j JOIN attacks a ON a.id = j.attack_id"
    " LEFT JOIN observations o ON o.round = j.round AND o.client = j.client"
    " LEFT JOIN scores s ON s.job_id = j.id AND s.metric = ?"
)
_END = "finished = (SELECT coalesce(max(finished), 0) + 1 FROM jobs)"  # numbers the ended jobs in order


class JobQueue(LedgerReads):
    """Jobs of the ledger, each one attack on one client's update in one round."""

    def add_attacks(
        self, plan: AttackPlan, cards: Mapping[str, str], flat: Collection[str] = (), grading: str | None = None
    ) -> None:
        """Enter the plan's attacks with their threat-model cards.

        Args:
            flat: attacks without a derivative of the chain.
            grading: a sentence on the grading of reconstructions.

        Raises:
            LedgerError: a name belongs to an attack with other settings.
        """
        with self._transaction() as db:
            for planned in plan.attacks:
                known = db.execute("SELECT planned, seed FROM attacks WHERE name = ?", (planned.name,)).fetchone()
                spec = planned.to_json()
                if known is None:
                    said = None if planned.role in LIMITS else grading
                    facts = (planned.name, planned.role, planned.metric, spec, cards[planned.name], plan.seed)
                    insert = (
                        "INSERT INTO attacks (name, role, metric, planned, knowledge, seed, remembers, flat, grading)"
                        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
                    )
                    db.execute(insert, (*facts, planned.is_stateful, planned.name in flat, said))
                elif (known["planned"], known["seed"]) != (spec, plan.seed):
                    raise LedgerError(
                        f"{self.path} already has an attack called {planned.name!r} with other settings; give it a new name"
                    )

    def enqueue(self, plan: AttackPlan) -> None:
        """Add a job for every observation on the tape that the plan attacks; existing jobs stay."""
        with self._transaction() as db:
            taped = "SELECT round, client, digest FROM observations WHERE status = 'accepted' AND digest IS NOT NULL"
            rounds: dict[int, dict[int, str]] = {}
            for row in db.execute(taped).fetchall():
                rounds.setdefault(row["round"], {})[row["client"]] = row["digest"]
            for round, digests in sorted(rounds.items()):
                self._enqueue(db, plan, round, digests)

    def _enqueue(self, db: sqlite3.Connection, plan: AttackPlan, round: int, digests: Mapping[int, str]) -> None:
        ids = {row["name"]: row["id"] for row in db.execute("SELECT name, id FROM attacks")}
        for planned in plan.attacks:
            targets = plan.targets(round, digests, planned)
            for i, client in enumerate(targets):
                compared = len(targets) > 1 and planned.role != "baseline"
                other = targets[(i + 1) % len(targets)] if compared else None
                identity = (round, client, digests[client], planned.to_json(), plan.seed)
                key = hashlib.sha256(repr(identity).encode()).hexdigest()
                # the wave is fixed here, whatever the workers' speed
                db.execute(
                    "INSERT INTO jobs (key, attack_id, round, client, other, wave) VALUES (?, ?, ?, ?, ?, ?)"
                    " ON CONFLICT (key) DO NOTHING",
                    (key, ids[planned.name], round, client, other, i // plan.wave),
                )

    def release(self) -> None:
        """Return leased jobs to the queue after their attack service has ended."""
        with self._transaction() as db:
            db.execute("UPDATE jobs SET state = 'queued', attempts = attempts - 1 WHERE state = 'leased'")

    def lease(self) -> Lease | None:
        """Lease the next wave by round and the plan's order; None if no queued wave may begin.

        A wave of a stateful attack waits for the earlier rounds of its clients. All updates of a wave share the sent weights;
        clients with altered weights follow in a separate wave.
        """
        with self._transaction() as db:
            first = db.execute(
                f"SELECT round, attack_id, wave FROM jobs j WHERE state = 'queued' AND ({_READY})"
                " ORDER BY round, attack_id, wave LIMIT 1"
            ).fetchone()
            if first is None:
                return None
            jobs = db.execute(
                "SELECT j.id, j.client, j.other, j.attempts, o.digest FROM jobs j"
                " JOIN observations o USING (round, client) WHERE j.state = 'queued'"
                " AND j.round = ? AND j.attack_id = ? AND j.wave = ? ORDER BY j.client",
                tuple(first),
            ).fetchall()
            query = "SELECT planned, role, metric, seed, remembers FROM attacks WHERE id = ?"
            attack = db.execute(query, (first["attack_id"],)).fetchone()
            if attack is None or not jobs:
                raise LedgerError(f"{self.path} is damaged: it has jobs without their update or attack")
            jobs = by_weights(jobs, lambda job: job["digest"])[0]
            jobs = list({j["client"]: j for j in jobs}.values())  # a repeated round may have two
            db.executemany(
                "UPDATE jobs SET state = 'leased', attempts = attempts + 1 WHERE id = ?", [(j["id"],) for j in jobs]
            )
            memories = self._remember(db, jobs, first) if attack["remembers"] else {}
        return Lease(
            jobs=tuple(j["id"] for j in jobs),
            attack=planned_of(attack["planned"], attack["role"], attack["metric"], self.path),
            seed=attack["seed"],
            round=first["round"],
            clients=tuple(j["client"] for j in jobs),
            digests=tuple(j["digest"] or "" for j in jobs),
            others={j["client"]: j["other"] for j in jobs if j["other"] is not None},
            attempt=max(j["attempts"] for j in jobs) + 1,
            memories=memories,
        )

    @staticmethod
    def _remember(db: sqlite3.Connection, jobs: Sequence[sqlite3.Row], wave: sqlite3.Row) -> dict[int, tuple[int, str]]:
        """Return the latest memory of each client."""
        memories = {}
        for job in jobs:
            last = db.execute(
                "SELECT round, memory FROM jobs WHERE attack_id = ? AND client = ? AND round < ? AND memory IS NOT NULL"
                " ORDER BY round DESC, id DESC LIMIT 1",
                (wave["attack_id"], job["client"], wave["round"]),
            ).fetchone()
            if last is not None:
                memories[job["client"]] = (last["round"], last["memory"])
        return memories

    def finish(
        self,
        lease: Lease,
        rows: Mapping[int, Iterable[ScoreRecord]],
        reasons: Mapping[int, str | None] | None = None,
        memories: Mapping[int, str] | None = None,
        computed_on: str | None = None,
    ) -> None:
        """Write a wave's scores and mark its jobs done, in one transaction.

        Args:
            rows: by attacked client.
            reasons: of the attack's status, by client.
            memories: digest of a stateful attack's memory, by client.
            computed_on: device and precision.
        """
        with self._transaction() as db:
            for job, client in zip(lease.jobs, lease.clients, strict=True):
                self._write_scores(db, job, rows[client])
                values = ((reasons or {}).get(client), (memories or {}).get(client), computed_on, job)
                db.execute(
                    f"UPDATE jobs SET state = 'done', error = ?, memory = ?, computed_on = ?, {_END} WHERE id = ?",
                    values,
                )

    def retry(self, lease: Lease, error: str, split: bool = False) -> None:
        """Return a wave to the queue, if split with one job a wave."""
        with self._transaction() as db:
            wave = "-id" if split else "wave"  # negative numbers are free
            rows = [(error, job) for job in lease.jobs]
            db.executemany(f"UPDATE jobs SET state = 'queued', error = ?, wave = {wave} WHERE id = ?", rows)

    def fail(self, lease: Lease, error: str) -> None:
        """Mark a wave's jobs failed, each with a score row."""
        metric = lease.attack.metric or self.modality.main.metric
        with self._transaction() as db:
            for job, client in zip(lease.jobs, lease.clients, strict=True):
                db.execute(f"UPDATE jobs SET state = 'failed', error = ?, {_END} WHERE id = ?", (error, job))
                row = ScoreRecord(lease.round, client, lease.attack.name, WHOLE_BATCH, metric, None, "failed", 0.0)
                self._write_scores(db, job, [row])

    def retry_ended(self, statuses: Collection[str], wave: int) -> tuple[int, int]:
        """Return ended jobs to the queue; returns their number, and the number of jobs without an update.

        Later rounds of a stateful attack on the same client return with them.

        Args:
            statuses: failed, not_applicable.
            wave: size of new waves for split jobs.
        """
        own = "SELECT 1 FROM scores s JOIN attacks a ON a.id = jobs.attack_id WHERE s.job_id = jobs.id AND s.attack = a.name"
        marks = ", ".join("?" * len(statuses))
        taped = "EXISTS (SELECT 1 FROM observations o WHERE o.round = jobs.round AND o.client = jobs.client AND o.digest NOTNULL)"
        # failed jobs also have a row, with the status "failed"
        chosen = f"state IN ('done', 'failed') AND EXISTS ({own} AND s.status IN ({marks}))"
        after = (
            "state IN ('done', 'failed') AND (SELECT remembers FROM attacks WHERE id = jobs.attack_id) AND EXISTS (SELECT 1"
            " FROM chosen c WHERE c.attack_id = jobs.attack_id AND c.client = jobs.client AND c.round < jobs.round)"
        )
        every = f"WITH chosen AS (SELECT * FROM jobs WHERE {chosen} AND {taped})"
        ended = f"(({chosen}) OR ({after}))"
        rank = "(SELECT count(*) FROM jobs b WHERE b.attack_id = jobs.attack_id AND b.round = jobs.round AND b.id < jobs.id)"
        with self._transaction() as db:
            wanted = 2 * tuple(statuses)
            (gone,) = db.execute(f"{every} SELECT count(*) FROM jobs WHERE {ended} AND NOT {taped}", wanted).fetchone()
            ids = [row["id"] for row in db.execute(f"{every} SELECT id FROM jobs WHERE {ended} AND {taped}", wanted)]
            self._delete_scores(db, ids)
            db.executemany(
                "UPDATE jobs SET state = 'queued', attempts = 0, error = NULL, graded = NULL, graded_to = NULL,"
                f" memory = NULL, computed_on = NULL, wave = CASE WHEN wave < 0 THEN {rank} / ? ELSE wave END WHERE id = ?",
                [(wave, i) for i in ids],
            )
        return len(ids), gone

    def ungraded(self, again: bool = False) -> list[FinishedJob]:
        """Return finished reconstructions without grades, ordered by round, client and attack; baselines come last.

        Args:
            again: also those with grades, and those that could not be graded.
        """
        chosen = "j.state = 'done' AND s.metric NOTNULL AND (j.graded IS NULL OR ?)"
        order = "j.round, j.client, a.role = 'baseline', a.id"
        return self._finished(f"{chosen} ORDER BY {order}", again)

    def _finished(self, chosen: str, *values: str | bool) -> list[FinishedJob]:
        rows = self._db.execute(f"{_FACTS} WHERE {chosen}", (OBJECTIVE, *values))
        return [FinishedJob(**dict(row)) for row in rows]

    def grade(
        self,
        job: int,
        rows: Sequence[ScoreRecord],
        reason: str | None = "",
        graded_to: float | None = None,
        afresh: bool = False,
    ) -> None:
        """Write the scores of a finished job.

        Args:
            reason: for a missing grade; empty: graded; None: not asked yet.
            graded_to: dB, to which the client rounds.
            afresh: replace all earlier scores.
        """
        with self._transaction() as db:
            if afresh:
                db.execute("DELETE FROM scores WHERE job_id = ? AND metric != ?", (job, OBJECTIVE))
            self._write_scores(db, job, rows)
            db.execute("UPDATE jobs SET graded = ?, graded_to = ? WHERE id = ?", (reason, graded_to, job))

    def finished_tests(self) -> list[FinishedJob]:
        """Return the finished jobs of membership tests and their limits in order, also those that could not be graded."""
        chosen = "(j.state = 'done' OR j.graded NOTNULL) AND a.metric IN (?, ?) ORDER BY a.id, j.round, j.client"
        return self._finished(chosen, MEMBER, HELD)

    def retest(self, job: int, rows: Sequence[ScoreRecord], reason: str) -> None:
        """Replace all rows of a finished membership test, which may have failed; reason: for a missing number."""
        state = "failed" if any(row.status == "failed" for row in rows) else "done"
        with self._transaction() as db:
            self._delete_scores(db, [job])
            self._write_scores(db, job, rows)
            values = (state, reason or None, reason, job)
            db.execute("UPDATE jobs SET state = ?, error = ?, graded = ? WHERE id = ?", values)

    def graded(self) -> list[sqlite3.Row]:
        """Count finished jobs by grading: attack, reason for a missing grade (NULL: not asked yet), graded_to, number of jobs."""
        return self._db.execute(
            "SELECT a.name attack, graded reason, graded_to, count(*) jobs FROM jobs JOIN attacks a ON a.id = attack_id"
            " WHERE state = 'done' GROUP BY a.id, graded, graded_to ORDER BY a.id, jobs DESC, reason, graded_to"
        ).fetchall()

    def describe(self, part: Literal["knowledge", "training", "grading"], words: Mapping[str, str]) -> None:
        """Replace a part of the cards of some attacks: knowledge, fit of the training, or grading."""
        with self._transaction() as db:
            rows = [(text or None, name) for name, text in words.items()]
            db.executemany(f"UPDATE attacks SET {part} = ? WHERE name = ?", rows)

    @staticmethod
    def _delete_scores(db: sqlite3.Connection, jobs: Iterable[int]) -> None:
        db.executemany("DELETE FROM scores WHERE job_id = ?", [(job,) for job in jobs])

    @staticmethod
    def _write_scores(db: sqlite3.Connection, job: int, rows: Iterable[ScoreRecord]) -> None:
        db.executemany(
            "INSERT INTO scores VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(job, r.attack, r.client, r.example, r.metric, r.round, r.value, r.status, r.seconds) for r in rows],
        )

    def progress(self) -> Progress:
        counts = {r["state"]: r["n"] for r in self._db.execute("SELECT state, count(*) n FROM jobs GROUP BY state")}
        return Progress(**{f.name: counts.get(f.name, 0) for f in fields(Progress)})

    def deletable(self) -> dict[int, list[int]]:
        """Return the clients with updates on the tape that no attack needs, by round."""
        rows = self._db.execute(
            "SELECT round, client FROM observations o WHERE digest IS NOT NULL AND NOT EXISTS (SELECT 1 FROM jobs j"
            " WHERE j.round = o.round AND j.state IN ('queued', 'leased')) ORDER BY round, client"
        )
        clients: dict[int, list[int]] = {}
        for row in rows:
            clients.setdefault(row["round"], []).append(row["client"])
        return clients

    def mark_deleted(self, round: int) -> None:
        with self._transaction() as db:
            db.execute("UPDATE observations SET digest = NULL WHERE round = ?", (round,))
