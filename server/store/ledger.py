"""The ledger: one SQLite file per run, with rounds, observations, jobs and scores; every write is one transaction."""

from collections.abc import Sequence

from fedgauge.attacks.plan import AttackPlan
from fedgauge.server.store.ledger_reads import LedgerReads
from fedgauge.server.store.ledger_types import DEPLOYMENT, Participation, sanitised
from fedgauge.server.store.ledger_writes import JobQueue


class Ledger(JobQueue, LedgerReads):
    """One run's ledger: what happened in its rounds, with the queue of attacks and all queries."""

    def set_meta(self, **values: str) -> None:
        """Set facts about the whole run: its state, its replay check."""
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def meta(self) -> dict[str, str]:
        """All facts about the run."""
        return {row["key"]: row["value"] for row in self._db.execute("SELECT key, value FROM meta")}

    @property
    def deployed(self) -> bool:
        """Whether the run is a deployment, whose training data is not on this machine."""
        return self.meta().get("mode") == DEPLOYMENT

    def record_round(self, round: int, accuracy: float, loss: float, seconds: float, intercept_seconds: float) -> None:
        """Record test accuracy and loss after a round (0: before training), the seconds of the round and of its interception."""
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?)",
                (round, accuracy, loss, seconds, intercept_seconds),
            )

    def record_intake(self, round: int, seen: Sequence[Participation], plan: AttackPlan | None = None) -> None:
        """Record what each client did in a round, and add the jobs that the plan derives from it, in one transaction."""
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
        """Delete everything about the rounds from this one on, which are trained again."""
        with self._transaction() as db:
            db.execute("DELETE FROM scores WHERE job_id IN (SELECT id FROM jobs WHERE round >= ?)", (round,))
            for table in ("jobs", "observations", "rounds"):
                db.execute(f"DELETE FROM {table} WHERE round >= ?", (round,))
