"""The list of runs: how each stands, in a line, without reading its scores."""

from typing import Any

from fedgauge.server.store.run import Run
from fedgauge.server.views import analysis
from fedgauge.server.views import format as words
from fedgauge.server.views.reading import state_of, tables_of


def in_a_line(run: Run) -> dict[str, Any]:
    """State, rounds, chain, attacks, accuracy, and the best PSNR (of text, ROUGE-1) so far; LedgerError where it cannot be read."""
    tables = tables_of(run)
    with run.ledger(readonly=True) as ledger:
        progress, last = ledger.progress(), ledger.last_round()
        rounds = ledger.rounds_since(last)
        measure, best = analysis.best_so_far(ledger)
        return {
            "id": run.name,
            "state": state_of(run, ledger),
            "round": last,
            "rounds": tables["rounds"],
            "chain": words.chain(tables),
            "data": words.component(tables["data"]),
            "model": words.component(tables["model"]),
            "attacks": [row["name"] for row in ledger.attacks() if analysis.is_attack(row["name"])],
            "accuracy": words.rounded(rounds[-1]["accuracy"]) if rounds else None,
            "best": words.rounded(best),
            "exact": words.is_exact(best),
            "measure": measure.metric,
            "progress": {**vars(progress), "total": progress.total},
        }
