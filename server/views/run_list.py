"""The list of runs: one line for each, made without reading all its scores."""

from typing import Any

from fedgauge.server.store.ledger_connection import reads_again
from fedgauge.server.store.run import Run
from fedgauge.server.views import formatting
from fedgauge.server.views.reading import state_of, tables_of, version_of
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.scores import best_so_far


@reads_again
def run_summary(run: Run) -> dict[str, Any]:
    """State, rounds, chain, attacks, accuracy, and the best PSNR (of text, ROUGE-1) so far; LedgerError if it cannot be read."""
    run.check(whole=False)
    tables = tables_of(run)
    with run.ledger(readonly=True) as ledger:
        progress, last = ledger.progress(), ledger.last_round()
        rounds = ledger.rounds_since(last)
        measure, best = best_so_far(ledger)
        return {
            "id": run.name,
            "state": state_of(run, ledger),
            "version": version_of(run, ledger),
            "round": last,
            "rounds": int(ledger.meta().get("rounds") or tables["rounds"]),
            "chain": formatting.chain(tables),
            "data": formatting.component(tables["data"]),
            "model": formatting.component(tables["model"]),
            "attacks": [row["name"] for row in ledger.attacks() if is_attack(row["name"])],
            "accuracy": formatting.rounded(rounds[-1]["accuracy"]) if rounds else None,
            "best": formatting.rounded(best),
            "exact": formatting.is_exact(best),
            "measure": measure.metric,
            "measured": measure.name,
            "progress": {**vars(progress), "total": progress.total},
        }
