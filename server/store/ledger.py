"""The ledger: one SQLite file per run with rounds, observations, jobs and scores."""

import json
import re
from collections.abc import Sequence
from dataclasses import astuple, replace

from fedgauge.attacks.plan import AttackPlan
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.ledger_queue import JobQueue
from fedgauge.server.store.ledger_types import (
    DEPLOYMENT,
    OWN,
    Participation,
    RecordedProblem,
    sanitised,
)

_MOST_PROBLEMS = 1000


class Ledger(JobQueue):
    """Ledger of one run: rounds, the queue of attacks, and all queries."""

    def set_meta(self, **values: str) -> None:
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def meta(self) -> dict[str, str]:
        facts = {row["key"]: row["value"] for row in self._db.execute("SELECT key, value FROM meta")}
        if not re.fullmatch(r"\d{1,7}", rounds := facts.get("rounds", "0")):
            raise LedgerError(f"{self.path} is damaged: expected a number of rounds, got {rounds!r:.60}")
        return facts

    @property
    def training_fits(self) -> bool | None:
        """True if the assumed training of a foreign app explains its updates; None: unknown."""
        return {"True": True, "False": False}.get(self.meta().get("training_fits", ""))

    @property
    def deployed(self) -> bool:
        """True for a deployment: the training data is elsewhere."""
        return self.meta().get("mode") == DEPLOYMENT

    @property
    def graded_by_clients(self) -> bool:
        """True if clients graded, so that examples are numbered in the order of the reconstruction."""
        if not self.deployed:
            return False
        (found,) = self._db.execute("SELECT EXISTS (SELECT 1 FROM jobs WHERE graded_to NOTNULL)").fetchone()
        return bool(found)

    @property
    def foreign(self) -> bool:
        """True if a user's own app trains the run."""
        return self.deployed and OWN not in self.meta()

    def nodes(self) -> dict[int, str]:
        """Return Flower's node ids by client of a user's own app."""
        try:
            nodes = json.loads(self.meta().get("nodes", "{}"))
            return {int(client): str(int(node)) for client, node in nodes.items()}
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise LedgerError(f"{self.path} is damaged: its nodes cannot be read: {error}") from error

    def record_round(self, round: int, accuracy: float | None, loss: float | None, seconds: float) -> None:
        """Record a round (0: before training) with the test accuracy and loss after it."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?)", (round, accuracy, loss, seconds))

    def record_intake(self, round: int, seen: Sequence[Participation], plan: AttackPlan | None = None) -> None:
        """Record the participation in a round, and add its jobs in the same transaction."""
        with self._transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO observations VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(round, *astuple(replace(s, reason=sanitised(s.reason)))) for s in seen],
            )
            if plan is not None:
                self._enqueue(
                    db, plan, round, {s.client: s.digest for s in seen if s.status == "accepted" and s.digest}
                )

    def add_problem(self, code: str, words: str, round: int | None = None, client: int | None = None) -> None:
        """Record a problem, once for each code, round and client."""
        row = (sanitised(code), round, client, sanitised(words))
        with self._transaction() as db:
            db.execute(
                "INSERT INTO problems SELECT ?1, ?2, ?3, ?4 WHERE (SELECT count(*) FROM problems) < ?5"
                " AND NOT EXISTS (SELECT 1 FROM problems WHERE code = ?1 AND round IS ?2 AND client IS ?3)",
                (*row, _MOST_PROBLEMS),
            )

    def problems(self) -> list[RecordedProblem]:
        query = "SELECT code, round, client, words FROM problems ORDER BY rowid LIMIT ?"
        return [RecordedProblem(*row) for row in self._db.execute(query, (_MOST_PROBLEMS,))]

    def rewind(self, round: int) -> None:
        """Delete the rounds from this one on, which are trained again."""
        with self._transaction() as db:
            db.execute("DELETE FROM scores WHERE job_id IN (SELECT id FROM jobs WHERE round >= ?)", (round,))
            for table in ("jobs", "observations", "rounds", "problems"):
                db.execute(f"DELETE FROM {table} WHERE round >= ?", (round,))
