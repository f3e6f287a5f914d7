"""Queries of the ledger: rounds, observations, scores."""

import sqlite3
from collections.abc import Callable, Iterator
from typing import Literal

from fedgauge.attacks.grading.knowledge_card import SEPARATOR
from fedgauge.attacks.modality.base import Modality
from fedgauge.attacks.modality.registry import modality_measured, modality_stored
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.score_rows import OBJECTIVE, WHOLE_BATCH, wrong_client
from fedgauge.server.store.ledger_file import LedgerError, LedgerFile
from fedgauge.server.store.ledger_types import DEPLOYMENT, MAIN_METRIC, UNGRADED, ScoreRow, planned_of

# an attack's card: what was agreed, then the results
_CARD = f"a.knowledge || coalesce('{SEPARATOR}' || a.training, '') || coalesce('{SEPARATOR}' || a.grading, '')"


class LedgerReads(LedgerFile):
    """Queries that change nothing."""

    load_data: Callable[[], object] = staticmethod(lambda: None)  # loads the package that adds the run's kind of data

    @property
    def modality(self) -> type[Modality]:
        """Kind of the run's data.

        Raises:
            LedgerError: it is unknown here.
        """
        named = self._db.execute("SELECT value FROM meta WHERE key = ?", (MAIN_METRIC,)).fetchone()
        if named is None:
            rows = self._db.execute("SELECT DISTINCT metric FROM scores")
            return modality_measured([row["metric"] for row in rows])
        fault: Exception | None = None
        if (found := modality_stored(named["value"])) is None:
            try:
                self.load_data()
                found = modality_stored(named["value"])
            except (OSError, ValueError) as error:
                fault = error
        if found is None:
            raise LedgerError(
                f"{self.path}: no data known here has the metric {named['value']!r:.60}: {fault}"
            ) from fault
        return found

    def reasons(self, state: Literal["done", "failed"] = "done") -> list[sqlite3.Row]:
        """Return the reasons of finished (or failed) jobs, the most frequent first: attack, reason, number of jobs."""
        return self._db.execute(
            "SELECT a.name attack, error reason, count(*) jobs FROM jobs JOIN attacks a ON a.id = attack_id"
            " WHERE state = ? AND error IS NOT NULL GROUP BY a.id, error ORDER BY jobs DESC, a.id, reason",
            (state,),
        ).fetchall()

    def outcomes(self) -> list[sqlite3.Row]:
        """Count the ended jobs: attack, role, status (an attack's own, or "failed"), number of jobs."""
        return self._db.execute(
            "SELECT a.name attack, a.role, count(*) jobs, coalesce((SELECT min(s.status) FROM scores s"
            " WHERE s.job_id = j.id AND s.attack = a.name), j.state) status FROM jobs j JOIN attacks a ON a.id = j.attack_id"
            " WHERE j.state IN ('done', 'failed') GROUP BY a.id, 4 ORDER BY a.id, 4"
        ).fetchall()

    def fates(self) -> list[sqlite3.Row]:
        """Return the status of each update with an attack: round, client, status.

        The status is attacked if one attack ended with a result, else waiting, failed or not applicable.
        """
        inapplicable = "EXISTS (SELECT 1 FROM scores s WHERE s.job_id = j.id AND s.attack = a.name AND s.status = 'not_applicable')"
        return self._db.execute(
            "SELECT round, client, CASE min(fate) WHEN 0 THEN 'attacked' WHEN 1 THEN 'waiting' WHEN 2 THEN 'failed'"
            " ELSE 'not applicable' END status FROM (SELECT j.round, j.client, CASE j.state WHEN 'failed' THEN 2"
            f" WHEN 'done' THEN CASE WHEN {inapplicable} THEN 3 ELSE 0 END ELSE 1 END fate"
            " FROM jobs j JOIN attacks a ON a.id = j.attack_id"
            " WHERE a.role = 'attack') GROUP BY round, client"
        ).fetchall()

    def devices(self) -> list[str]:
        """Return how the attacks' results were computed, each device and precision once."""
        rows = self._db.execute(
            "SELECT DISTINCT computed_on FROM jobs JOIN attacks a ON a.id = attack_id"
            " WHERE a.role = 'attack' AND computed_on NOTNULL ORDER BY 1"
        )
        return [row["computed_on"] for row in rows]

    def rounds(self, since: int = 0) -> list[sqlite3.Row]:
        return self._db.execute("SELECT * FROM rounds WHERE round >= ? ORDER BY round", (since,)).fetchall()

    def observations(self, since: int = 0) -> list[sqlite3.Row]:
        query = "SELECT * FROM observations WHERE round >= ? ORDER BY round, client"
        return self._db.execute(query, (since,)).fetchall()

    def attacks(self) -> list[sqlite3.Row]:
        """Return the attacks: name, role, metric, planned, knowledge (the whole card, with its three parts), seed, flat."""
        return self._db.execute(
            f"SELECT name, role, metric, planned, {_CARD} knowledge, a.knowledge agreed, training, grading,"
            " seed, flat FROM attacks a ORDER BY id"
        ).fetchall()

    def planned(self) -> dict[str, PlannedAttack]:
        return {r["name"]: planned_of(r["planned"], r["role"], r["metric"], self.path) for r in self.attacks()}

    def best_so_far(self) -> float | None:
        """Return the best value of an attack in the main metric; None before the first."""
        main = self.modality.main
        query = (
            f"SELECT {'max' if main.higher_is_better else 'min'}(s.value) best FROM scores s JOIN jobs j ON j.id = s.job_id"
            " JOIN attacks a ON a.id = j.attack_id WHERE s.metric = ? AND s.attack = a.name"
            " AND s.value IS NOT NULL AND a.role = 'attack'"
        )
        best: float | None = self._db.execute(query, (main.metric,)).fetchone()["best"]
        return best

    def scores(self, metric: str | None = None) -> Iterator[sqlite3.Row]:
        """Yield score rows in a stable order: round, client, attack, example, metric, value, status, seconds, knowledge."""
        rows = self._db.execute(
            "SELECT round, client, attack, example, metric, value, status, seconds,"
            f" (SELECT {_CARD} FROM attacks a WHERE a.id = attack_id) knowledge FROM (SELECT s.*, j.attack_id FROM scores s"
            " JOIN jobs j ON j.id = s.job_id JOIN attacks a ON a.id = j.attack_id WHERE ?1 IS NULL OR s.metric = ?1"
            # with a limit it is sorted by itself, and not with every row's card
            " ORDER BY s.round, s.client, s.attack, s.example, s.metric LIMIT -1)",
            (metric,),
        )
        yield from rows

    def last_round(self) -> int:
        """Return the last recorded round; 0 before the first."""
        return self._latest("rounds")

    def last_observed(self) -> int:
        """Return the last round with a client; 0 before the first."""
        return self._latest("observations")

    def _latest(self, table: str) -> int:
        return self._db.execute(f"SELECT max(round) FROM {table}").fetchone()[0] or 0

    def score_rows(self) -> Iterator[ScoreRow]:
        """Yield all score rows without objectives.

        A reconstruction without a grade has one row of status UNGRADED.
        """
        blind = f"EXISTS (SELECT 1 FROM meta WHERE key = 'mode' AND value = '{DEPLOYMENT}')"
        # an attack scores under its own name
        own = "s.attack IN (a.name, printf('" + wrong_client("%s") + "', a.name))"
        of = f"FROM jobs j JOIN scores s ON s.job_id = j.id JOIN attacks a ON a.id = j.attack_id AND {own}"
        query = (
            f"SELECT s.round, s.client, s.attack, s.example, s.metric, s.status, s.value"
            f" {of} WHERE s.metric != ?1"
            f" UNION ALL SELECT s.round, s.client, s.attack, {WHOLE_BATCH}, ?2, '{UNGRADED}', NULL"
            f" {of} WHERE {blind} AND s.metric = ?1"
            " AND j.graded IS NULL AND NOT EXISTS (SELECT 1 FROM scores g WHERE g.job_id = j.id AND g.metric != s.metric)"
        )
        rows = self._db.execute(query, (OBJECTIVE, self.modality.main.metric))
        rows.row_factory = None
        yield from rows

    def size_of(self, round: int, client: int) -> int:
        """Return the number of examples that a client claims for its update; 1 if it claims none."""
        row = self._db.execute("SELECT examples FROM observations WHERE round = ? AND client = ?", (round, client))
        (examples,) = row.fetchone() or (None,)
        return max(1, examples or 1)

    def seconds_left(self, to_come: int = 0) -> float | None:
        """Estimate the time until all jobs have ended, at each attack's latest seconds; None until each has ended once.

        Args:
            to_come: number of further jobs, in the present proportions.
        """
        query = (
            "SELECT count(*), sum(state IN ('queued', 'leased')), (SELECT s.seconds FROM jobs f JOIN scores s ON s.job_id = f.id"
            " WHERE f.attack_id = j.attack_id AND f.state = 'done' ORDER BY f.finished DESC LIMIT 1)"
            " FROM jobs j GROUP BY attack_id"
        )
        rows = self._db.execute(query).fetchall()
        if not rows or any(seconds is None for _, _, seconds in rows):
            return None
        more = to_come / sum(jobs for jobs, _, _ in rows)
        work = sum((waiting + more * jobs) * seconds for jobs, waiting, seconds in rows)
        at_work = "SELECT count(*) FROM (SELECT DISTINCT round, attack_id, wave FROM jobs WHERE state = 'leased')"
        (waves,) = self._db.execute(at_work).fetchone()
        return float(work / max(1, waves))
