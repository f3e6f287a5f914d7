"""What a run's ledger says of its scores and jobs, to compare two runs."""

from typing import Any

from fedgauge.server.store.ledger_types import Progress
from fedgauge.server.store.run import Run

Score = tuple[Any, ...]


def score_rows(run: Run) -> list[Score]:
    """Every score but its seconds, the value's bits in hexadecimal."""
    with run.ledger() as ledger:
        return [
            (r["round"], r["client"], r["attack"], r["example"], r["metric"], r["status"],
             None if r["value"] is None else float(r["value"]).hex())
            for r in ledger.scores()
        ]  # fmt: skip


def progress(run: Run) -> Progress:
    with run.ledger() as ledger:
        return ledger.progress()


def errors(run: Run) -> dict[tuple[str, int, int], str]:
    """By attack, round and client: a failed job's error."""
    query = "SELECT a.name, j.round, j.client, j.error FROM jobs j JOIN attacks a ON a.id = j.attack_id"
    with run.ledger() as ledger:
        return {(r[0], r[1], r[2]): r[3] for r in ledger._db.execute(f"{query} WHERE j.state = 'failed'")}
