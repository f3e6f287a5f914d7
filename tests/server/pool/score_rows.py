"""A run's score rows, to compare two runs."""

from typing import Any

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
